"""What a run came to, beside its prediction: on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypedDict

from fsdpplan.cli.resolve.torch import other_torch
from fsdpplan.cli.views.render import blocks, table, wrapped
from fsdpplan.files.plans import EstimateJson, LayoutJson, estimate_document, layout_document
from fsdpplan.run.compare import (
    AxisComparison,
    Comparison,
    Overlap,
    Waits,
    collectives,
    compare,
    overlap,
    waits,
)
from fsdpplan.run.fallback import Attempt
from fsdpplan.run.follow.metric_events import OutOfMemory, Profiled
from fsdpplan.run.ledger import ran_out_of_memory
from fsdpplan.run.outcome import Outcome
from fsdpplan.run.plans import in_precision
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_report import (
    Adapter,
    Complaint,
    NcclReport,
    nccl_ways,
    nccl_words,
    rank_pair,
)
from fsdpplan.units import format_gib, format_percent, format_seconds

UNREPORTED = (
    "{} reported no steps. To see them here beside the prediction, call "
    "fsdpplan.trainer.report_step(loss=loss, tokens=tokens) behind each optimizer step."
)

PARTS = {
    "state_bytes": "parameters, gradients and optimizer",
    "working_bytes": "activations, logits and gathered parameters",
    "reserved_overhead_bytes": "fragmentation",
    "context_bytes": "memory outside of PyTorch",
}
"""Part of a prediction, as a post-mortem names it -> words."""


class QuantityJson(TypedDict):
    """A quantity as it was predicted and measured."""

    quantity: str
    predicted: float
    lower: float | None
    upper: float | None
    """Ends of the 80 % band; null: it has none."""
    measured: float | None
    error_fraction: float | None
    inside_band: bool | None
    note: str | None
    """What stands between the two numbers, if anything does."""


class WaitsJson(TypedDict):
    """What profiled steps say; null, or empty, is what no profile says."""

    overlap: Annotated[dict[str, Any], Overlap] | None
    waits: list[Annotated[dict[str, Any], Waits]]
    idle_seconds: float | None


class TorchJson(TypedDict):
    """The release that was planned for, and the version that ran; null where nobody said."""

    planned: str | None
    ran: str | None


class TransportJson(TypedDict):
    """Pairs of ranks that NCCL joined in one way."""

    transport: str
    between_hosts: bool
    gpudirect: bool | None
    pairs: int
    channels: int


class ChannelsJson(TypedDict):
    """The most of any communicator."""

    collective: int | None
    nvls: int | None
    point_to_point: int | None
    tree: int | None


class NvlsJson(TypedDict):
    """Whether the switch reduces."""

    multicast: bool | None
    connected: bool


class VariableJson(TypedDict):
    """A variable that NCCL took from its environment."""

    name: str
    value: str


class NcclJson(TypedDict):
    """What NCCL did; null is what its log does not say."""

    versions: list[str]
    networks: list[str]
    libfabric_providers: list[str]
    bootstrap_interfaces: list[str]
    socket_interfaces: list[str]
    ranks: int | None
    nodes: int | None
    hosts: list[str]
    transports: list[TransportJson]
    adapters: list[Annotated[dict[str, Any], Adapter]]
    channels: ChannelsJson
    rings: list[list[int]]
    nvls: NvlsJson
    mnnvl: bool | None
    collnet: list[str]
    variables: list[VariableJson]
    complaints: list[Annotated[dict[str, Any], Complaint]]


class LackingJson(TypedDict):
    """What a post-mortem says, in place of pairs."""

    beyond_prediction: dict[str, int]
    """Part of the prediction -> bytes that it was too low by, the largest first."""


class MemoryJson(TypedDict):
    """What is known of an attempt that ran out of memory, and what to try next."""

    postmortem: Annotated[dict[str, Any], OutOfMemory, LackingJson] | None
    next_layout: LayoutJson | None
    next_options: str | None


class AttemptJson(TypedDict):
    """One attempt in short."""

    origin: str
    layout: LayoutJson
    run_folder: str
    job_exit_code: int
    ran_out_of_memory: bool
    steps: int


class RunJson(WaitsJson):
    """What `run --json` prints: of the last attempt, and the others in short."""

    job_exit_code: int
    job_id: str | None
    """Of the engine; null: it ran on this host."""
    ended: bool
    """False: it was left running."""
    steps: int
    seconds: float | None
    stopped: str | None
    """Why `run` ended the job itself."""
    run_folder: str
    torch: TorchJson
    layout: LayoutJson
    predicted: EstimateJson
    measured: dict[str, float | None]
    """By quantity."""
    comparison: list[QuantityJson]
    nccl: NcclJson | None
    warnings: list[str]
    out_of_memory: MemoryJson | None
    attempts: list[AttemptJson]


def outcome_json(attempts: Sequence[Attempt]) -> str:
    """What `run --json` prints: of the last attempt, and the others in short."""
    last = attempts[-1]
    outcome = last.outcome
    plan = in_precision(last.launch.plan, outcome.measured.precision)
    rows = _compared(last)
    document: RunJson = {
        "job_exit_code": outcome.exit_code,
        "job_id": outcome.job_id,
        "ended": outcome.ended,
        "steps": outcome.steps_done,
        "seconds": outcome.seconds,
        "stopped": outcome.stopped,
        "run_folder": str(outcome.run_folder),
        "torch": {"planned": plan.training.torch, "ran": _torch_that_ran(outcome)},
        "layout": layout_document(plan.layout),
        "predicted": estimate_document(plan.estimate),
        "measured": {row.quantity: row.measured for row in rows},
        "comparison": [row_document(row) for row in rows if last.launch.predicts],
        **waits_document(_collectives(plan, outcome), outcome.measured.profiled),
        "nccl": None if outcome.nccl is None else nccl_document(outcome.nccl),
        "warnings": list(outcome.warnings),
        "out_of_memory": memory_document(last),
        "attempts": [attempt_document(each) for each in attempts],
    }
    return json.dumps(document, indent=2)


def outcome_table(attempts: Sequence[Attempt], *, width: int) -> str:
    """Predicted against measured, what NCCL did, and how the job ended."""
    last = attempts[-1]
    outcome = last.outcome
    plan = in_precision(last.launch.plan, outcome.measured.precision)
    complaint = outcome.complaint if outcome.exit_code else None
    return blocks(
        _comparison(last, width=width),
        waits_words(_collectives(plan, outcome), outcome.measured.profiled, width=width),
        "" if outcome.nccl is None else wrapped(nccl_words(outcome.nccl), width=width),
        *(wrapped(text, width=width) for text in memory_words(attempts)),
        wrapped(other_torch(last.launch.plan, _torch_that_ran(outcome)), width=width),
        wrapped(_ending(last), width=width),
        # Once more: launchers print tracebacks of their own below it.
        "" if complaint is None else wrapped(f"It said: {complaint}", width=width),
    )


def _compared(last: Attempt) -> tuple[Comparison, ...]:
    measured = last.outcome.measured
    plan = in_precision(last.launch.plan, measured.precision)
    return compare(estimate=plan.estimate, measured=measured)


def _comparison(last: Attempt, *, width: int) -> str:
    """The table of predicted and measured, or why there is none."""
    rows, program = _compared(last), last.launch.own_program
    if all(row.measured is None for row in rows):
        return "" if program is None else wrapped(UNREPORTED.format(program), width=width)
    if last.launch.predicts:
        return comparison_table(rows, width=width)
    seconds = next(row.measured for row in rows if row.quantity == "step_seconds")
    return wrapped(
        f"A step took {_seconds(seconds)}. A smoke run predicts a tiny decoder, and {program} "
        "trains a model of its own, so there is nothing to compare.",
        width=width,
    )


def _collectives(plan: Plan, outcome: Outcome) -> tuple[AxisComparison, ...]:
    return collectives(estimate=plan.estimate, measured=outcome.measured)


def _torch_that_ran(outcome: Outcome) -> str | None:
    summary = outcome.measured.summary
    return None if summary is None else summary.torch_version


def _ending(last: Attempt) -> str:
    outcome = last.outcome
    steps = outcome.steps_done
    says_code = outcome.ended and outcome.exit_code != 0
    code = f" with exit code {outcome.exit_code}" if says_code else ""
    verb = "was stopped" if outcome.stopped else "ended" if outcome.ended else "was left running"
    took = [f"{steps} step{'' if steps == 1 else 's'}"]
    if not steps and last.launch.own_program is not None:
        took = []  # it may have trained, and reported nothing
    took += [] if outcome.seconds is None else [format_seconds(outcome.seconds)]
    after = f" after {' and '.join(took)}" if took else ""
    return f"The job {verb}{after}{code}; log and metrics: {outcome.run_folder}"


def row_document(row: Comparison) -> QuantityJson:
    """One row as JSON has it."""
    return {
        "quantity": row.quantity,
        "predicted": row.predicted,
        "lower": row.lower,
        "upper": row.upper,
        "measured": row.measured,
        "error_fraction": row.error_fraction,
        "inside_band": row.inside_band,
        "note": row.note,
    }


def comparison_table(rows: Sequence[Comparison], *, width: int) -> str:
    """One line a quantity, and the notes on them."""
    cells = [
        (
            row.quantity.removesuffix("_seconds").removesuffix("_fraction").replace("_", " "),
            _shown(row, row.predicted),
            "" if row.lower is None else f"{_shown(row, row.lower)} to {_shown(row, row.upper)}",
            _shown(row, row.measured),
            "" if row.note or row.error_fraction is None else f"{row.error_fraction * 100:+.1f} %",
        )
        for row in rows
    ]
    headers = ("", "predicted", "80 % band", "measured", "error")
    align = ("left", "right", "right", "right", "right")
    notes = [
        wrapped(f"{row.note[0].upper()}{row.note[1:]}.", width=width) for row in rows if row.note
    ]
    return blocks(table(cells, headers=headers, align=align, width=width), *notes)


def _shown(row: Comparison, value: float | None) -> str:
    if value is None:
        return "unknown"
    match row.unit:
        case "seconds":
            return format_seconds(value)
        case "tokens_per_second":
            return f"{value:,.0f}"
        case "fraction":
            return format_percent(value)
        case "bytes":
            return format_gib(value)


def waits_words(rows: Sequence[AxisComparison], profiled: Profiled | None, *, width: int) -> str:
    """What the profiled steps waited for: the overlap and the waits by axis, each beside its
    prediction, and idle time; nothing where none was profiled."""
    hidden, found = overlap(rows), waits(rows)
    pairs = []
    if hidden is not None:
        pairs.append(
            ("overlap", _percent(hidden.predicted_fraction), _percent(hidden.measured_fraction))
        )
    pairs += [
        (f"waits for {one.axis}", _seconds(one.predicted_seconds), _seconds(one.measured_seconds))
        for one in found
    ]
    if profiled is not None:
        pairs.append(("idle", "", _seconds(profiled.idle_seconds)))
    if not pairs:
        return ""
    headers = ("of a profiled step", "predicted", "measured")
    return table(pairs, headers=headers, align=("left", "right", "right"), width=width)


def waits_document(rows: Sequence[AxisComparison], profiled: Profiled | None) -> WaitsJson:
    """`overlap`, `waits` and `idle_seconds` as JSON has them; null is what no profile says."""
    hidden = overlap(rows)
    return {
        "overlap": None if hidden is None else asdict(hidden),
        "waits": [asdict(one) for one in waits(rows)],
        "idle_seconds": None if profiled is None else profiled.idle_seconds,
    }


def _percent(value: float | None) -> str:
    return "unknown" if value is None else format_percent(value)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)


def memory_document(attempt: Attempt) -> MemoryJson | None:
    """The post-mortem of an attempt and what to try next; None where memory did not run out."""
    if not ran_out_of_memory(attempt.outcome):
        return None
    event, rung = attempt.outcome.measured.out_of_memory, attempt.next_layout
    said = None if event is None else asdict(event)
    if said is not None:
        said["beyond_prediction"] = dict(said["beyond_prediction"])
    return {
        "postmortem": said,
        "next_layout": None if rung is None else layout_document(rung.layout),
        "next_options": None if rung is None else rung.words,
    }


def attempt_document(attempt: Attempt) -> AttemptJson:
    """One attempt in short."""
    return {
        "origin": attempt.launch.origin,
        "layout": layout_document(attempt.launch.plan.layout),
        "run_folder": str(attempt.outcome.run_folder),
        "job_exit_code": attempt.outcome.exit_code,
        "ran_out_of_memory": ran_out_of_memory(attempt.outcome),
        "steps": len(attempt.outcome.measured.steps),
    }


def memory_words(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Paragraphs: attempts before the last, and what to do where the last ran out of memory."""
    *before, last = attempts
    for number, attempt in enumerate(before, start=1):
        yield (
            f"Attempt {number} ran out of memory after {len(attempt.outcome.measured.steps)} steps "
            f"({attempt.outcome.run_folder})."
        )
    if before:
        yield f"Attempt {len(attempts)} ran {last.launch.origin}."
    if ran_out_of_memory(last.outcome):
        yield " ".join(_postmortem(last.outcome.measured.out_of_memory))
        yield _next(last)


def _postmortem(event: OutOfMemory | None) -> Iterator[str]:
    if event is None:
        yield "The job ran out of memory."
        return
    when = "before its first step" if event.step is None else f"in step {event.step + 1}"
    yield f"Rank {event.rank} ran out of memory in {event.phase}, {when}."
    if event.needed_bytes is not None:
        yield f"Its tensors needed at least {format_gib(event.needed_bytes)}."
    if event.fragmentation_bytes is not None:
        yield f"{format_gib(event.fragmentation_bytes)} were reserved in no tensor."
    if event.outside_bytes is not None:
        yield f"{format_gib(event.outside_bytes)} lay outside of PyTorch."
    if event.beyond_prediction:
        name, size = event.beyond_prediction[0]
        part = PARTS.get(name, name)
        yield f"The prediction is wrong most in {part}: {format_gib(size)} too low."


def _next(last: Attempt) -> str:
    rung = last.next_layout
    if rung is None:
        return (
            "No leaner layout of this global batch is left on these ranks: use more of them, or "
            "shorter sequences."
        )
    seconds = format_seconds(rung.estimate.step_seconds.expected)
    return (
        f"Next to try: {rung.words} (predicted step {seconds}); fsdpplan run --from plan "
        "--fallback 2 does so."
    )


def nccl_document(report: NcclReport) -> NcclJson:
    """Under `nccl` in what `run --json` prints; null is what the log does not say."""
    return {
        "versions": list(report.versions),
        "networks": list(report.networks),
        "libfabric_providers": list(report.providers),
        "bootstrap_interfaces": list(report.bootstrap),
        "socket_interfaces": list(report.interfaces),
        "ranks": report.world,
        "nodes": report.nodes,
        "hosts": list(report.hosts),
        "transports": [
            {
                "transport": transport,
                "between_hosts": between,
                "gpudirect": gpudirect,
                "pairs": len({rank_pair(one) for one in group}),
                "channels": len({channel for one in group for channel in one.channels}),
            }
            for (transport, between, gpudirect), group in nccl_ways(report)
        ],
        "adapters": [asdict(one) for one in report.adapters],
        "channels": {
            "collective": report.coll_channels,
            "nvls": report.nvls_channels,
            "point_to_point": report.p2p_channels,
            "tree": report.tree_channels,
        },
        "rings": [list(order) for order in report.rings],
        "nvls": {"multicast": report.nvls_multicast, "connected": report.nvls_connected},
        "mnnvl": report.mnnvl,
        "collnet": list(report.collnet),
        "variables": [{"name": name, "value": value} for name, value in report.variables],
        "complaints": [asdict(one) for one in report.complaints],
    }
