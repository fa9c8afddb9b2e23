"""Known jobs: measured runs beside what the cost model says of them today.

What was measured is kept, what was predicted then is not: it is predicted again, and with the
numbers of the cluster that is asked about where a run was on such machines, so that what
`calibrate` measured stays below what is learned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

from fsdpplan.cost.estimate import step_time
from fsdpplan.errors import FsdpPlanError, SpecError
from fsdpplan.files.profiles.catalogue import load_device, profile_names
from fsdpplan.search.advice.words import degrees
from fsdpplan.spec.cluster import Cluster, DeviceKind
from fsdpplan.spec.ledger import LedgerRow, Machines, Widths, Workload
from fsdpplan.spec.plan import Case, TimeBreakdown
from fsdpplan.validate.compare.predict import Prediction, predict
from fsdpplan.validate.learn.evidence import Told
from fsdpplan.validate.learn.features import Features, Stack, features_of
from fsdpplan.validate.learn.likeness import jobs_of, likeness
from fsdpplan.validate.learn.process import KnownJob
from fsdpplan.validate.runs.express import Expressed
from fsdpplan.validate.runs.fabric import load_request

MOST_RUNS = 120
"""Those of the nearest stacks, and of these the newest, are asked: a posterior takes the cube of
their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """One run beside its prediction."""

    job: Workload
    gpus: int
    features: Features
    step_seconds: float
    """Measured."""


def known_jobs(runs: Sequence[Told], asked: Stack, cluster: Cluster | None) -> list[KnownJob]:
    """Those of `runs` that tell most of `asked`; runs of one job are one, by their median.

    Other software is asked only where there is no run of its own: it could add a hundredth to what
    those say, and its outliers more.

    `cluster`: its numbers go before those of the profiles, for runs on machines like it.
    """
    own = [run for run in runs if run.stack.is_program_of(asked)] or runs
    nearest = sorted(reversed(own), key=lambda one: _away(one.stack, asked))[:MOST_RUNS]
    priced = (priced_run(run, cluster) for run in nearest)
    return jobs_among([run for run in priced if run is not None])


def nearest_runs(runs: Sequence[PricedRun], asked: Features, widths: Widths) -> Sequence[PricedRun]:
    """Those that tell most of `asked`, of runs that are priced already."""
    own = [run for run in runs if run.features.stack.is_program_of(asked.stack)] or runs
    if len(own) <= MOST_RUNS:
        return own
    shared = likeness(jobs_of([asked]), jobs_of([run.features for run in own]), widths)[0]
    return [own[place] for place in (-shared).argsort(kind="stable")[:MOST_RUNS]]


def jobs_among(runs: Sequence[PricedRun]) -> list[KnownJob]:
    """`runs` as jobs."""
    alike: dict[Hashable, list[PricedRun]] = {}
    for run in runs:
        alike.setdefault(run.features.job, []).append(run)
    return [_known_job(same) for same in alike.values()]


def _known_job(same: Sequence[PricedRun]) -> KnownJob:
    """Runs of one job, as one."""
    first = same[0]
    seconds = median(one.step_seconds for one in same)
    return KnownJob(
        features=first.features,
        log_ratio=log(seconds / first.features.seconds),
        runs=len(same),
        gpus=first.gpus,
        model=first.job.model.name,
        degrees=degrees(first.job.layout),
    )


def _away(stack: Stack, asked: Stack) -> tuple[bool, int]:
    """Sorts by how far a stack is from the asked one."""
    return not stack.is_program_of(asked), (stack.precision != asked.precision) + (
        stack.device != asked.device
    )


def priced_run(run: Told, cluster: Cluster | None = None) -> PricedRun | None:
    """A run beside its prediction; None where the cost model cannot take it, or where it was on CPU
    processes, which share their cores, and `cluster` has GPUs, or the other way round."""
    try:
        if cluster is not None and _kind(run, cluster) != cluster.device.kind:
            return None
        job, gpus, time = (
            _row_priced(run.source, cluster)
            if isinstance(run.source, LedgerRow)
            else _table_priced(run.source, cluster)
        )
    except FsdpPlanError:
        return None
    return as_priced(job, gpus=gpus, time=time, stack=run.stack, step_seconds=run.step_seconds)


def _kind(run: Told, cluster: Cluster) -> DeviceKind:
    """What torch calls the devices of a run."""
    if isinstance(run.source, LedgerRow):
        return machines_of(run.source, cluster).device.kind
    return load_request(run.source.cluster_request).device.kind


def as_priced(
    job: Workload, *, gpus: int, time: TimeBreakdown, stack: Stack, step_seconds: float
) -> PricedRun:
    """A run of `job` whose step the cost model says to be made of `time`."""
    features = features_of(
        model=job.model,
        training=job.training,
        layout=job.layout,
        gpus=gpus,
        time=time,
        stack=stack,
    )
    return PricedRun(job=job, gpus=gpus, features=features, step_seconds=step_seconds)


def _row_priced(row: LedgerRow, cluster: Cluster | None) -> tuple[Workload, int, TimeBreakdown]:
    job = row.job
    here = machines_of(row, cluster)
    step = step_time(Case(model=job.model, cluster=here, training=job.training, layout=job.layout))
    return job, row.machines.gpus, step.time


def machines_of(row: LedgerRow, cluster: Cluster | None) -> Cluster:
    """What a run was on, with the numbers of `cluster` where it was on such machines."""
    return _ran_on(row.machines, cluster) or _as_recorded(row.machines, cluster)


def _table_priced(run: Expressed, cluster: Cluster | None) -> tuple[Workload, int, TimeBreakdown]:
    here = load_request(run.cluster_request)
    predicted = predict(run, cluster=_ran_on(Machines.of(here), cluster))
    if not isinstance(predicted, Prediction):
        raise SpecError(predicted.sentence)
    job = Workload(model=run.model, training=run.training, layout=predicted.layout)
    return job, here.gpus, predicted.time


def _as_recorded(machines: Machines, cluster: Cluster | None) -> Cluster:
    """Other machines of a run, with the device as it is known today."""
    if cluster is not None and machines.device == cluster.device.name:
        device = cluster.device
    elif machines.device in profile_names("device"):
        device = load_device(machines.device).device
    else:
        raise SpecError(
            f"there is no profile of {machines.device}: write one, and name it by --hardware"
        )
    return Cluster(
        name=machines.cluster,
        device=device,
        gpus=machines.gpus,
        gpus_per_node=machines.gpus_per_node,
        levels=machines.levels,
    )


def _ran_on(machines: Machines, cluster: Cluster | None) -> Cluster | None:
    """The part of `cluster` that a run was on, with its numbers; None where it was on others."""
    if cluster is None or not machines.are_of(cluster):
        return None
    ours = (*cluster.levels, *machines.levels[len(cluster.levels) :])
    levels = tuple(
        replace(level, domain_gpus=theirs.domain_gpus, whole_gpus=theirs.whole_gpus)
        for level, theirs in zip(ours, machines.levels, strict=False)
    )
    return replace(cluster, gpus=machines.gpus, gpus_per_node=machines.gpus_per_node, levels=levels)
