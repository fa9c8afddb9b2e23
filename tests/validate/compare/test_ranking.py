"""Regret is what choosing by prediction costs, and the correlation is of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.validate.compare.ranking import ranked_groups, ranking_errors, spearman
from tests.validate.made import made


def test_regret_is_the_chosen_over_the_best() -> None:
    rows = [
        made(2.0, 1.0, micro_batch=1),
        made(1.6, 1.5, micro_batch=2),
        made(1.8, 1.7, micro_batch=4),
    ]
    (group,) = ranked_groups(rows)
    assert group.layouts == 3
    assert group.regret_fraction == pytest.approx(2.0 / 1.6 - 1)
    assert group.spearman == pytest.approx(-0.5)
    errors = ranking_errors("all", [group])
    assert errors is not None
    assert errors.worst_regret_fraction == group.regret_fraction


def test_the_first_is_the_simplest_that_is_not_told_apart_from_the_fastest() -> None:
    simple, split = {"micro_batch": 1}, {"micro_batch": 1, "tp": "2", "dp_shard": "32"}
    slow = {"micro_batch": 2}
    for predicted, regret in ((1.02, 0.25), (1.05, 0.0)):
        rows = [made(2.5, predicted, **simple), made(2.0, 1.0, **split), made(2.2, 1.2, **slow)]
        (group,) = ranked_groups(rows)
        assert group.regret_fraction == pytest.approx(0.0)
        assert group.first_regret_fraction == pytest.approx(regret)
        errors = ranking_errors("all", [group])
        assert errors is not None
        assert errors.worst_first_regret_fraction == group.first_regret_fraction


def test_the_same_layout_measured_twice_counts_once() -> None:
    rows = [made(2.0, 1.0), made(1.0, 1.0), made(1.8, 1.7, micro_batch=2)]
    assert ranked_groups(rows) == ()
    (group,) = ranked_groups([*rows, made(1.7, 1.6, micro_batch=4)])
    assert group.layouts == 3
    assert group.regret_fraction == pytest.approx(0.0)  # the median of 2 and 1 is the least


@pytest.mark.parametrize(
    "other", [{"gpus": "128", "dp_shard": "128"}, {"seq_len": "4096"}, {"source_id": "theirs"}]
)
def test_another_workload_is_another_group(other: dict[str, str]) -> None:
    rows = [
        made(2.0, 1.0, micro_batch=1),
        made(1.6, 1.5, micro_batch=2),
        made(1.8, 1.7, micro_batch=4, **other),
    ]
    assert ranked_groups(rows) == ()


def test_no_groups_have_no_errors() -> None:
    assert ranking_errors("all", []) is None


@given(values=st.lists(st.floats(0.1, 100), min_size=3, max_size=12, unique=True))
def test_equal_orders_correlate_by_1_and_reverse_ones_by_minus_1(values: list[float]) -> None:
    squared = [value**2 for value in sorted(values)]
    assert spearman(sorted(values), squared) == pytest.approx(1.0)
    assert spearman(sorted(values), squared[::-1]) == pytest.approx(-1.0)
    assert spearman([1.0] * len(values), values) == 0.0
