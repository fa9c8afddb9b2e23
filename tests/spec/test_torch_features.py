from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.spec.model import Experts
from fsdpplan.spec.plan import Case
from fsdpplan.spec.torch_features import (
    FEATURES,
    features_lacked,
    lacking,
    slower_without,
    torch_need,
)
from fsdpplan.spec.training import NEWEST_TESTED, OLDEST, TorchRelease
from tests.emit.plans import make_plan

RING = {"cp": 2, "dp_shard": 4}
EMPTY = {"pp": 2, "dp_shard": 4, "virtual_stages": 2, "stage_blocks": (1, 0, 1, 0)}


def case(kind: Any = "cuda", torch: str | None = None, **layout: Any) -> Case:
    plan = make_plan(kind, per_node=8, **layout).case
    return replace(plan, training=replace(plan.training, torch=torch))


def test_every_feature_is_done_without_or_something_else_is_named() -> None:
    for feature in FEATURES:
        assert OLDEST < feature.since <= NEWEST_TESTED, "before the floor all releases have it"
        assert bool(feature.done_without) != bool(feature.instead)
        assert feature.oldest == (OLDEST if feature.done_without else feature.since)


@pytest.mark.parametrize(
    ("asked", "oldest"),
    [
        (case(), "2.8"),
        (case("cpu"), "2.8"),
        (case(**RING), "2.10"),
        (case("cpu", **RING), "2.8"),
        (case(pp=2, dp_shard=4, schedule="dualpipev", virtual_stages=2), "2.9"),
        (case(pp=2, dp_shard=4, schedule="zbv", virtual_stages=2), "2.8"),
        (case(**EMPTY, schedule="zbv"), "2.12"),
        (case(**EMPTY, schedule="interleaved_1f1b"), "2.8"),
        (case(tp=2, dp_shard=4, ep=2), "2.9"),
        (case(dp_shard=8, ep=2), "2.8"),
    ],
    ids=[
        "shards",
        "CPU",
        "ring",
        "heads traded on CPU",
        "dualpipev",
        "zbv",
        "an empty stage, backward split",
        "an empty stage",
        "ep x tp",
        "ep",
    ],
)
def test_a_plan_needs_the_newest_of_its_features(asked: Case, oldest: str) -> None:
    need = torch_need(asked)
    assert str(need.oldest) == oldest
    assert bool(need.because) == (need.oldest > OLDEST)


def test_what_a_plan_needs_is_what_the_search_lets_through() -> None:
    for minor in range(OLDEST.minor, NEWEST_TESTED.minor + 1):
        asked = case(torch=f"2.{minor}", **RING)
        assert (lacking(asked) is None) == (torch_need(asked).oldest <= TorchRelease(2, minor))


def test_another_program_s_features_are_its_own() -> None:
    asked = case(torch="2.8", **RING)
    asked = replace(asked, training=replace(asked.training, runtime="megatron"))
    assert lacking(asked) is None
    assert torch_need(asked).oldest == OLDEST


def test_nothing_is_lacking_where_nobody_said_the_release() -> None:
    assert lacking(case(**RING)) is None


def test_newer_releases_lack_no_more() -> None:
    minors = range(OLDEST.minor, NEWEST_TESTED.minor + 1)
    lacked = [len(features_lacked(TorchRelease(2, minor))) for minor in minors]
    assert lacked == sorted(lacked, reverse=True)
    assert lacked[-1] == 0


def test_experts_are_slower_before_grouped_matmuls() -> None:
    mixture = Experts(experts=4, active=2, hidden=64)
    asked = case(torch="2.9")
    asked = replace(asked, model=replace(asked.model, experts=mixture))
    assert [feature.name for feature in slower_without(asked)] == ["grouped matmuls"]
    newer = replace(asked, training=replace(asked.training, torch="2.10"))
    assert slower_without(newer) == ()
