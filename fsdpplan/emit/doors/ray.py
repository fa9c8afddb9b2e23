"""Ray Train: a Python script whose workers run the reference trainer in their own process.

Source: ray 2.60 (PyPI): ray/train/__init__.py, ray/air/config.py (ScalingConfig, RunConfig,
FailureConfig), ray/train/torch/config.py (TorchConfig joins the process group and sets RANK,
LOCAL_RANK and WORLD_SIZE before the function of a worker begins).
"""

from __future__ import annotations

from fsdpplan.emit.job import later_starts
from fsdpplan.emit.nccl.cloud import cloud_scripts
from fsdpplan.emit.nccl.environment import environment
from fsdpplan.emit.nccl.variables import require_debug_meaning
from fsdpplan.emit.order import Order, differing, refuse_others
from fsdpplan.emit.segments import unsaid_lines
from fsdpplan.emit.slurm.header import header_lines, plan_lines
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

_JOB = frozenset(
    {"program", "job_name", "env", "nccl_debug", "metrics", "cpus_per_task", "survival"}
)


def render(order: Order) -> str:
    """The script. Raises SpecError for what Ray Train has no word for."""
    refuse_others(order, target="ray", job=_JOB, pods=frozenset())
    _require_sayable(order)
    plan_lines(order.plan_json)  # which refuses a plan that no environment can hold
    sections = [
        [
            *header_lines(
                plan=order.plan, plan_json=order.plan_json, version=order.version, job=order.job
            ),
            *_usage(order),
        ],
        ['"""The plan as a job of Ray Train."""'],
        [
            "import os",
            "import runpy",
            "import sys",
            "",
            "import ray",
            "import ray.train",
            "from ray.train import FailureConfig, RunConfig, ScalingConfig",
            "from ray.train.torch import TorchConfig, TorchTrainer",
        ],
        _values(order),
        ["", *_worker(order)],
        ["", *_main(order)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _require_sayable(order: Order) -> None:
    require_debug_meaning(plan=order.plan, job=order.job)
    unknown = [name for name in differing(order.job.survival, Survival()) if name != "retries"]
    if unknown:
        flags = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise SpecError(f"{flags} is Slurm's, and --target ray has no word for it: leave it out")
    if scripts := cloud_scripts(order.plan):
        raise SpecError(
            f"--target ray cannot run {scripts[0].path} before Python starts, and the plan's "
            "network wants it: use --target slurm, ssh or skypilot"
        )


def _usage(order: Order) -> list[str]:
    nodes = order.plan.cluster.nodes
    return [
        "#",
        f"# On a Ray cluster of {nodes} node(s), with ray 2.60 or newer, torch and fsdpplan "
        f"{order.version} on each:",
        "#   python THIS_FILE            (RAY_ADDRESS says which cluster)",
        "#   ray job submit --working-dir . -- python THIS_FILE",
        *unsaid_lines(
            order.plan,
            "Ray numbers workers by their hosts' addresses and cannot ask for hosts of one domain: "
            "give it a cluster of one domain, or use --target slurm or kubernetes.",
        ),
    ]


def _values(order: Order) -> list[str]:
    plan = order.plan
    return [
        "# The plan travels in the environment of each worker.",
        "PLAN = (",
        *(f"    {line!r}" for line in order.plan_json.rstrip("\n").splitlines(keepends=True)),
        ")",
        "",
        "# Whoever starts this may have exported other values.",
        "SETTINGS = {",
        *(f"    {name!r}: {value}," for name, value in _settings(order)),
        "}",
        "",
        f"RANKS = {plan.cluster.gpus}",
        f"RANKS_PER_NODE = {plan.cluster.gpus_per_node}",
        f"ARGUMENTS = {list(_arguments(order))!r}",
    ]


def _settings(order: Order) -> list[tuple[str, str]]:
    """Names of variables, and Python that gives their values."""
    found = [(name, repr(value)) for name, value in order.job.env]
    found += [
        (variable.name, f"os.environ.get({variable.name!r}, {variable.value!r})")
        for variable in environment(plan=order.plan, job=order.job)
        if not variable.expands and not variable.on_node
    ]
    if order.plan.cluster.device.kind == "cuda":
        setting = "expandable_segments:True"
        found += [
            (variable.name, f"os.environ.get({variable.name!r}, {setting!r})")
            for variable in environment(plan=order.plan, job=order.job)
            if variable.kind == "allocator"
        ]
    return found


def _arguments(order: Order) -> tuple[str, ...]:
    program, metrics = order.job.program, order.job.metrics
    if not isinstance(program, Trainer) or metrics is None:
        return program.words()
    return (*program.words(), f"--metrics={metrics}")


def _worker(order: Order) -> list[str]:
    program = order.job.program
    lines = [
        "def worker() -> None:",
        '    """One rank. Ray has joined the process group and named the ranks."""',
        "    context = ray.train.get_context()",
        "    if context.get_local_world_size() != RANKS_PER_NODE:",
        "        raise RuntimeError(",
        '            f"the plan has {RANKS_PER_NODE} ranks a node, and Ray put "',
        '            f"{context.get_local_world_size()} on this one: give it whole nodes"',
        "        )",
        '    os.environ["FSDPPLAN_PLAN"] = PLAN',
    ]
    if not isinstance(program, Trainer):
        return [
            *lines,
            f"    sys.argv = [{program.script!r}, *ARGUMENTS]",
            f'    runpy.run_path({program.script!r}, run_name="__main__")',
        ]
    return [
        *lines,
        "    import fsdpplan",
        "    from fsdpplan.trainer.options import parse_options",
        "    from fsdpplan.trainer.train import run_training",
        "",
        f"    if fsdpplan.__version__ != {order.version!r}:",
        "        raise RuntimeError(",
        '            f"fsdpplan {fsdpplan.__version__} is installed here, and fsdpplan '
        f'{order.version} wrote this"',
        "        )",
        "    run_training(parse_options(ARGUMENTS))",
    ]


def _main(order: Order) -> list[str]:
    plan, job = order.plan, order.job
    return [
        'if __name__ == "__main__":',
        '    ray.init(runtime_env={"env_vars": SETTINGS})',
        "    TorchTrainer(",
        "        worker,",
        f"        torch_config=TorchConfig(backend={_backend(plan)!r}),",
        "        scaling_config=ScalingConfig(",
        "            num_workers=RANKS,",
        f"            use_gpu={plan.cluster.device.kind == 'cuda'},",
        f"            resources_per_worker={_resources(order)!r},",
        f"            placement_strategy={_placement(plan)!r},",
        "        ),",
        "        run_config=RunConfig(",
        f"            name={job.job_name!r},",
        f"            failure_config=FailureConfig(max_failures={_failures(order)}),",
        "        ),",
        "    ).fit()",
    ]


def _backend(plan: Plan) -> str:
    if plan.cluster.device.kind == "cpu":
        return "gloo"
    # Offloaded gradients are on the host, where their norm is agreed upon.
    return "cpu:gloo,cuda:nccl" if plan.layout.offload == "cpu" else "nccl"


def _placement(plan: Plan) -> str:
    return "STRICT_PACK" if plan.cluster.nodes == 1 else "PACK"


def _resources(order: Order) -> dict[str, int] | None:
    """What one rank takes; None: Ray's own, a GPU and a core. Cores are asked for by the node."""
    cluster, cores = order.plan.cluster, order.job.cpus_per_task
    if cores is None:
        return None
    share = {"CPU": max(1, cores // cluster.gpus_per_node)}
    return {**share, "GPU": 1} if cluster.device.kind == "cuda" else share


def _failures(order: Order) -> int:
    """Ray starts again after any fault: only where there is something to go on from."""
    program = order.job.program
    saves = isinstance(program, Trainer) and program.checkpoint_dir is not None
    return later_starts(order.job) if saves else 0
