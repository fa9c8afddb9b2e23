"""Memory: by component, on each rank of the pipeline at its peak, and over the step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsdpplan.cost.band import peak_factor
from fsdpplan.cost.memory.peak import available_bytes, rank_memory, stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.timeline.events import MemoryPoint
from fsdpplan.report.timeline import TICKS, LaidOut
from fsdpplan.report.values import Chart, Fact, Facts, Section, Table, cell
from fsdpplan.spec.plan import Case, MemoryBreakdown, Plan
from fsdpplan.units import MIB, format_gib, format_seconds

COLORS = {
    "parameters": 0,
    "gradients": 5,
    "optimizer state": 2,
    "gathered parameters": 4,
    "unreduced gradients": 3,
    "activations": 1,
    "logits and loss": 6,
    "temporaries": 9,
    "allocator reserve": 8,
    "driver and libraries": 7,
}
"""A colour for each part, the same in all charts: numbers of the page's palette."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank of the pipeline holds at its peak."""

    name: str
    terms: tuple[tuple[str, int], ...]
    """Parts and their bytes; one part of all where the plan does not say more."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(held for _, held in self.terms)


def memory_section(plan: Plan, laid: LaidOut | None) -> Section:
    """What the fullest GPU holds, what each stage does, and how that is near the limit."""
    memory = plan.estimate.memory
    ranks = rank_memories(plan)
    phase = "" if memory.peak_phase == "" else f", in {memory.peak_phase}"
    return Section(
        name="memory",
        title="Memory",
        says=f"At its peak{phase}, the fullest holds {format_gib(memory.peak_device_bytes)}; the "
        f"largest part is {_largest(memory)}.",
        blocks=(_facts(plan), _chart(plan, ranks), *_over_the_step(plan, laid)),
    )


def _largest(memory: MemoryBreakdown) -> str:
    name, held = max(memory.terms.items(), key=lambda term: term[1])
    return f"{name}, {format_gib(held)}"


def _facts(plan: Plan) -> Facts:
    memory, device = plan.estimate.memory, plan.cluster.device
    on_cpu = device.kind == "cpu"
    shown = "amd-smi" if device.vendor == "amd" else "nvidia-smi"
    peaks = (
        (
            "Allocated by tensors",
            memory.peak_allocated_bytes,
            "at its highest" if on_cpu else "torch's max_memory_allocated",
        ),
        (
            "Reserved by torch",
            memory.peak_reserved_bytes,
            "with what lies unused" if on_cpu else "torch's max_memory_reserved",
        ),
        (
            "Of the process in all" if on_cpu else "On the device in all",
            memory.peak_device_bytes,
            "with libraries" if on_cpu else f"as {shown} shows it",
        ),
        ("Before the first step", memory.initialization_peak_bytes, "allocated, at its highest"),
        ("Writing a checkpoint", memory.checkpoint_peak_bytes, "allocated, at its highest"),
        ("On the host, for each", memory.host_bytes, "what is offloaded"),
    )
    return Facts(
        tuple(
            Fact(name=name, value=format_gib(held), exact=held, note=note)
            for name, held, note in peaks
            if held
        )
    )


def rank_memories(plan: Plan) -> tuple[RankMemory, ...]:
    """Each rank of the pipeline, first to last, by parts where this version still predicts what the
    plan says; else the fullest by parts, and the others in whole."""
    saved = plan.estimate.memory
    peaks = saved.stage_peak_device_bytes or (saved.peak_device_bytes,)
    case = _fullest_part(plan)
    known = case is not None and rank_memory(case).terms == saved.terms
    if known and case is not None:
        stages = pipeline_ranks(model=case.model, layout=case.layout)
        flights = in_flight_blocks(model=case.model, layout=case.layout)
        found = [
            stage_memory(case, stage, in_flight_blocks=flight)
            for stage, flight in zip(stages, flights, strict=True)
        ]
        if tuple(one.peak_device_bytes for one in found) == tuple(peaks):
            return tuple(
                RankMemory(name=_name(at, len(peaks), plan), terms=tuple(one.terms.items()))
                for at, one in enumerate(found)
            )
    fullest = peaks.index(max(peaks))
    return tuple(
        RankMemory(
            name=_name(at, len(peaks), plan),
            terms=tuple(saved.terms.items()) if at == fullest else (("all of it", peak),),
        )
        for at, peak in enumerate(peaks)
    )


def _name(at: int, ranks: int, plan: Plan) -> str:
    if ranks > 1:
        return f"stage {at + 1}"
    return f"each {plan.cluster.device.unit}"


def _fullest_part(plan: Plan) -> Case | None:
    """The part of the run that the plan's memory is of: all of it, where the precision stays."""
    if plan.training.precision_switch == "none":
        return plan.case
    parts = [case for _, case in plan.case.phases]
    wanted = plan.estimate.memory.terms
    return next((case for case in parts if rank_memory(case).terms == wanted), None)


def _chart(plan: Plan, ranks: tuple[RankMemory, ...]) -> Chart:
    device = plan.cluster.device
    names = [
        name for name in (*COLORS, "all of it") if any(name in dict(one.terms) for one in ranks)
    ]
    shown = [name for name in names if any(dict(one.terms).get(name) for one in ranks)]
    usable = available_bytes(cluster=plan.cluster, training=plan.training)
    fullest = max(ranks, key=lambda one: one.total_bytes)
    emptiest = min(ranks, key=lambda one: one.total_bytes)
    says = (
        f"{format_gib(fullest.total_bytes)} of {format_gib(device.memory_bytes)}, of which "
        f"{format_gib(usable)} are planned with."
    )
    if len(ranks) > 1:
        says = (
            f"The fullest is {fullest.name}, the emptiest {emptiest.name} with "
            f"{format_gib(emptiest.total_bytes)}: {says}"
        )
    if peak_factor(device) != 1.0:
        says += f" Your runs had {peak_factor(device):.2f} times what is drawn here."
    return Chart(
        name="memory",
        kind="bars",
        title="Memory at the peak" + (" of each stage" if len(ranks) > 1 else ""),
        says=says,
        data={
            "unit": "bytes",
            "categories": [one.name for one in ranks],
            "series": [
                {
                    "name": name,
                    "color": COLORS.get(name, 7),
                    "values": [dict(one.terms).get(name, 0) for one in ranks],
                }
                for name in shown
            ],
            "limits": [
                {"name": "device", "value": device.memory_bytes},
            ],
        },
        table=Table(
            caption="Memory at the peak, in numbers",
            columns=("", *shown, "together"),
            rows=tuple(
                (
                    one.name,
                    *(cell(dict(one.terms).get(name), "bytes") for name in shown),
                    cell(one.total_bytes, "bytes"),
                )
                for one in ranks
            ),
            folded=True,
        ),
    )


MOST_POINTS = 240
"""Of a rank over the step; all ranks share `MOST_POINTS_IN_ALL`."""
MOST_POINTS_IN_ALL = 1600


def _over_the_step(plan: Plan, laid: LaidOut | None) -> tuple[Chart, ...]:
    """What tensors take over the step, on a rank of each stage."""
    if laid is None or not laid.line.memory:
        return ()
    by_rank: dict[int, list[MemoryPoint]] = {}
    for point in laid.line.memory:
        by_rank.setdefault(point.rank, []).append(point)
    peaks = {rank: max(one.allocated_bytes for one in by_rank[rank]) for rank in by_rank}
    fullest = max(peaks, key=lambda rank: peaks[rank])
    end, device = laid.line.step_seconds, plan.cluster.device.memory_bytes
    if len(by_rank) == 1:
        choices, chosen = _parts(by_rank[fullest], laid, device)
    else:
        most = min(MOST_POINTS, MOST_POINTS_IN_ALL // len(by_rank))
        chosen = fullest
        choices = [
            {
                "name": f"Stage {rank + 1}" + (", the fullest" if rank == fullest else ""),
                **_held(thinned(points, most), end, device),
            }
            for rank, points in by_rank.items()
        ]
    at_peak = max(by_rank[fullest], key=lambda one: one.allocated_bytes)
    says = (
        f"What tensors take goes up to {format_gib(peaks[fullest])} in {at_peak.phase}, "
        f"{format_seconds(at_peak.start_seconds)} from the beginning of the step."
    )
    data = choices[0] if len(choices) == 1 else {"choices": choices, "chosen": chosen}
    return (
        Chart(
            name="held",
            kind="held",
            title="Memory over the step" + (" of each stage" if len(by_rank) > 1 else ""),
            says=says,
            data=data,
            table=_phases_table(plan, by_rank),
        ),
    )


def _parts(
    points: list[MemoryPoint], laid: LaidOut, device_bytes: int
) -> tuple[list[dict[str, Any]], int]:
    """The whole step where it is short; of one of many micro-batches its beginning, too, and that
    first where it has the peak."""
    end = laid.line.step_seconds
    whole = {"name": "The whole step", **_held(thinned(points, MOST_POINTS), end, device_bytes)}
    passes = {one.micro_batch for one in laid.line.events} - {None}
    if len(points) <= MOST_POINTS or len(passes) <= 2:
        return [whole], 0
    second = max(
        one.end_seconds
        for one in laid.line.events
        if one.micro_batch is not None and one.micro_batch < 2
    )
    first = [one for one in points if one.start_seconds < second]
    has_peak = max(map(_allocated, first)) == max(map(_allocated, points))
    beginning = {
        "name": "The first two micro-batches",
        **_held(thinned(first, MOST_POINTS), second, device_bytes),
    }
    return [beginning, whole], 0 if has_peak else 1


def _allocated(point: MemoryPoint) -> int:
    return point.allocated_bytes


def thinned(points: list[MemoryPoint], most: int) -> list[MemoryPoint]:
    """At most `most` of the points, of neighbours the one that holds most: the peak stays."""
    if len(points) <= most:
        return points
    edges = [round(at * len(points) / most) for at in range(most + 1)]
    return [
        max(points[first:last], key=lambda one: one.allocated_bytes)
        for first, last in pairwise(edges)
    ]


def _held(points: list[MemoryPoint], end: float, device_bytes: int) -> dict[str, Any]:
    """Columns of whole MiB; what is always there is one number of them all."""
    tick = end / TICKS
    terms = [one.terms for one in points]
    columns = {name: [round(one[name] / MIB) for one in terms] for name in terms[0]}
    return {
        "x": {"name": "time in the step", "unit": "seconds", "min": 0, "max": end},
        "y": {"name": "allocated", "unit": "bytes", "min": 0, "max": device_bytes},
        "tick": tick,
        "scale": MIB,
        # the last value holds to the end
        "at": [round(one.start_seconds / tick) for one in points] + [TICKS],
        "series": [
            {"name": name, "color": COLORS[name], "values": [*values, values[-1]]}
            for name, values in columns.items()
            if any(values)
        ],
    }


def _phases_table(plan: Plan, by_rank: dict[int, list[MemoryPoint]]) -> Table:
    phases = list(dict.fromkeys(one.phase for points in by_rank.values() for one in points))
    return Table(
        caption="Most that tensors take in each phase",
        columns=("", *phases),
        rows=tuple(
            (
                _name(rank, len(by_rank), plan),
                *(cell(_most(points, phase), "bytes") for phase in phases),
            )
            for rank, points in by_rank.items()
        ),
        folded=True,
    )


def _most(points: list[MemoryPoint], phase: str) -> int | None:
    return max((one.allocated_bytes for one in points if one.phase == phase), default=None)
