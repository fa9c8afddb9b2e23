"""`fsdpplan rehearse`: the plan's own training program at full world size, on this CPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, PlanFile
from fsdpplan.cli.options.parse import line
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.resolve.job import ranked
from fsdpplan.cli.resolve.torch import given_torch, settled_plan
from fsdpplan.cli.views.render import blocks, columns, listed, table, tell, wrapped
from fsdpplan.errors import (
    ErrorJson,
    FsdpPlanError,
    GateFailed,
    LaunchError,
    error_document,
)
from fsdpplan.run.rehearse import rehearse as program
from fsdpplan.run.rehearse.compare import ComparedCalls, ComparedRank
from fsdpplan.run.rehearse.ranks import DEFAULT_RANKS, chosen_ranks
from fsdpplan.run.rehearse.rehearse import Rehearsal
from fsdpplan.units import format_count, format_gb, format_gib, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """Which ranks of which program."""

    HEADING: ClassVar[str] = "Rehearsal"

    ranks: Annotated[
        str | None,
        Flag(
            metavar="RANKS",
            parse=line,
            help="Numbers, last, stages and kinds (one of equal stages), separated by commas. "
            "Default: 0,last,kinds.",
        ),
    ] = None
    build: Annotated[
        str | None,
        Flag(
            metavar="FILE.py:FUNCTION",
            parse=line,
            help="Rehearse the model that this function makes, in place of the plan's.",
        ),
    ] = None
    python: Annotated[
        str | None,
        Flag(
            metavar="PATH",
            parse=line,
            help="Rehearse with this Python and its torch. Default: the one that runs fsdpplan.",
        ),
    ] = None
    torch: Torch = None
    whole_step: Annotated[
        bool | None,
        Flag(
            name="--whole-step",
            help="All micro-batches; by default as many as show all that the step does.",
        ),
    ] = None


def rehearse(
    *, plan: PlanFile = DEFAULT_PLAN, options: RehearseOptions, json: Json = False
) -> None:
    """Run the plan's program at full size on one CPU; no GPU."""
    chosen = ranked(plan, None, own_program=False)
    settled = settled_plan(
        chosen, given_torch(options.torch), own_program=options.build is not None
    )
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    ranks = chosen_ranks(chosen.model, chosen.layout, options.ranks or DEFAULT_RANKS)
    found = program.rehearse(
        chosen,
        ranks,
        build=options.build,
        whole_step=bool(options.whole_step),
        python=options.python,
    )
    typer.echo(rehearsal_json(found) if json else rehearsal_screen(found, width=columns()))
    failed = failure(found)
    if failed is not None and not json:
        raise failed
    if failed is not None:  # the document has it
        tell(str(failed))
        raise typer.Exit(failed.exit_code)


def failure(found: Rehearsal) -> FsdpPlanError | None:
    """All that is wrong, with its exit code; None where nothing is."""
    if found.errors:
        return LaunchError(
            f"the job would not run: {'; '.join(found.errors)}; plan again, or report it"
        )
    if found.agrees:
        return None
    return GateFailed(f"{'; '.join(found.said)}; report it, or plan another layout")


def verdict(found: Rehearsal) -> str:
    """The outcome in a sentence."""
    if found.errors:
        return "The job would not run."
    if found.problems:
        return f"{len(found.problems)} things are not as predicted, or would not run."
    if found.other_torch:
        return f"{found.other_torch[0].upper()}{found.other_torch[1:]}."
    if found.own_model:
        return "The model goes through a step, and no two ranks would wait for each other."
    return (
        "Every collective is as predicted, to the byte, no two ranks would wait for each other, "
        "and memory is within 5 % (or 32 MiB) of the prediction."
    )


class CallAgreementJson(TypedDict):
    """Beside the fields of a rank's calls of one kind."""

    agrees: bool


class RankAgreementJson(TypedDict):
    """Beside the fields of a rank."""

    calls: list[Annotated[dict[str, Any], ComparedCalls, CallAgreementJson]]
    peak_error_fraction: float | None
    """Null: the peak is not predicted."""
    peak_agrees: bool


class AgreementJson(TypedDict):
    """What `rehearse --json` prints beside the fields of the rehearsal."""

    ranks: list[Annotated[dict[str, Any], ComparedRank, RankAgreementJson]]
    agrees: bool
    problems: list[str]
    """What does not agree, in sentences."""
    other_torch: str | None
    """Why this says nothing of the plan's own torch; null where it does."""
    verdict: str
    error: NotRequired[ErrorJson]
    """Where the exit code is not 0."""


def _rank_document(rank: ComparedRank) -> dict[str, Any]:
    said: RankAgreementJson = {
        "calls": [asdict(call) | {"agrees": call.agrees} for call in rank.calls],
        "peak_error_fraction": rank.peak_error_fraction,
        "peak_agrees": rank.peak_agrees,
    }
    return asdict(rank) | said


def rehearsal_json(found: Rehearsal) -> str:
    """The rehearsal as JSON: docs/reference/json.md."""
    agreement: AgreementJson = {
        "ranks": [_rank_document(rank) for rank in found.ranks],
        "agrees": found.agrees,
        "problems": list(found.problems),
        "other_torch": found.other_torch,
        "verdict": verdict(found),
    }
    failed = failure(found)
    if failed is not None:
        agreement["error"] = error_document(failed)
    return json.dumps({**asdict(found), **agreement}, indent=2)


def rehearsal_screen(found: Rehearsal, *, width: int) -> str:
    """Collectives of the first rank and of those that differ, all ranks' memory, the verdict."""
    head = (
        f"Rehearsed {len(found.ranks)} of {found.world:,} ranks in "
        f"{format_seconds(found.seconds)} with torch {found.torch_version}: the training program "
        f"itself, on this CPU{_shortened(found)}"
    )
    shown = [rank for rank in found.ranks if _differs(rank) or rank is found.ranks[0]]
    return blocks(
        wrapped(head, width=width),
        *(_calls_table(rank, own_model=found.own_model, width=width) for rank in shown),
        _ranks_table(found, width=width),
        listed("Not as on the cluster", found.differences, width=width),
        listed("Not seen", found.not_seen, width=width),
        wrapped(verdict(found), width=width),
    )


def _shortened(found: Rehearsal) -> str:
    if found.micro_batches == found.planned_micro_batches:
        return ""
    return (
        f"; a step of {found.micro_batches} of its {found.planned_micro_batches} micro-batches "
        "(--whole-step: all)"
    )


def _differs(rank: ComparedRank) -> bool:
    return any(not call.agrees for call in rank.calls)


def _calls_table(rank: ComparedRank, *, own_model: bool, width: int) -> str:
    headers = ("axis", "collective", "ranks", "dtype", "calls", "bytes", "predicted")
    shown = headers[:-1] if own_model else headers
    rows = [_call_words(call)[: len(shown)] for call in rank.calls if call.count or not own_model]
    title = wrapped(f"Rank {rank.rank} ({rank.stands_for}), a step:", width=width)
    align = ("left", "left", "right", "left", "right", "right", "left")[: len(shown)]
    drawn = table(rows, headers=shown, align=align, width=width)
    return f"{title}\n{drawn}" if rows else f"{title} no collective"


def _call_words(call: ComparedCalls) -> tuple[str, ...]:
    predicted = f"{call.predicted_count}, {format_gb(call.predicted_bytes)}"
    if not call.is_predicted:
        predicted = "left out"
    elif call.agrees:
        predicted = "the same"
    return (
        call.axis,
        call.collective,
        str(call.ranks),
        call.dtype,
        str(call.count),
        format_gb(call.bytes),
        predicted,
    )


def _ranks_table(found: Rehearsal, *, width: int) -> str:
    headers = ["rank", "stands for", "holds", "peak", "predicted", "off by"]
    if found.own_model:
        headers = headers[:4]
    rows = [_rank_words(rank)[: len(headers)] for rank in found.ranks]
    align = ("right", "left", "right", "right", "right", "right")[: len(headers)]
    return table(rows, headers=headers, align=align, width=width) if rows else ""


def _rank_words(rank: ComparedRank) -> tuple[str, ...]:
    error = rank.peak_error_fraction
    return (
        str(rank.rank),
        rank.stands_for,
        format_count(rank.parameters),
        format_gib(rank.peak_bytes),
        "-" if rank.predicted_peak_bytes is None else format_gib(rank.predicted_peak_bytes),
        "-" if error is None else f"{error:+.1%}",
    )
