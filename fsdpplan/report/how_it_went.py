"""How a run went: its starts and their ends, what NCCL did, and what was learnt of it."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.report.values import (
    Block,
    Chart,
    Fact,
    Facts,
    Note,
    Notes,
    Section,
    Table,
    band_words,
    cell,
    sentence,
)
from fsdpplan.run.aftermath import Aftermath
from fsdpplan.run.follow.attempts import StartEnded
from fsdpplan.run.verify import comparison
from fsdpplan.spec.plan import Estimate, Interval
from fsdpplan.topology.read.nccl_report import (
    NcclReport,
    nccl_ways,
    nccl_words,
    rank_pair,
    way_words,
)
from fsdpplan.units import format_gib, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What the plan's layout is predicted to take."""

    plain: Estimate
    """By the cost model alone."""
    before: Estimate
    """With the runs that were known before this one."""
    after: Estimate
    """With this one, too."""
    runs_before: int
    runs_after: int
    problem: str = ""
    """Why this run teaches nothing; empty: it does."""


def went_section(left: Aftermath) -> Section | None:
    """Starts and their ends, nodes that failed, memory that ran out."""
    notes: list[Note] = []
    for one in left.starts:
        is_bad = isinstance(one, StartEnded) and one.exit_code != 0
        notes.append(Note(text=sentence(one.words), tone="bad" if is_bad else "plain"))
    if left.ending is not None:
        good = left.ending.exit_code == 0
        notes.append(
            Note(
                text=f"The job ended as {left.ending.state}, with exit code "
                f"{left.ending.exit_code}.",
                tone="good" if good else "bad",
            )
        )
    event = left.run.measured.out_of_memory
    if event is not None:
        needed = "" if event.needed_bytes is None else f": {format_gib(event.needed_bytes)} needed"
        notes.append(
            Note(
                text=f"Rank {event.rank} ran out of memory in {event.phase}{needed}.",
                advice="fsdpplan run --from plan --fallback 2 tries a leaner layout.",
                tone="bad",
            )
        )
    notes += [
        Note(text=f"Node {node} must not be used again: {why}.", tone="watch")
        for node, why in left.bad_nodes.items()
    ]
    saves = left.run.measured.checkpoints
    if saves:
        seconds = left.run.measured.median_save("seconds")
        blocking = left.run.measured.median_save("blocking_seconds")
        stood = "" if blocking is None else f", training stood still for {format_seconds(blocking)}"
        took = "" if seconds is None else f", the median in {format_seconds(seconds)}{stood}"
        notes.append(Note(text=f"{len(saves):,} checkpoints were saved{took}."))
    if not notes:
        return None
    return Section(name="went", title="How it went", blocks=(Notes(tuple(notes)),))


def nccl_section(left: Aftermath) -> Section | None:
    """What its log says; None where there is none."""
    report = left.nccl
    if report is None:
        return None
    blocks: list[Block] = [_nccl_facts(report)]
    ways = nccl_ways(report)
    if ways:
        blocks.append(
            Table(
                caption="How ranks were connected",
                columns=("by", "pairs of ranks", "channels"),
                rows=tuple(
                    (
                        way_words(way),
                        cell(len({rank_pair(one) for one in group}), "whole"),
                        cell(len({one for each in group for one in each.channels}), "whole"),
                    )
                    for way, group in ways
                ),
            )
        )
    notes = [Note(text=sentence(words), tone="bad") for words in left.nccl_warnings]
    notes += [
        Note(
            text=sentence(one.text),
            title=f"On {', '.join(one.hosts)}:",
            tone="watch",
        )
        for one in report.complaints
    ]
    if notes:
        blocks.append(Notes(tuple(notes)))
    if report.variables:
        blocks.append(
            Table(
                caption="Variables that NCCL took",
                columns=("variable", "value"),
                rows=tuple(report.variables),
                folded=True,
            )
        )
    return Section(
        name="nccl",
        title="What NCCL did",
        says=f"{nccl_words(report)} Which algorithm and protocol each call took is not in its log "
        "at this level.",
        blocks=tuple(blocks),
    )


def _nccl_facts(report: NcclReport) -> Facts:
    sockets = report.sockets_between
    facts = [
        Fact(name="Version", value=", ".join(report.versions) or "not said"),
        Fact(
            name="Between hosts",
            value=", ".join(report.networks) or "nothing",
            note=f"{len(sockets)} connections over sockets" if sockets else "",
            tone="watch" if sockets else "plain",
        ),
    ]
    channels = {
        "collectives": report.coll_channels,
        "NVLS": report.nvls_channels,
        "point to point": report.p2p_channels,
        "trees": report.tree_channels,
    }
    known = [f"{number} for {name}" for name, number in channels.items() if number]
    if known:
        facts.append(
            Fact(
                name="Channels",
                value=f"{report.coll_channels}",
                exact=report.coll_channels,
                note=", ".join(known),
            )
        )
    if report.adapters:
        used = sum(one.used for one in report.adapters)
        facts.append(
            Fact(
                name="Adapter ports in use",
                value=f"{used} of {len(report.adapters)}",
                tone="good" if used else "watch",
            )
        )
    return Facts(tuple(facts))


def learnt_section(left: Aftermath, learnt: Learnt | None) -> Section | None:
    """The step of the plan's layout before the run was known, and with it."""
    if learnt is None:
        return None
    if learnt.problem:
        return Section(
            name="learnt", title="What was learnt", says=sentence(learnt.problem), blocks=()
        )
    measured = {row.quantity: row.measured for row in comparison(left.run)}["step_seconds"]
    rows = [("by the cost model", learnt.plain)]
    if learnt.runs_before:
        rows.append((f"with the {learnt.runs_before:,} runs before", learnt.before))
    rows.append(("with this run, too", learnt.after))
    before, after = learnt.before.step_seconds, learnt.after.step_seconds
    return Section(
        name="learnt",
        title="What was learnt",
        says=f"Before this run the step was predicted to take {_interval_words(before)}; the next "
        f"plan says {_interval_words(after)} for the same layout.",
        blocks=(
            Chart(
                name="learnt",
                kind="intervals",
                title="The same layout, predicted before and after",
                says=f"The band is {_width(after) / _width(before):.2f} times as wide as before."
                if _width(before)
                else "",
                data={
                    "unit": "seconds",
                    "rows": [
                        {
                            "name": name,
                            "lower": one.step_seconds.lower,
                            "expected": one.step_seconds.expected,
                            "upper": one.step_seconds.upper,
                            **({} if measured is None else {"measured": measured}),
                        }
                        for name, one in rows
                    ],
                },
                table=Table(
                    caption="The same layout, predicted before and after",
                    columns=("", "step", "band from", "to", "known runs"),
                    rows=tuple(
                        (
                            name,
                            cell(one.step_seconds.expected, "seconds"),
                            cell(one.step_seconds.lower, "seconds"),
                            cell(one.step_seconds.upper, "seconds"),
                            cell(one.learned.runs if one.learned else 0, "whole"),
                        )
                        for name, one in rows
                    ),
                    folded=True,
                ),
            ),
        ),
    )


def _interval_words(value: Interval) -> str:
    return f"{format_seconds(value.expected)} ({band_words(value)})"


def _width(value: Interval) -> float:
    return value.upper / value.lower - 1
