"""Recipes: layouts that everybody knows fit, and lie in their bands; ours are no slower."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.files.runs.table import bundled_runs, read_runs
from fsdpplan.search.advice.field_rules import broken_rules
from tests.search.advice.field_cases import TABLE

ROWS = 17


@pytest.fixture(scope="module")
def docs() -> Iterator[ModuleType]:
    """The module that writes the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(bundled_runs().parents[3] / "docs"))
        yield importlib.import_module("recipes")


@pytest.fixture(scope="module")
def rows(docs: ModuleType) -> Any:
    return docs.recipes()


def test_the_page_is_what_the_program_writes(docs: ModuleType, rows: Any) -> None:
    written = docs.page(rows, docs.read_recorded())
    assert docs.PAGE.read_text(encoding="utf-8") == written, "stale: run python docs/recipes.py"


def test_every_recipe_runs_and_the_median_error_is_small(rows: Any) -> None:
    assert len(rows) == ROWS
    assert all(row.prediction.fits for row in rows)
    assert median(abs(row.error) for row in rows) <= 0.15


def test_what_is_missed_and_only_that_names_what_is_missing(docs: ModuleType, rows: Any) -> None:
    missed = {row.name for row in rows if docs.is_missed(row)}
    assert missed == set(docs.MISSING)
    assert len(missed) <= 2


def test_no_row_is_among_those_that_constants_are_fitted_to(docs: ModuleType) -> None:
    fitted = {(run.source_id, run.model_name, run.gpus) for run in read_runs(bundled_runs())}
    known = {(run.source_id, run.model_name, run.gpus) for run in read_runs(docs.RUNS)}
    assert not fitted & known


def test_our_best_is_no_slower_than_what_was_published(docs: ModuleType, rows: Any) -> None:
    found = docs.read_recorded()
    assert set(found) == {row.name for row in rows}
    for row in rows:
        best = found[row.name].time.total_seconds
        assert best <= row.prediction.time.total_seconds * (1 + 1e-4), row.name
        assert best == pytest.approx(found[row.name].seconds_listed[0], rel=1e-3)


def test_a_recipe_breaks_no_rule_of_the_field_but_what_the_table_says(rows: Any) -> None:
    """And why that is no false alarm."""
    told = {row["name"]: row for row in TABLE["recipes"]}
    assert told.keys() <= {row.name for row in rows}
    for row in rows:
        broken = broken_rules(row.case, estimate(row.case))
        expected = told.get(row.name, {"breaks": [], "why": "it breaks none"})
        assert {one.rule for one in broken} == set(expected["breaks"]), expected["why"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(ROWS))
def test_a_search_finds_what_is_recorded(number: int, docs: ModuleType, rows: Any) -> None:
    row = rows[number]
    recorded, now = docs.read_recorded()[row.name], docs.searched(row)
    why = "search again: python docs/recipes.py --search"
    assert now.layout == recorded.layout, why
    assert now.seconds_listed == pytest.approx(recorded.seconds_listed, rel=1e-3), why
