"""Case: what the cost model is asked, and what of it is asked of a kind of blocks."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.spec.model import Experts
from tests.emit.plans import make_plan


def test_a_plan_is_a_case_of_the_same_nouns() -> None:
    plan = make_plan("cuda", per_node=8, dp_shard=8)
    case = plan.case
    assert (case.model, case.cluster) == (plan.model, plan.cluster)
    assert (case.training, case.layout) == (plan.training, plan.layout)
    assert case.on_cuda
    assert not make_plan("cpu", per_node=8, dp_shard=8).case.on_cuda


def test_equal_cases_are_one_key_whatever_was_asked_of_them() -> None:
    plan = make_plan("cuda", per_node=8, dp_shard=8)
    first, second = plan.case, plan.case
    assert hash(first) == hash(second)
    assert {first: 1}[second] == 1
    other = replace(first, layout=replace(first.layout, compile=not first.layout.compile))
    assert other != first


def test_blocks_of_one_kind_are_a_case_of_their_own() -> None:
    case = make_plan("cuda", per_node=8, dp_shard=8).case
    mixture = replace(case.model, experts=Experts(experts=8, active=2, hidden=64))
    assert case.of_blocks(case.model) is case
    assert case.of_blocks(mixture) == replace(case, model=mixture)
