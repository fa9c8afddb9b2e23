"""How a cluster fails and saves: what was said, what own runs say, and what was published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fsdpplan.cli.options.failures import FailureOptions, GoodputOptions, given_failures
from fsdpplan.cli.options.files import LedgerOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.cost.goodput import Goodput, Reliability, goodput
from fsdpplan.emit.job import Job
from fsdpplan.emit.trainer_program import DEFAULT_STEPS, Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.failures import published_failures
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.spec.plan import Case, Estimate, Failures, Plan
from fsdpplan.units import format_percent, format_seconds

MEASURED_FACTOR = 1.5
"""How far a storage that was measured may be off, since others use it, too; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What failures leave of a layout's time, and from which numbers that follows."""

    goodput: Goodput
    reliability: Resolved[Reliability]
    gpus: int
    nodes: int
    is_given: bool
    """Whether somebody said how often to save."""


def reliability_of(
    cluster: Cluster,
    failures: Failures | None,
    *,
    in_background: bool = True,
    ledger: LedgerOptions | None = None,
) -> Resolved[Reliability]:
    """How `cluster` fails and saves. Raises SpecError where nobody knows."""
    said, known = failures or Failures(), published_failures()
    if cluster.device.kind != "cuda" and None in (said.gpu_mtbf_seconds, said.node_mtbf_seconds):
        raise SpecError(
            "nobody has published how often processes on CPUs fail: say so by --mtbf-gpu and "
            "--mtbf-node, or leave --goodput out"
        )
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
    measured, where = _measured(cluster, ledger) if ledger is not None else ({}, {})
    typed, flags = _typed(said)
    return Resolved(
        value=Reliability(**{**published, **measured, **typed}, in_background=in_background),
        sources=tuple({**sources, **where, **flags}.items()),
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


def _measured(cluster: Cluster, ledger: LedgerOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """What the user's own runs say of saving on such machines."""
    from fsdpplan.cli.resolve.evidence import kept_rows

    rows = [row for row in kept_rows(ledger) if isinstance(row, LedgerRow)]
    if not rows:
        return {}, {}
    from fsdpplan.validate.learn.saves import measured_saves

    found = measured_saves(rows, cluster)
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


def outlook(
    case: Case,
    estimate: Estimate,
    failures: Failures | None,
    options: FailureOptions,
    *,
    ledger: LedgerOptions | None = None,
) -> Outlook:
    """What failures leave of one layout's time; what was typed lies over `failures`."""
    saves = options if isinstance(options, GoodputOptions) else GoodputOptions()
    reliability = reliability_of(
        case.cluster,
        given_failures(options, known=failures),
        in_background=saves.checkpoint_async is not False,
        ledger=ledger,
    )
    return Outlook(
        goodput=goodput(case, estimate, reliability.value, every_steps=saves.checkpoint_every),
        reliability=reliability,
        gpus=case.cluster.gpus,
        nodes=case.cluster.nodes,
        is_given=saves.checkpoint_every is not None,
    )


SAVES_IN_PLACE = frozenset({"megatron", "torchtitan"})
"""Targets whose own defaults stop training while a checkpoint is written."""
SAYS_NO_INTERVAL = frozenset({"accelerate"})


def with_best_interval(
    job: Job, plan: Plan, *, target: str = "slurm", ledger: LedgerOptions | None = None
) -> tuple[Job, str]:
    """(`job`, saving as often as keeps most steps; why, in a sentence): where it saves and nobody
    said how often. The sentence is empty where nothing follows: a run that ends before, or one on
    machines of which nobody knows how they fail."""
    program = job.program
    if not isinstance(program, Trainer) or program.checkpoint_dir is None:
        return job, ""
    if program.checkpoint_every is not None or target in SAYS_NO_INTERVAL:
        return job, ""
    said = plan.failures or Failures()
    if plan.cluster.device.kind != "cuda" and None in (
        said.gpu_mtbf_seconds,
        said.node_mtbf_seconds,
    ):
        return job, ""
    in_background = target not in SAVES_IN_PLACE and program.checkpoint_async is not False
    reliability = reliability_of(
        plan.cluster, plan.failures, in_background=in_background, ledger=ledger
    )
    found = goodput(plan.case, plan.estimate, reliability.value)
    steps = DEFAULT_STEPS if program.steps is None else program.steps
    if found.every_steps >= steps:
        return job, ""
    kept = format_percent(found.fraction.expected)
    sentence = (
        f"saves each {found.every_steps:,} steps ({format_seconds(found.interval_seconds)}), which "
        f"keeps most: one failure in {format_seconds(found.mtbf_seconds)}, a save stops training "
        f"for {format_seconds(found.blocking_seconds)}, and {kept} of the time is kept (fsdpplan "
        "explain --goodput; --checkpoint-every says otherwise)"
    )
    return replace(job, program=replace(program, checkpoint_every=found.every_steps)), sentence
