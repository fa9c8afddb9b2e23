"""A validation report as text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.errors import SpecError
from fsdpplan.validate.errors import Errors
from fsdpplan.validate.pairs import Pair
from fsdpplan.validate.ranking import RankingErrors, ranking_errors
from fsdpplan.validate.report import Report, SourceReport
from fsdpplan.validate.room import FitCounts, MemoryErrors
from fsdpplan.validate.skipped import Skipped

if TYPE_CHECKING:
    from fsdpplan.validate.learn.validated import LearnedReport

MOST_ASSUMPTIONS = 12
"""Sentences on the screen; JSON has all of them, row by row."""
NO_ERRORS = ("-", "-", "-", "-", "-")
LEGEND = (
    "timed: predicted of the rows that have a step time to compare. Errors are predicted / "
    "measured step time - 1: median and 90th percentile of their size, bias their mean (above 0: "
    "predicted too slow). band: measured inside the 80 % band, and its median half-width."
)


def learned(report: Report, runs: Path | None, *, leave_one_out: bool) -> LearnedReport | None:
    """The same table after learning from `runs`, or from its other rows; None: from nothing."""
    if runs is None and not leave_one_out:
        return None
    if runs is not None and leave_one_out:
        raise SpecError("--runs and --leave-one-out are two things to learn from: give one of them")
    from fsdpplan.validate.learn.evidence import told
    from fsdpplan.validate.learn.peaks import told_peaks
    from fsdpplan.validate.learn.validated import after_learning, learned_report, left_one_out

    if runs is None:
        return learned_report(left_one_out(report.rows))
    from fsdpplan.run.evidence import rows_at

    known = rows_at(runs)
    if not told(known) and not told_peaks(known):
        raise SpecError(
            f"no run in {runs} has a step time or a peak of memory that can be compared: type "
            f"fsdpplan validate {runs} to see why"
        )
    return learned_report(after_learning(report.rows, known))


def screen(before: Report, learned: LearnedReport | None = None, *, width: int) -> str:
    """Errors by source, memory, ranking, what was skipped and why, and what was assumed."""
    report = before if learned is None else learned.report
    predicted = sum(source.predicted for source in report.sources)
    head = f"{len(report.rows):,} measured runs, {predicted:,} predicted"
    return blocks(
        wrapped(head, width=width),
        wrapped(_learning(learned), width=width),
        _sources_table(report, width),
        wrapped(LEGEND, width=width),
        listed("Peak memory", _memory(report.memory), width=width),
        listed("What fits", _fits(report.fits), width=width),
        listed("What a change gains", _pairs(report.pairs), width=width),
        listed("The layout ranked first, against the best measured", _ranking(report), width=width),
        listed("Not predicted", _skips(report.sources), width=width),
        listed("Assumed where the table says nothing, by rows", _assumed(report), width=width),
    )


def _learning(learned: LearnedReport | None) -> str:
    """What learning brought, in one sentence."""
    if learned is None:
        return ""
    words = [
        "nothing to compare"
        if errors is None
        else f"{errors.median_abs_error_fraction:.1%} off, "
        f"{errors.coverage_fraction:.0%} inside the band"
        for errors in (learned.before_errors, learned.after_errors)
    ]
    return (
        f"As shipped {words[0]}; after learning from {learned.runs:,} "
        f"run{'' if learned.runs == 1 else 's'} {words[1]} (median over rows). The table below is "
        "after learning."
    )


def _sources_table(report: Report, width: int) -> str:
    rows = [
        (source.source_id, f"{source.compared}/{source.timed}", *_error_words(source.errors))
        for source in report.sources
    ]
    if report.mean_over_sources is not None:
        rows.append(("mean over sources", "", *_error_words(report.mean_over_sources)))
    headers = ("source", "timed", "median", "p90", "bias", "band", "width")
    return table(rows, headers=headers, align=("left", *["right"] * 6), width=width)


def _error_words(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return NO_ERRORS
    return (
        f"{errors.median_abs_error_fraction:.1%}",
        f"{errors.p90_abs_error_fraction:.1%}",
        f"{errors.bias_fraction:+.1%}",
        f"{errors.coverage_fraction:.0%}",
        f"{errors.median_half_width_fraction:.0%}",
    )


def _memory(memory: tuple[MemoryErrors, ...]) -> list[str]:
    return [_memory_words(one) for one in memory]


def _memory_words(one: MemoryErrors) -> str:
    return (
        f"{one.source_id}, {one.kind}: {one.rows} rows, median "
        f"{one.median_abs_error_fraction:.1%}, bias {one.bias_fraction:+.1%}; "
        f"{one.far_under_fraction:.0%} more than 5 % under, the worst "
        f"{one.worst_under_fraction:.0%}{_inside(one.coverage_fraction)}"
    )


def _inside(coverage_fraction: float | None) -> str:
    return "" if coverage_fraction is None else f"; {coverage_fraction:.0%} inside the 80 % band"


def _fits(fits: FitCounts) -> list[str]:
    said = []
    if fits.ran:
        share = fits.ran_predicted_not_to_fit / fits.ran
        said.append(
            f"{fits.ran_predicted_not_to_fit} of {fits.ran} rows that ran are predicted not to "
            f"fit ({share:.1%})"
        )
    if fits.out_of_memory:
        said.append(
            f"{fits.out_of_memory_predicted_not_to_fit} of {fits.out_of_memory} rows that ran out "
            "of memory are predicted not to fit"
        )
    return said


def _pairs(pairs: tuple[Pair, ...]) -> list[str]:
    by_change: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_change.setdefault(pair.change, []).append(pair)
    return [
        f"{change}: {len(some)} {'pair' if len(some) == 1 else 'pairs'}, "
        "predicted over measured gain off by "
        f"{median(abs(pair.error_fraction) for pair in some):.1%}, at worst "
        f"{max(abs(pair.error_fraction) for pair in some):.1%}"
        for change, some in by_change.items()
    ]


def _ranking(report: Report) -> list[str]:
    sources = dict.fromkeys(group.source_id for group in report.groups)
    found = [
        ranking_errors(source, [group for group in report.groups if group.source_id == source])
        for source in sources
    ]
    return [_ranking_words(one) for one in found if one is not None]


def _ranking_words(ranking: RankingErrors) -> str:
    groups = "group" if ranking.groups == 1 else "groups"
    return (
        f"{ranking.source_id}: {ranking.groups} {groups} of 3 layouts or more; slower by "
        f"{ranking.median_regret_fraction:.1%}, at worst {ranking.worst_regret_fraction:.1%}; "
        f"rank correlation {ranking.mean_spearman:.2f}"
    )


def _skips(sources: tuple[SourceReport, ...]) -> list[str]:
    return [
        f"{source.source_id}: "
        + "; ".join(f"{reason} ({count})" for reason, count in source.skipped.items())
        for source in sources
        if source.skipped
    ]


def _assumed(report: Report) -> list[str]:
    counts = Counter(
        sentence
        for row in report.rows
        if not isinstance(row.outcome, Skipped)
        for sentence in row.outcome.assumptions
    )
    said = [f"{sentence} ({count})" for sentence, count in counts.most_common(MOST_ASSUMPTIONS)]
    more = len(counts) - len(said)
    return [*said, f"{more} more, row by row with --json"] if more else said
