"""1F1B with fewer micro-batches than stages: legal for software whose schedule takes them."""

from __future__ import annotations

import pytest

from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.space import Space
from fsdpplan.spec.runtime import RUNTIMES
from tests.cost.problems import SMALL, Case, case


def short(runtime: str, number: int, **more: object) -> Case:
    """Four stages and `number` micro-batches."""
    return case(
        SMALL,
        runtime=runtime,
        pp=4,
        schedule="1f1b",
        sharding="ddp",
        gradient_sync="last",
        num_microbatches=number,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("runtime", [one.name for one in RUNTIMES if one.name != "autocast"])
def test_who_shortens_the_warm_up_may_have_few(runtime: str) -> None:
    can = next(one for one in RUNTIMES if one.name == runtime).shortens_warmup
    for number in (1, 2, 3, 4, 5):
        problem = short(runtime, number).problem
        assert (problem is None) == (can or number >= 4), problem


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_few_is_priced_within_its_bounds(number: int) -> None:
    few = short("megatron", number, compile=True)
    whole = few.seconds
    assert step_timeline(few).step_seconds == pytest.approx(whole)
    asked = Question(model=few.model, cluster=few.cluster, training=few.training, pins=Pins())
    space = Space(asked)
    floors = space.floors
    for floor in (floors.at(few.layout), floors.of_settled(few.layout), floors.played(few.layout)):
        assert floor <= whole * (1 + 1e-9)
    assert space.fits(few.layout)
    # every stage is passed twice, and the bubble is all but the rank's own work
    assert few.estimate.time.bubble_seconds > 0


def test_more_micro_batches_take_longer_and_less_each() -> None:
    each = [short("megatron", number).seconds for number in (1, 2, 3, 4, 6)]
    assert each == sorted(each)
    per = [seconds / number for seconds, number in zip(each, (1, 2, 3, 4, 6), strict=True)]
    assert per == sorted(per, reverse=True)
