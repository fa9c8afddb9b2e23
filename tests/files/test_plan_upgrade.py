"""Plans of earlier releases are read, and mean what they meant then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.files.plans import THEN, plan_from_json, plan_json, read_plan
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

RECORDED = Path(__file__).parent.parent / "recordings" / "0.2.0" / "plans"
PLANS = sorted(RECORDED.glob("*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_of_0_2_0_is_read_with_all_that_it_says(path: Path) -> None:
    plan, written = read_plan(path), json.loads(path.read_text())
    _require_within(written, json.loads(plan_json(plan)))
    assert plan_from_json(plan_json(plan), where="plan") == plan


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_what_a_plan_of_0_2_0_does_not_say_is_what_it_meant(path: Path) -> None:
    plan, written = read_plan(path), json.loads(path.read_text())
    for kind, value in ((Layout, plan.layout), (Training, plan.training), (Model, plan.model)):
        said = written[kind.__name__.lower()]
        new = [field for field in fields(kind) if field.name not in said]
        assert all(getattr(value, field.name) == field.default for field in new)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_layout_of_0_2_0_is_still_priced(path: Path) -> None:
    plan = read_plan(path)
    for ranked in plan.alternatives:
        priced = estimate(replace(plan.case, layout=ranked.layout))
        assert priced.step_seconds.expected > 0


def _later_fields() -> Iterator[tuple[str, str, Any]]:
    """(table, field, its default) of the fields that 0.2.0 did not have."""
    for kind in (Layout, Training, Model):
        for field in fields(kind):
            if field.default is not MISSING and field.name not in THEN[kind].split():
                yield kind.__name__.lower(), field.name, field.default


@pytest.mark.parametrize(("table", "name", "default"), list(_later_fields()))
def test_a_field_that_came_later_may_be_missing(table: str, name: str, default: Any) -> None:
    document = json.loads((RECORDED / "weak.json").read_text())
    document[table].pop(name, None)
    for line in document["alternatives"]:
        line.get(table, {}).pop(name, None)
    document["layout"], document["estimate"] = (
        document["alternatives"][0][part] for part in ("layout", "estimate")
    )
    plan = plan_from_json(json.dumps(document), where="plan")
    assert getattr(getattr(plan, table), name) == default


def _require_within(written: Any, read: Any) -> None:
    """All that was written stands in what was read."""
    if isinstance(written, dict):
        for key, value in written.items():
            _require_within(value, read[key])
    elif isinstance(written, list):
        assert len(written) == len(read)
        for one, other in zip(written, read, strict=True):
            _require_within(one, other)
    else:
        assert written == read
