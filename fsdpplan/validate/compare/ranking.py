"""Ranking: of several layouts of one model on one cluster, is the one ranked first a good one?

regret = measured time of the layout that is taken / least measured time - 1

Taken is the layout that is predicted fastest, or the one that the search would put first: of all
that are not told apart from the fastest, the simplest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from fsdpplan.cost.band import difference_fraction
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.search.order import in_order
from fsdpplan.spec.cluster import Cluster
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request

LEAST_LAYOUTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Layouts of one model, cluster and batch that one source measured."""

    source_id: str
    what: str
    """The model, the GPUs and the batch, in words."""
    layouts: int
    regret_fraction: float
    """How much slower the layout predicted fastest is than the best one, both measured."""
    first_regret_fraction: float
    """The same of the layout that the search would put first."""
    spearman: float
    """Correlation of the predicted with the measured order; 1: the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingErrors:
    """Over the groups of one source, or of all."""

    source_id: str
    groups: int
    median_regret_fraction: float
    worst_regret_fraction: float
    median_first_regret_fraction: float
    worst_first_regret_fraction: float
    mean_spearman: float


def ranked_groups(rows: Sequence[ComparedRun]) -> tuple[RankedGroup, ...]:
    """Every group of three or more layouts whose tensor parallelism stays within a node."""
    groups: dict[Hashable, list[ComparedRun]] = defaultdict(list)
    for row in rows:
        if row.error_fraction is not None and row.run.tp <= (row.run.gpus_per_node or 8):
            groups[workload(row.run)].append(row)
    found = (_ranked(group) for group in groups.values())
    return tuple(group for group in found if group is not None)


def ranking_errors(source_id: str, groups: Sequence[RankedGroup]) -> RankingErrors | None:
    """The errors over `groups`; None where there are none."""
    if not groups:
        return None
    return RankingErrors(
        source_id=source_id,
        groups=len(groups),
        median_regret_fraction=median(group.regret_fraction for group in groups),
        worst_regret_fraction=max(group.regret_fraction for group in groups),
        median_first_regret_fraction=median(group.first_regret_fraction for group in groups),
        worst_first_regret_fraction=max(group.first_regret_fraction for group in groups),
        mean_spearman=mean(group.spearman for group in groups),
    )


def workload(run: MeasuredRun) -> Hashable:
    """What layouts of one group share: model, cluster, batch, number format, routing."""
    return (
        run.source_id,
        run.framework,
        run.model_name,
        run.layers,
        run.hidden,
        run.ffn_hidden,
        run.heads,
        run.vocab,
        run.seq_len,
        run.gpu,
        run.gpus,
        run.network,
        run.global_batch,
        run.dtype,
        "no forced balance" in run.notes,
    )


def _ranked(rows: Sequence[ComparedRun]) -> RankedGroup | None:
    """The group of `rows`; rows that mean the same layout count once, with their medians."""
    by_layout: dict[Hashable, list[ComparedRun]] = defaultdict(list)
    for row in rows:
        assert row.prediction is not None
        key = (row.prediction.layout, row.run.activation_checkpointing)
        by_layout[key].append(row)
    if len(by_layout) < LEAST_LAYOUTS:
        return None
    measured = [median(_measured(row) for row in same) for same in by_layout.values()]
    predicted = [median(_predicted(row) for row in same) for same in by_layout.values()]
    fastest, first = predicted.index(min(predicted)), _first(list(by_layout.values()))
    run = rows[0].run
    return RankedGroup(
        source_id=run.source_id,
        what=f"{run.model_name}, {run.layers} layers, {run.heads} heads, {run.gpus} x "
        f"{run.gpu}, batch {run.global_batch}",
        layouts=len(by_layout),
        regret_fraction=measured[fastest] / min(measured) - 1,
        first_regret_fraction=measured[first] / min(measured) - 1,
        spearman=spearman(predicted, measured),
    )


def _first(layouts: Sequence[Sequence[ComparedRun]]) -> int:
    """Place of the layout that the search would put first."""
    predictions = [same[0].prediction for same in layouts]
    entries = [(each.layout, each) for each in predictions if each is not None]
    cluster = _cluster(layouts[0][0].run)
    order = in_order(
        entries,
        difference=lambda one, other: difference_fraction(one[1], other[1], cluster=cluster),
        cluster=cluster,
    )
    assert order is not None
    return entries.index(order.entries[0])


def _cluster(run: MeasuredRun) -> Cluster:
    expressed = express(run)
    assert isinstance(expressed, Expressed)
    return load_request(expressed.cluster_request)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. 0 where one side is all equal."""
    ranks = _ranks(first), _ranks(second)
    middle = (len(first) - 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(*ranks, strict=True))
    squares = [sum((rank - middle) ** 2 for rank in side) for side in ranks]
    if not all(squares):
        return 0.0
    return float(products / (squares[0] * squares[1]) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def _measured(row: ComparedRun) -> float:
    seconds = row.run.measured_step_seconds
    assert seconds is not None
    return seconds


def _predicted(row: ComparedRun) -> float:
    assert row.prediction is not None
    return row.prediction.step_seconds.expected
