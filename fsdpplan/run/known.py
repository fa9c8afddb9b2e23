"""What is known of machines beside how fast they are: how they fail and save, and what they draw.

What was said holds, then what own runs measured, then what was published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdpplan.cost.bill import rated_draw
from fsdpplan.cost.goodput import Reliability, goodput
from fsdpplan.emit.job import Job
from fsdpplan.emit.trainer_program import Trainer, planned_steps
from fsdpplan.errors import SpecError
from fsdpplan.files.failures import published_failures
from fsdpplan.files.prices import power_of
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import Draw, Failures, Plan
from fsdpplan.units import format_percent, format_seconds

if TYPE_CHECKING:
    from fsdpplan.validate.learn.saves import MeasuredSaves  # most of validate

MEASURED_FACTOR = 1.5
"""How far a storage that was measured may be off, since others use it, too; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownReliability:
    """How machines fail and save, and what says so."""

    value: Reliability
    sources: tuple[tuple[str, str], ...]
    """(what, where it is from): `mtbf`, `storage`, `save`, `restart`."""


def known_reliability(
    cluster: Cluster,
    failures: Failures | None,
    *,
    in_background: bool = True,
    measured: MeasuredSaves | None = None,
) -> KnownReliability:
    """How `cluster` fails and saves. Raises SpecError where nobody knows how often it fails."""
    if _is_unknown(cluster, failures or Failures()):
        raise SpecError(
            "nobody has published how often processes on CPUs fail: say so by --mtbf-gpu and "
            "--mtbf-node, or leave --goodput out"
        )
    return known_saving(cluster, failures, in_background=in_background, measured=measured)


def known_saving(
    cluster: Cluster,
    failures: Failures | None,
    *,
    in_background: bool = True,
    measured: MeasuredSaves | None = None,
) -> KnownReliability:
    """The same, for what saving and starting again take: how often it fails is that of clusters of
    GPUs where nobody knows."""
    said, known = failures or Failures(), published_failures()
    published: dict[str, Any] = {
        "gpu_mtbf_seconds": known.gpu_mtbf_seconds,
        "node_mtbf_seconds": known.node_mtbf_seconds,
        "mtbf_factor": known.mtbf_factor,
        "write_bytes_per_second": known.node_write_bytes_per_second * cluster.nodes,
        "read_bytes_per_second": known.node_read_bytes_per_second * cluster.nodes,
        "storage_factor": known.storage_factor,
        "save_seconds": known.save_seconds,
        "save_factor": known.save_factor,
        "restart_seconds": max(known.restart_seconds, said.requeue_seconds or 0.0),
        "restart_factor": known.restart_factor,
    }
    sources = {
        "mtbf": f"published: {known.mtbf_source}",
        "storage": f"published: {known.storage_source}",
        "save": f"published: {known.save_source}",
        "restart": f"published: {known.restart_source}",
    }
    runs, where = _of_runs(measured)
    typed, flags = _typed(said)
    return KnownReliability(
        value=Reliability(**{**published, **runs, **typed}, in_background=in_background),
        sources=tuple({**sources, **where, **flags}.items()),
    )


def _is_unknown(cluster: Cluster, said: Failures) -> bool:
    """Whether nobody has said or published how often such machines fail."""
    return cluster.device.kind != "cuda" and None in (
        said.gpu_mtbf_seconds,
        said.node_mtbf_seconds,
    )


def _typed(said: Failures) -> tuple[dict[str, Any], dict[str, str]]:
    """What was said is known: it has no band."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in ("gpu_mtbf_seconds", "node_mtbf_seconds"):
        if getattr(said, name) is not None:
            values[name] = getattr(said, name)
    if len(values) == 2:
        values["mtbf_factor"] = 1.0
    if values:
        sources["mtbf"] = " and ".join(
            f"flag {'--mtbf-gpu' if name.startswith('gpu') else '--mtbf-node'}" for name in values
        )
    if said.storage_bytes_per_second is not None:
        values["write_bytes_per_second"] = said.storage_bytes_per_second
        values["read_bytes_per_second"] = said.storage_bytes_per_second
        values["storage_factor"] = 1.0
        sources["storage"] = "flag --storage-bw"
    if said.restart_seconds is not None:
        values |= {"restart_seconds": said.restart_seconds, "restart_factor": 1.0}
        sources["restart"] = "flag --restart"
    if said.requeue_seconds is not None:
        values["requeue_seconds"] = said.requeue_seconds
    return values, sources


def _of_runs(found: MeasuredSaves | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What own runs say of saving on such machines."""
    if found is None:
        return {}, {}
    source = f"{found.runs} measured run{'' if found.runs == 1 else 's'} in the ledger"
    values: dict[str, Any] = {
        "write_bytes_per_second": found.write_bytes_per_second,
        "read_bytes_per_second": found.write_bytes_per_second,
        "storage_factor": MEASURED_FACTOR,
    }
    sources = {"storage": source}
    if found.save_seconds is not None:
        values |= {"save_seconds": found.save_seconds, "save_factor": MEASURED_FACTOR}
        sources["save"] = source
    return values, sources


SAVES_IN_PLACE = frozenset({"megatron", "torchtitan"})
"""Targets whose own defaults stop training while a checkpoint is written."""
SAYS_NO_INTERVAL = frozenset({"accelerate"})


def no_runs(cluster: Cluster) -> None:
    """That no run of one's own is known."""
    del cluster


def with_best_interval(
    job: Job,
    plan: Plan,
    *,
    target: str = "slurm",
    measured: Callable[[Cluster], MeasuredSaves | None] = no_runs,
) -> tuple[Job, str]:
    """(`job`, saving as often as keeps most steps; why, in a sentence): where it saves and nobody
    said how often. The sentence is empty where nothing follows: a run that ends before, or one on
    machines of which nobody knows how they fail. `measured` is asked where it counts."""
    program = job.program
    if not isinstance(program, Trainer) or program.checkpoint_dir is None:
        return job, ""
    if program.checkpoint_every is not None or target in SAYS_NO_INTERVAL:
        return job, ""
    if _is_unknown(plan.cluster, plan.failures or Failures()):
        return job, ""
    in_background = target not in SAVES_IN_PLACE and program.checkpoint_async is not False
    reliability = known_reliability(
        plan.cluster,
        plan.failures,
        in_background=in_background,
        measured=measured(plan.cluster),
    )
    found = goodput(plan.case, plan.estimate, reliability.value)
    if found.every_steps >= planned_steps(program, plan.training):
        return job, ""
    kept = format_percent(found.fraction.expected)
    sentence = (
        f"saves each {found.every_steps:,} steps ({format_seconds(found.interval_seconds)}), which "
        f"keeps most: one failure in {format_seconds(found.mtbf_seconds)}, a save stops training "
        f"for {format_seconds(found.blocking_seconds)}, and {kept} of the time is kept (fsdpplan "
        "explain --goodput; --checkpoint-every says otherwise)"
    )
    return replace(job, program=replace(program, checkpoint_every=found.every_steps)), sentence


def known_draw(cluster: Cluster) -> tuple[Draw, str]:
    """(what a node of `cluster` draws in training, that in a sentence), by what it is rated at.
    Raises SpecError where nobody knows."""
    device = power_of(cluster.device.name)
    if device is None:
        raise SpecError(
            f"the power of {cluster.device.name} is not known here: say what a node draws in "
            "training, such as --node-watts 7800"
        )
    node = power_of(cluster.device.name, node=cluster.name)
    draw = rated_draw(
        gpu_watts=device.watts,
        gpus_per_node=cluster.gpus_per_node,
        node_gpus=cluster.gpus_per_node if node is None else node.gpus,
        node_watts=None if node is None else node.watts,
    )
    rest = "the rest of it as a DGX H100's" if node is None else f"{node.watts / 1000:.3g} kW whole"
    words = (
        f"a node draws {draw.node_watts / 1000:.3g} kW in training, 76 % of what it is rated at: "
        f"{device.watts:,.0f} W a GPU, {rest} (--node-watts)"
    )
    return draw, words
