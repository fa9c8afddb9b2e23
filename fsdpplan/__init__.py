"""Plan distributed PyTorch training: layout, launch script, run, and check of the prediction.

    import fsdpplan

    plan = fsdpplan.recommend(
        fsdpplan.load_model("llama-3.1-8b"),
        fsdpplan.load_cluster("dgx-h100", gpus=16),
        fsdpplan.Training(seq_len=4096, global_batch=256),
    )
    print(fsdpplan.emit_launch(plan))

Each name is imported when it is first asked for, so that `import fsdpplan` takes no time.
"""

TYPE_CHECKING = False  # typing takes longer to import than all else here
if TYPE_CHECKING:
    from fsdpplan.answers import (
        Bill,
        Check,
        Comparison,
        Goodput,
        Replanned,
        Rules,
        Sensitivities,
        Sweep,
        WhatIf,
        Why,
    )
    from fsdpplan.api import (
        bill,
        check,
        compare,
        emit_launch,
        estimate,
        goodput,
        load_cluster,
        load_model,
        load_plan,
        min_gpus,
        recommend,
        replan,
        rules,
        save_plan,
        sensitivities,
        sweep,
        what_if,
        why,
    )
    from fsdpplan.emit.job import Job
    from fsdpplan.emit.pods import Pods
    from fsdpplan.errors import FsdpPlanError, NoFeasibleLayout, SpecError
    from fsdpplan.spec.cluster import Cluster
    from fsdpplan.spec.layout import Layout
    from fsdpplan.spec.model import Model
    from fsdpplan.spec.plan import Estimate, Plan
    from fsdpplan.spec.training import Training

__version__ = "0.2.0"

__all__ = [
    "Bill",
    "Check",
    "Cluster",
    "Comparison",
    "Estimate",
    "FsdpPlanError",
    "Goodput",
    "Job",
    "Layout",
    "Model",
    "NoFeasibleLayout",
    "Plan",
    "Pods",
    "Replanned",
    "Rules",
    "Sensitivities",
    "SpecError",
    "Sweep",
    "Training",
    "WhatIf",
    "Why",
    "bill",
    "check",
    "compare",
    "emit_launch",
    "estimate",
    "goodput",
    "load_cluster",
    "load_model",
    "load_plan",
    "min_gpus",
    "recommend",
    "replan",
    "rules",
    "save_plan",
    "sensitivities",
    "sweep",
    "what_if",
    "why",
]

_HOMES = {
    "Bill": "answers",
    "Check": "answers",
    "Comparison": "answers",
    "Goodput": "answers",
    "Replanned": "answers",
    "Rules": "answers",
    "Sensitivities": "answers",
    "Sweep": "answers",
    "WhatIf": "answers",
    "Why": "answers",
    "Cluster": "spec.cluster",
    "Estimate": "spec.plan",
    "FsdpPlanError": "errors",
    "Job": "emit.job",
    "Layout": "spec.layout",
    "Model": "spec.model",
    "NoFeasibleLayout": "errors",
    "Plan": "spec.plan",
    "Pods": "emit.pods",
    "SpecError": "errors",
    "Training": "spec.training",
}
"""Name -> its module; all others are of `api`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
