"""Predict: the cost model's word on one row.

    predict_row(run)                                 # with the profiles' fitted numbers
    predict_row(run, Fits(physics={"overlap_slowdown_fraction": 0.2}))
    predict_row(run, Fits(devices={"h100-sxm-80g": {"matmul_fraction": 0.8}}))

`Fits` stands in for what the profiles hold, so that a fitting program can try values; the one place
where it is laid over a cluster is `with_fit`. Rows are expressed once and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import log, sqrt
from statistics import mean
from typing import TypeVar

from fsdpplan.cost.band import peak_factor, widened, with_band
from fsdpplan.cost.estimate import estimate, step_time
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import MeasuredRun, MemoryKind
from fsdpplan.spec.cluster import Cluster, Device, Evidence
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Interval, MemoryBreakdown, TimeBreakdown
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request
from fsdpplan.validate.runs.skipped import NotExpressed, Skipped
from fsdpplan.validate.runs.unknown import OTHERS_CHANCE, Unknown

Value = TypeVar("Value", Interval, TimeBreakdown, MemoryBreakdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Numbers to price with instead of the profiles'; fields of DeviceFit and Level by name."""

    physics: Mapping[str, float] = field(default_factory=dict)
    """For every CUDA device."""
    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For the device profile of that name; goes before `physics`."""
    levels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For levels of the network of that name, such as `nvlink`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a row."""

    layout: Layout
    """The layout that was priced."""
    step_seconds: Interval
    time: TimeBreakdown
    memory: MemoryBreakdown
    fits: bool
    """Whether the device has room for it, the allocator giving back what lies idle: people run what
    is full to the brim."""
    evidence: Evidence
    """Behind the numbers of the device."""
    unknown_log_error: float
    """Standard deviation of log time for what the row leaves open; in the band."""
    assumptions: tuple[str, ...]

    def peak_memory_bytes(self, kind: MemoryKind | None) -> int | None:
        """The peak as `kind` counts it; None where that cannot be told."""
        return peak_bytes(self.memory, kind)


def has_room(memory: MemoryBreakdown, device: Device) -> bool:
    """Whether `device` has what `memory` is expected to need at least."""
    return memory.least_device_bytes * peak_factor(device) <= device.memory_bytes


def peak_bytes(memory: MemoryBreakdown, kind: MemoryKind | None) -> int | None:
    """The peak of `memory` as `kind` counts it; None where that cannot be told."""
    match kind:
        case "alloc":
            return memory.peak_allocated_bytes
        case "reserved":
            return memory.peak_reserved_bytes
        case "nvidia-smi":
            return memory.peak_device_bytes
        case _:
            return None


def predict_row(run: MeasuredRun, fits: Fits | None = None) -> Prediction | Skipped:
    """The prediction for `run`, or why there is none."""
    expressed = express(run)
    return expressed if isinstance(expressed, Skipped) else predict(expressed, fits)


def expected_seconds(expressed: Expressed, fits: Fits | None = None) -> float:
    """The step time alone of a row that `predict` can predict, in a third of the time."""
    cluster = _cluster_of(expressed, fits)
    layout = chosen_layout(expressed)
    whole = _seconds(expressed, cluster, layout)
    share = expressed.recomputed_share
    if share is None:
        return whole
    none = _seconds(expressed, cluster, replace(layout, activation_checkpointing="none"))
    return none + share * (whole - none)


def _seconds(expressed: Expressed, cluster: Cluster, layout: Layout) -> float:
    return step_time(_case(expressed, cluster, layout)).time.total_seconds


def _case(expressed: Expressed, cluster: Cluster, layout: Layout) -> Case:
    return Case(model=expressed.model, cluster=cluster, training=expressed.training, layout=layout)


def with_fit(cluster: Cluster, fits: Fits | None) -> Cluster:
    """`cluster` with the numbers of `fits` in place of its profiles'."""
    if fits is None:
        return cluster
    changes = {**fits.physics, **fits.devices.get(cluster.device.name, {})}
    device = replace(cluster.device, fit=replace(cluster.device.fit, **changes))  # type: ignore[arg-type]
    levels = tuple(
        replace(level, **fits.levels.get(level.name, {}))  # type: ignore[arg-type]
        for level in cluster.levels
    )
    return replace(cluster, device=device, levels=levels)


def _cluster_of(expressed: Expressed, fits: Fits | None) -> Cluster:
    """Where a row ran, with an allocator as the row says it was set."""
    cluster = with_fit(load_request(expressed.cluster_request), fits)
    if not expressed.allocator:
        return cluster
    fit = cluster.device.fit
    if expressed.allocator == "fixed":
        fit = replace(fit, growing_fragmentation_fraction=None)
    elif fit.growing_fragmentation_fraction is not None:
        fit = replace(fit, fragmentation_fraction=fit.growing_fragmentation_fraction)
    return replace(cluster, device=replace(cluster.device, fit=fit))


def predict(
    expressed: Expressed, fits: Fits | None = None, *, cluster: Cluster | None = None
) -> Prediction | Skipped:
    """The prediction for a row; what it left open is chosen by what fits in memory.

    `cluster` is where it ran, in place of what the profiles make of its words.
    """
    try:
        cluster = cluster or _cluster_of(expressed, fits)
        layout = chosen_layout(expressed)
        price = _price(expressed, cluster, layout)
        unknown = unknown_log_error(expressed)
        unknown_peak = unknown_peak_log_error(expressed)
    except NotExpressed as error:
        return error.skipped
    except SpecError as error:
        return Skipped(reason="the cost model does not take it", detail=str(error))
    return Prediction(
        layout=layout,
        step_seconds=widened(price.step_seconds, unknown),
        unknown_log_error=unknown,
        time=price.time,
        memory=with_band(price.memory, device=cluster.device, unknown_log_error=unknown_peak),
        fits=has_room(price.memory, cluster.device),
        evidence=cluster.device.evidence,
        assumptions=(*expressed.assumptions, *_fills(expressed, layout)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The part of an estimate that a row is compared with."""

    step_seconds: Interval
    time: TimeBreakdown
    memory: MemoryBreakdown


@lru_cache(maxsize=4096)
def _price(expressed: Expressed, cluster: Cluster, layout: Layout) -> Price:
    """Time and memory of `layout`; in proportion where only a share of the blocks recomputes."""
    whole = estimate(_case(expressed, cluster, layout))
    share = expressed.recomputed_share
    if share is None:
        return Price(step_seconds=whole.step_seconds, time=whole.time, memory=whole.memory)
    keeping = replace(layout, activation_checkpointing="none")
    none = estimate(_case(expressed, cluster, keeping))
    return Price(
        step_seconds=_between(none.step_seconds, whole.step_seconds, share),
        time=_between(none.time, whole.time, share),
        memory=_between(none.memory, whole.memory, share),
    )


def predicted_memory(run: MeasuredRun, fits: Fits | None = None) -> MemoryBreakdown | Skipped:
    """The memory alone of `run`, or why there is none; much cheaper than all of its prediction."""
    expressed = express(run)
    if isinstance(expressed, Skipped):
        return expressed
    try:
        cluster = _cluster_of(expressed, fits)
        layout = chosen_layout(expressed)
        whole = _memory(expressed, cluster, layout)
        share = expressed.recomputed_share
        if share is None:
            return whole
        none = _memory(expressed, cluster, replace(layout, activation_checkpointing="none"))
    except NotExpressed as error:
        return error.skipped
    except SpecError as error:
        return Skipped(reason="the cost model does not take it", detail=str(error))
    return with_band(_between(none, whole, share), device=cluster.device)


def _memory(expressed: Expressed, cluster: Cluster, layout: Layout) -> MemoryBreakdown:
    return rank_memory(_case(expressed, cluster, layout))


def _between(none: Value, whole: Value, share: float) -> Value:
    """Each number `share` of the way from `none` to `whole`."""
    mixed = {}
    for part in fields(none):
        low, high = getattr(none, part.name), getattr(whole, part.name)
        if isinstance(low, str | tuple | Interval):
            mixed[part.name] = high
        else:
            value = low + share * (high - low)
            mixed[part.name] = round(value) if isinstance(low, int) else value
    return replace(none, **mixed)


@lru_cache(maxsize=8192)
def chosen_layout(expressed: Expressed) -> Layout:
    """The fastest layout that fits, of the spread of experts and the recomputation that come first
    among those with one that fits; where none fits, the one that needs least.

    By the profiles' own numbers: a fit that tries others does not change what a row means.
    """
    layouts = expressed.layouts
    if len(layouts) == 1:
        return layouts[0]
    cluster = load_request(expressed.cluster_request)
    for kind in dict.fromkeys(map(_kind, layouts)):
        fitting = [one for one in layouts if _kind(one) == kind and _fits(expressed, cluster, one)]
        if fitting:
            return min(fitting, key=lambda one: _seconds(expressed, cluster, one))
    return min(layouts, key=lambda one: _peak_bytes(expressed, cluster, one))


def _kind(layout: Layout) -> tuple[bool, str]:
    """What is chosen by what comes first, not by what is fastest."""
    return layout.experts_over_tp, layout.activation_checkpointing


def _peak_bytes(expressed: Expressed, cluster: Cluster, layout: Layout) -> int:
    return _memory(expressed, cluster, layout).peak_device_bytes


def _fits(expressed: Expressed, cluster: Cluster, layout: Layout) -> bool:
    return _peak_bytes(expressed, cluster, layout) <= cluster.device.memory_bytes


Reading = tuple[Expressed, Layout]
"""A row as it could have been, and its layout."""


@lru_cache(maxsize=8192)
def unknown_log_error(expressed: Expressed) -> float:
    """Standard deviation of log time for what the row leaves open, each blank by itself.

        error^2 = sum over blanks of chance * mean over its other readings of log(T_reading / T)^2

    Readings that do not fit in memory, or cannot be expressed, are none. A micro-batch that is not
    given is one of those that fit, and so is the spread of experts.
    """
    return _spread(expressed, _reading_seconds)


@lru_cache(maxsize=8192)
def unknown_peak_log_error(expressed: Expressed) -> float:
    """The same of the log of the peak of device memory."""
    return _spread(expressed, _reading_peak_bytes)


def _spread(expressed: Expressed, of: Callable[[Reading], float]) -> float:
    base = of((expressed, chosen_layout(expressed)))
    variance = 0.0
    for readings in _other_readings(expressed):
        ratios = [log(of(one) / base) for one in readings]
        others = [ratio for ratio in ratios if abs(ratio) > 1e-6]
        if others:
            variance += OTHERS_CHANCE * mean(ratio**2 for ratio in others)
    return sqrt(variance)


def _reading_seconds(reading: Reading) -> float:
    expressed, layout = reading
    if layout == chosen_layout(expressed):
        return expected_seconds(expressed)
    return _seconds(expressed, load_request(expressed.cluster_request), layout)


def _reading_peak_bytes(reading: Reading) -> float:
    expressed, layout = reading
    return _peak_bytes(expressed, load_request(expressed.cluster_request), layout)


@lru_cache(maxsize=8192)
def _other_readings(expressed: Expressed) -> tuple[tuple[Reading, ...], ...]:
    """Of each blank the other readings that can be, in their order."""
    blanks = [tuple(_readings(one)) for one in expressed.unknown]
    cluster = load_request(expressed.cluster_request)
    chosen = chosen_layout(expressed)
    own, other = _kind(chosen), (not chosen.experts_over_tp, chosen.activation_checkpointing)
    batch, chunks = chosen.micro_batch, chosen.virtual_stages
    # another micro-batch; another spread of experts; other chunks of a pipeline
    for alike in ((own, None, chunks), (other, batch, chunks), (own, batch, None)):
        layouts = [
            layout
            for layout in expressed.layouts
            if layout != chosen
            and _kind(layout) == alike[0]
            and alike[1] in (None, layout.micro_batch)
            and alike[2] in (None, layout.virtual_stages)
            and _fits(expressed, cluster, layout)
        ]
        blanks.append(tuple((expressed, layout) for layout in layouts))
    return tuple(blanks)


def _readings(unknown: Unknown) -> Iterator[Reading]:
    """A blank's other readings that can be, in their order."""
    for case in unknown.cases:
        expressed = express(case)
        if isinstance(expressed, Skipped):
            continue
        try:
            cluster = load_request(expressed.cluster_request)
            layout = chosen_layout(expressed)
            if _fits(expressed, cluster, layout):
                expected_seconds(expressed)
                yield expressed, layout
        except (NotExpressed, SpecError):
            continue


def _fills(expressed: Expressed, layout: Layout) -> list[str]:
    """Sentences on what was chosen by what fits."""
    said = []
    if layout.experts_over_tp:
        said.append(f"whole experts over {layout.expert_ranks} ranks, those of tp among them")
    elif any(one.experts_over_tp for one in expressed.layouts):
        said.append("every expert split by tp, as Megatron does unless told otherwise")
    if len({one.micro_batch for one in expressed.layouts}) > 1:
        said.append(f"micro-batch {layout.micro_batch}, the fastest that fits")
    if len({one.virtual_stages for one in expressed.layouts}) > 1:
        said.append(f"chunks a rank {layout.virtual_stages}, the fastest that fits")
    if len({one.activation_checkpointing for one in expressed.layouts}) > 1:
        said.append(f"checkpointing {layout.activation_checkpointing}: none where that fits")
    return said
