"""Pairs are rows that differ in one thing, and the gain is the step time without over with it."""

from __future__ import annotations

import pytest

from fsdpplan.validate.compare.pairs import pairs_among
from tests.validate.made import made

TP = {"tp": "8", "dp_shard": "8", "sp": "y"}


def test_a_pair_compares_the_gains() -> None:
    rows = [made(3.0, 2.0, compile="n"), made(2.0, 1.6, compile="y")]
    (pair,) = pairs_among(rows)
    assert pair.change == "compile"
    assert pair.measured_gain == pytest.approx(1.5)
    assert pair.predicted_gain == pytest.approx(1.25)
    assert pair.error_fraction == pytest.approx(1.25 / 1.5 - 1)


@pytest.mark.parametrize(
    ("change", "without", "with_change"),
    [
        ("async_tp", {"async_tp": "n"}, {"async_tp": "y"}),
        ("fp8", {"dtype": "bf16"}, {"dtype": "fp8 (torchao rowwise)"}),
        ("compile", {"compile": ""}, {"compile": "y"}),
    ],
)
def test_each_change_makes_its_pairs(
    change: str, without: dict[str, str], with_change: dict[str, str]
) -> None:
    rows = [made(3.0, 2.0, **TP, **without), made(2.0, 1.6, **TP, **with_change)]
    assert [pair.change for pair in pairs_among(rows)] == [change]


def test_rows_that_differ_in_more_are_no_pair() -> None:
    rows = [made(3.0, 2.0, compile="n"), made(2.0, 1.6, compile="y", act_ckpt="full")]
    assert pairs_among(rows) == ()
    others = [made(3.0, 2.0, compile="n"), made(2.0, 1.6, compile="y", source_id="theirs")]
    assert pairs_among(others) == ()
