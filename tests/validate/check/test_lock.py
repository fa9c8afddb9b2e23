"""A lock is of what a plan was made of: it says what differs, also one of an earlier fsdpplan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json, read_plan
from fsdpplan.files.profiles import catalogue
from fsdpplan.spec.plan import Plan
from fsdpplan.validate.check.lock import (
    Differs,
    lock_differences,
    locked,
    plan_differences,
    profile_hashes,
    read_lock,
    write_lock,
)

RECORDED = Path(__file__).parents[2] / "recordings" / "0.2.0" / "plans"
HERE = {"torch": "2.13.0", "nccl": "2.28.9", "driver": None}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan(RECORDED / "fp8.json")


def differing(path: Path, plan: Plan, here: dict[str, Any] = HERE) -> dict[str, Differs]:
    return {one.name: one for one in lock_differences(read_lock(path), locked(plan, here))}


def test_what_is_locked_does_not_differ(plan: Plan, tmp_path: Path) -> None:
    place = tmp_path / "plan.lock"
    write_lock(locked(plan, {**HERE, "driver": "550.54.15"}), place)
    first = place.read_bytes()
    found = differing(place, plan)
    assert list(found) == ["driver"]
    assert found["driver"].is_unknown
    write_lock(locked(plan, {**HERE, "driver": "550.54.15"}), place)
    assert place.read_bytes() == first


def test_each_kind_of_difference_is_said(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "plan.lock"
    write_lock(locked(plan, HERE), place)
    fabric = plan.cluster.levels[-1]
    slower = replace(fabric, port_bandwidth_bytes_per_second=12.5e9)
    other = replace(
        plan,
        cluster=replace(plan.cluster, levels=(*plan.cluster.levels[:-1], slower)),
        layout=replace(plan.layout, compile=False),
        estimate=replace(plan.estimate, mfu_fraction=0.1),
    )
    found = differing(place, other, {**HERE, "nccl": "2.30.1"})
    bandwidth = f"cluster.levels.{fabric.name}.port_bandwidth_bytes_per_second"
    assert {name: one.part for name, one in found.items() if not one.is_unknown} == {
        "nccl": "versions",
        bandwidth: "inputs",
        "compile": "layout",
        "mfu_fraction": "predicted",
    }
    assert found[bandwidth].after == 12.5e9
    texts = {name: catalogue.profile_text(name) for name in profile_hashes(plan)}
    device = plan.cluster.device.name
    texts[device] = texts[device].replace(
        "memory_bytes = { value = 8", "memory_bytes = { value = 7"
    )
    monkeypatch.setattr("fsdpplan.validate.check.lock.profile_text", texts.__getitem__)
    assert [one.part for one in differing(place, plan).values() if not one.is_unknown] == [
        "profiles"
    ]


def test_a_comment_in_a_profile_changes_no_hash(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profile_hashes(plan)
    assert {plan.cluster.name, plan.cluster.device.name, "physics"} <= before.keys()
    said = {name: f"# a word\n{catalogue.profile_text(name)}" for name in before}
    monkeypatch.setattr("fsdpplan.validate.check.lock.profile_text", said.__getitem__)
    assert profile_hashes(plan) == before


def test_a_lock_of_an_earlier_fsdpplan_lacks_what_came_since(plan: Plan, tmp_path: Path) -> None:
    """As if locked when the plan was written: its own words, without today's fields."""
    written = json.loads((RECORDED / "fp8.json").read_text())
    lock = locked(plan, HERE)
    old = {**lock, **{name: written[name] for name in ("model", "cluster", "training", "layout")}}
    old["versions"] = {**lock["versions"], "fsdpplan": "0.1.0"}
    assert len(old["training"]) < len(lock["training"])
    place = tmp_path / "plan.lock"
    write_lock(old, place)
    found = differing(place, plan)
    assert [name for name, one in found.items() if not one.is_unknown] == ["fsdpplan"]
    assert (found["fsdpplan"].before, found["fsdpplan"].part) == ("0.1.0", "versions")


def test_plans_of_two_versions_differ_in_the_version_alone(plan: Plan) -> None:
    again = replace(plan, versions=(("fsdpplan", "0.3.0"), *plan.versions[1:]))
    assert [one.name for one in plan_differences(plan, again)] == ["fsdpplan"]
    assert plan_differences(plan, plan) == ()
    assert plan_json(plan) != plan_json(again)


def test_a_level_more_or_less_is_a_difference(plan: Plan) -> None:
    less = replace(plan, cluster=replace(plan.cluster, levels=plan.cluster.levels[-1:]))
    names = [one.name for one in plan_differences(plan, less)]
    assert "cluster.levels.length" in names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[]", "--write-lock"),
        ('{"lock_version": 2}', "lock_version is 2"),
        ('{"lock_version": 1, "versions": []}', "versions is missing or no table"),
    ],
)
def test_what_is_no_lock_is_one_error(text: str, said: str, tmp_path: Path) -> None:
    place = tmp_path / "plan.lock"
    place.write_text(text)
    with pytest.raises(SpecError, match=said if said != "--write-lock" else "."):
        read_lock(place)
    with pytest.raises(SpecError, match="add --write-lock"):
        read_lock(tmp_path / "none.lock")
