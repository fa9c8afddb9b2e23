"""A rehearsed rank beside its prediction: collectives exactly, memory within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.model.shards import Stage, rank_shard_elements
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls, table_calls, table_gradient_bytes
from fsdpplan.run.rehearse.ranks import ChosenRank, stage_of
from fsdpplan.spec.plan import Case, MemoryBreakdown, Plan
from fsdpplan.units import format_gib

TOLERANCE_FRACTION = 0.05
"""How far the rehearsed peak may be from the predicted one: pipelines agree to 5 %, all else to 1 %
(tests/ground_truth)."""
TOLERANCE_BYTES = 32 * 2**20
"""What rounding and small tensors make of small models, beside that."""

CallKey = tuple[str, str, int, str]
"""(collective, axis, ranks, dtype)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What the trainer reports of a rank."""

    calls: dict[CallKey, tuple[int, int]]
    """(count, bytes of the full buffers) of a step."""
    peak_bytes: int
    peak_bytes_of: dict[str, int]
    state_bytes: int
    parameters: int
    without_gradient: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCalls:
    """All calls of one collective in a step."""

    collective: str
    axis: str
    ranks: int
    dtype: str
    count: int
    bytes: int
    predicted_count: int
    predicted_bytes: int

    @property
    def is_predicted(self) -> bool:
        """The cost model leaves out how ranks and stages tell each other numbers of tokens, and how
        probable experts were for them."""
        return not self.dtype.startswith(("int", "float64")) or self.predicted_count > 0

    @property
    def agrees(self) -> bool:
        """Counts and bytes are equal."""
        same = (self.count, self.bytes) == (self.predicted_count, self.predicted_bytes)
        return same or not self.is_predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRank:
    """A rank beside its prediction."""

    rank: int
    stage: int
    stands_for: str
    calls: tuple[ComparedCalls, ...]
    peak_bytes: int
    """Rehearsed: allocated at the highest point of a step, blocks not compiled."""
    predicted_peak_bytes: int | None
    """The same, predicted; None where parameters are on the host, which a CPU cannot tell apart."""
    peak_bytes_of: dict[str, int]
    """Rehearsed, by phase."""
    device_bytes: int
    """What the device should show at the peak of the job: predicted, and the difference above."""
    available_bytes: int
    """Memory of the device."""
    state_bytes: int
    parameters: int
    without_gradient: tuple[str, ...]

    @property
    def peak_error_fraction(self) -> float | None:
        """Predicted over rehearsed peak, less one."""
        if self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.peak_bytes - 1

    @property
    def peak_agrees(self) -> bool:
        """The peaks are within the tolerance of each other."""
        if self.predicted_peak_bytes is None:
            return True
        allowed = max(TOLERANCE_BYTES, TOLERANCE_FRACTION * self.peak_bytes)
        return abs(self.predicted_peak_bytes - self.peak_bytes) <= allowed

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """What is not as predicted, and what would not fit, in sentences."""
        said = [_call_problem(self.rank, call) for call in self.calls if not call.agrees]
        if self.predicted_peak_bytes is not None and not self.peak_agrees:
            said.append(
                f"rank {self.rank} takes {format_gib(self.peak_bytes)} at its peak, predicted are "
                f"{format_gib(self.predicted_peak_bytes)}"
            )
        if self.device_bytes > self.available_bytes:
            said.append(_overflow(self.rank, self.device_bytes, self.available_bytes))
        return tuple(said)

    @property
    def overflows(self) -> tuple[str, ...]:
        """What would not fit of a model that is not the plan's."""
        if self.peak_bytes <= self.available_bytes:
            return ()
        return (_overflow(self.rank, self.peak_bytes, self.available_bytes),)

    @property
    def unreached(self) -> tuple[str, ...]:
        """Which parameters have no gradient."""
        if not self.without_gradient:
            return ()
        more = len(self.without_gradient) - 3
        named = ", ".join(self.without_gradient[:3]) + (f" and {more} more" if more > 0 else "")
        return (f"rank {self.rank}: no gradient reaches {named}",)


def _overflow(rank: int, needed_bytes: int, available_bytes: int) -> str:
    return (
        f"rank {rank} would run out of memory: about {format_gib(needed_bytes)} are needed of "
        f"{format_gib(available_bytes)}"
    )


def compared_rank(
    plan: Plan, chosen: ChosenRank, report: RankReport, *, whole: Plan
) -> ComparedRank:
    """`report` beside what the cost model says of the same rank, as a CPU runs it: not compiled,
    context-parallel attention by all-to-all. `plan` is what was rehearsed, `whole` what will run,
    all parts of it where its precision changes.
    """
    pipeline_rank = stage_of(chosen.rank, plan.layout)
    stage = pipeline_ranks(model=plan.model, layout=plan.layout)[pipeline_rank]
    fullest = _memory(plan.case, stage, pipeline_rank, compiled=False)
    eager = fullest.peak_allocated_bytes - _padding_bytes(plan, stage, chosen.rank, fullest)
    on_host = plan.layout.offload == "cpu"
    return ComparedRank(
        rank=chosen.rank,
        stage=pipeline_rank,
        stands_for=chosen.stands_for,
        calls=_compared_calls(
            _as_messages(report.calls), _predicted_calls(plan, stage, chosen.rank)
        ),
        peak_bytes=report.peak_bytes,
        predicted_peak_bytes=None if on_host else eager,
        peak_bytes_of=report.peak_bytes_of,
        device_bytes=max(
            _memory(each, stage, pipeline_rank, compiled=True).peak_device_bytes
            for _, each in whole.case.phases
        )
        + (0 if on_host else max(0, report.peak_bytes - eager)),
        available_bytes=plan.cluster.device.memory_bytes,
        state_bytes=report.state_bytes,
        parameters=report.parameters,
        without_gradient=report.without_gradient,
    )


def _memory(case: Case, stage: Stage, pipeline_rank: int, *, compiled: bool) -> MemoryBreakdown:
    layout = case.layout if compiled else replace(case.layout, compile=False)
    in_flight = in_flight_blocks(model=case.model, layout=layout)[pipeline_rank]
    case = replace(case, layout=layout)
    if not compiled:  # the trainer takes fake tensors for those of a recent GPU's
        device = replace(case.cluster.device, kind="cuda", vendor="nvidia", compute_capability=None)
        case = replace(case, cluster=replace(case.cluster, device=device))
    return stage_memory(case, stage, in_flight_blocks=in_flight)


def _padding_bytes(plan: Plan, stage: Stage, rank: int, fullest: MemoryBreakdown) -> int:
    """What `rank` has less than the fullest rank of its stage: the last shards may be smaller, and
    so is the optimizer's state of them; FSDP2 fills up parameters and gradients with zeros."""
    if plan.layout.sharding != "fsdp":
        return 0
    held, most = (rank_shard_elements(plan.case, stage, rank=one) for one in (rank, 0))
    return fullest.optimizer_bytes * (most - held) // most


def _predicted_calls(plan: Plan, stage: Stage, rank: int) -> dict[CallKey, tuple[int, int]]:
    """The cost model's, summed by what tells collectives apart. They are those of the first rank of
    a shard group, but for the part of a tied table that this one exchanges; and those of CPU ranks,
    as the rehearsal's are."""
    device = replace(plan.cluster.device, kind="cpu")
    rehearsed = replace(plan.case, cluster=replace(plan.cluster, device=device))
    rows: dict[CallKey, tuple[int, int]] = {}
    for call in step_calls(rehearsed, stage):
        key = (str(call.collective), call.group.axis, call.group.ranks, call.dtype)
        count, size = rows.get(key, (0, 0))
        rows[key] = (count + call.count, size + call.count * call.call_bytes)
    for call in table_calls(rehearsed, stage):
        key = (str(call.collective), call.group.axis, call.group.ranks, call.dtype)
        own = table_gradient_bytes(
            model=plan.model,
            layout=plan.layout,
            param_dtype=plan.training.param_dtype,
            rank=rank,
        )
        rows[key] = (rows[key][0], rows[key][1] - call.call_bytes + own)
    return rows


def _as_messages(calls: dict[CallKey, tuple[int, int]]) -> dict[CallKey, tuple[int, int]]:
    """A message is counted where it is sent. Groups of one rank move nothing."""
    return {
        ("send_recv" if collective == "send" else collective, axis, ranks, dtype): numbers
        for (collective, axis, ranks, dtype), numbers in calls.items()
        if collective != "recv" and ranks > 1
    }


def _compared_calls(
    calls: dict[CallKey, tuple[int, int]], predicted: dict[CallKey, tuple[int, int]]
) -> tuple[ComparedCalls, ...]:
    compared = []
    for key in sorted({*calls, *predicted}, key=lambda key: (key[1], key[0], key[2:])):
        collective, axis, ranks, dtype = key
        count, size = calls.get(key, (0, 0))
        predicted_count, predicted_bytes = predicted.get(key, (0, 0))
        compared.append(
            ComparedCalls(
                collective=collective,
                axis=axis,
                ranks=ranks,
                dtype=dtype,
                count=count,
                bytes=size,
                predicted_count=predicted_count,
                predicted_bytes=predicted_bytes,
            )
        )
    return tuple(compared)


def _call_problem(rank: int, call: ComparedCalls) -> str:
    return (
        f"rank {rank} calls {call.collective} over {call.axis} ({call.ranks} ranks, {call.dtype}) "
        f"{call.count} times with {call.bytes:,} bytes, predicted are {call.predicted_count} times "
        f"with {call.predicted_bytes:,}"
    )
