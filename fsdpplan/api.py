"""What the commands do, from Python: `import fsdpplan` has these functions and the nouns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdpplan.cost.step import estimate as predicted
from fsdpplan.emit.job import Job
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files import catalogue, clusters
from fsdpplan.files.huggingface.config import read_hf_config
from fsdpplan.files.plans import write_plan
from fsdpplan.run.launch import launch_text
from fsdpplan.run.plans import new_plan, read_plan
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend as ranked_layouts
from fsdpplan.search.rules.legality import legal_layout_problem, question_problem
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Estimate, Plan
from fsdpplan.spec.training import Training


def load_model(name: str | Path) -> Model:
    """A model of the catalogue by its name, or of a Hugging Face `config.json` by its path.

    Raises SpecError, with the nearest names.
    """
    if isinstance(name, Path) or name.endswith(".json"):
        return read_hf_config(name).model
    return catalogue.load_model(name)


def load_cluster(hardware: str | Path, *, gpus: int | None = None, **flags: Any) -> Cluster:
    """`gpus` devices of a hardware profile, by name or path; all that it has if None.

    `flags` lie over it: `gpus_per_node`, `domain_gpus` (of each NVLink domain that joins nodes),
    `device`, `intra_bandwidth_bytes_per_second` and `inter_bandwidth_bytes_per_second`, per GPU and
    one direction.
    """
    return clusters.load_cluster(str(hardware), gpus=gpus, **flags).cluster


def recommend(model: Model, cluster: Cluster, training: Training, **pins: Any) -> Plan:
    """The best plan, with its runners-up as `alternatives`.

    `pins` fix parts of the layout by the names of its fields: `tp=8`, `sharding="fsdp"`. Past runs
    are not asked. Raises SpecError for what no layout can obey, NoFeasibleLayout where none fits.
    """
    fixed = Pins(**pins)
    problem = question_problem(model=model, cluster=cluster, training=training, pins=fixed)
    if problem is not None:
        raise SpecError(problem)
    found = ranked_layouts(model=model, cluster=cluster, training=training, pins=fixed)
    if not found.ranked:
        raise NoFeasibleLayout(
            f"no layout of {model.name} on {cluster.gpus} x {cluster.device.name} fits: use more "
            "GPUs, other pins or a smaller batch; `fsdpplan recommend` says what is nearest",
            rejected=dict(found.rejected),
        )
    return new_plan(
        model=model,
        cluster=cluster,
        training=training,
        chosen=found.ranked[0],
        ranked=found.ranked,
    )


def estimate(model: Model, cluster: Cluster, training: Training, layout: Layout) -> Estimate:
    """Time, memory and communication of one layout. Raises SpecError where it is not legal."""
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    problem = legal_layout_problem(case)
    if problem is not None:
        raise SpecError(problem)
    return predicted(case)


def emit_launch(
    plan: Plan, target: Target = "slurm", *, job: Job | None = None, pods: Pods | None = None
) -> str:
    """The text that launches `plan`: the job script, or what another target takes.

    `job` is what is asked of the scheduler and the program, `pods` of Kubernetes. Raises SpecError
    for what the target cannot express.
    """
    return launch_text(target, plan=plan, job=job or Job(), pods=pods)


def load_plan(path: str | Path) -> Plan:
    """The plan of a file. Raises SpecError where it is not sound."""
    return read_plan(path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` as JSON, whole or not at all: what `emit-launch`, `run` and `explain` read."""
    write_plan(plan, path)
