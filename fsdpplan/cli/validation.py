"""A validation report as text."""

from __future__ import annotations

from collections import Counter
from statistics import median

from fsdpplan.cli.render import blocks, listed, table, wrapped
from fsdpplan.validate.errors import Errors
from fsdpplan.validate.pairs import Pair
from fsdpplan.validate.ranking import RankingErrors, ranking_errors
from fsdpplan.validate.report import Report, SourceReport
from fsdpplan.validate.room import FitCounts, MemoryErrors
from fsdpplan.validate.skipped import Skipped

MOST_ASSUMPTIONS = 12
"""Sentences on the screen; JSON has all of them, row by row."""
NO_ERRORS = ("-", "-", "-", "-", "-")
LEGEND = (
    "timed: predicted of the rows that have a step time to compare. Errors are predicted / "
    "measured step time - 1: median and 90th percentile of their size, bias their mean (above 0: "
    "predicted too slow). band: measured inside the 80 % band, and its median half-width."
)


def screen(report: Report, *, width: int) -> str:
    """Errors by source, memory, ranking, what was skipped and why, and what was assumed."""
    predicted = sum(source.predicted for source in report.sources)
    head = f"{len(report.rows):,} measured runs, {predicted:,} predicted"
    return blocks(
        wrapped(head, width=width),
        _sources_table(report, width),
        wrapped(LEGEND, width=width),
        listed("Peak memory", _memory(report.memory), width=width),
        listed("What fits", _fits(report.fits), width=width),
        listed("What a change gains", _pairs(report.pairs), width=width),
        listed("The layout ranked first, against the best measured", _ranking(report), width=width),
        listed("Not predicted", _skips(report.sources), width=width),
        listed("Assumed where the table says nothing, by rows", _assumed(report), width=width),
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
        f"{one.worst_under_fraction:.0%}"
    )


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
