"""The published runs: nearly all can be expressed, the page is fresh, and no error has grown."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpplan.files.runs.table import bundled_runs, read_runs
from fsdpplan.validate.runs.express import Expressed, express

pytestmark = pytest.mark.together("validate/published")  # predicts all rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> Iterator[dict[str, ModuleType]]:
    """The modules that write the page."""
    names = ("validation", "validation_page", "validation_results")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield {name: importlib.import_module(name) for name in names}


@pytest.fixture(scope="module")
def found(docs: dict[str, ModuleType]) -> Any:
    return docs["validation_results"].results()


def test_of_each_source_at_least_80_percent_of_the_timed_rows_are_expressed() -> None:
    timed, expressed = Counter[str](), Counter[str]()
    for run in read_runs(bundled_runs()):
        if run.is_timed:
            timed[run.source_id] += 1
            expressed[run.source_id] += isinstance(express(run), Expressed)
    shares = {source: expressed[source] / rows for source, rows in timed.items()}
    assert min(shares.values()) >= 0.8, shares


def test_of_all_dense_rows_at_least_90_percent_are_predicted(found: Any) -> None:
    rows = [row for row in found.plain.rows if row.run.is_timed and not row.run.moe]
    assert sum(row.prediction is not None for row in rows) >= 0.9 * len(rows)


def test_every_skipped_row_has_a_reason(found: Any) -> None:
    skipped = [row.outcome for row in found.plain.rows if row.prediction is None]
    assert all(outcome.reason for outcome in skipped)


def test_no_error_has_grown_past_what_is_recorded(docs: dict[str, ModuleType], found: Any) -> None:
    module = docs["validation_results"]
    grown = module.grown(module.reached(found), module.read_recorded())
    assert not grown, "\n".join(
        [*grown, 'record it with a reason: python docs/validation.py --record --because "REASON"']
    )


def test_an_error_that_grows_is_found(docs: dict[str, ModuleType]) -> None:
    grown = docs["validation_results"].grown
    recorded = {"errors": {"mine": {"median": 0.05}}}
    assert grown({"mine": {"median": 0.051}}, recorded) == []
    assert len(grown({"mine": {"median": 0.06}}, recorded)) == 1
    assert grown({"new": {"median": 0.5}}, recorded) == []


@pytest.mark.parametrize(("name", "where"), [("page", "PAGE"), ("picture", "PICTURE")])
def test_the_page_is_what_the_program_writes(
    name: str, where: str, docs: dict[str, ModuleType], found: Any
) -> None:
    path: Path = getattr(docs["validation"], where)
    written = getattr(docs["validation"], name)(found)
    assert path.read_text(encoding="utf-8") == written, "stale: run python docs/validation.py"


def test_each_of_the_worst_rows_has_its_reason(docs: dict[str, ModuleType], found: Any) -> None:
    module = docs["validation_results"]
    recorded = module.read_recorded()
    without = [
        row.run.row
        for row in docs["validation_page"].worst_rows(found)
        if module.reason_for(row.run.row, recorded) is None
    ]
    assert not without, f"write down why, under [[reason]] in {module.RECORDED.name}"
