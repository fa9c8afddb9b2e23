"""A change of precision in mid-run: priced as both parts, planned for both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import estimate, step_time
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.search.bounds.floors import PhasedFloors
from fsdpplan.search.rules.legality import legal_layout_problem, question_problem
from fsdpplan.search.space import Space
from fsdpplan.spec.plan import Case
from tests.cost.problems import SMALL
from tests.search.questions import Question, question

SHARE = 0.8


def changing(switch: str = "fp8@0.8", *, gathers: bool = False, gpus: int = 8) -> Question:
    asked = question(SMALL, gpus, seq_len=4096, global_batch=32)
    first = "bf16" if switch.startswith("fp8") else "fp8"
    training = replace(
        asked.training, precision=first, precision_switch=switch, fp8_all_gather=gathers
    )
    return replace(asked, training=training)


def parts(case: Case) -> tuple[Case, Case]:
    """What each part is as a run of its own, made here."""
    other = "fp8" if case.training.precision == "bf16" else "bf16"
    found = [
        replace(
            case,
            training=replace(
                case.training,
                precision=precision,
                precision_switch="none",
                fp8_all_gather=case.training.fp8_all_gather and precision == "fp8",
            ),
        )
        for precision in (case.training.precision, other)
    ]
    return found[0], found[1]


@pytest.mark.parametrize(
    ("switch", "gathers"), [("fp8@0.8", False), ("fp8@0.8", True), ("bf16@0.8", True)]
)
def test_the_step_is_the_mean_over_the_run_and_the_memory_the_larger(
    switch: str, gathers: bool
) -> None:
    asked = changing(switch, gathers=gathers)
    for ranked in asked.answer().ranked:
        case = asked.case(ranked.layout)
        first, second = map(estimate, parts(case))
        found = ranked.estimate
        assert found == estimate(case)
        mean = SHARE * first.time.total_seconds + (1 - SHARE) * second.time.total_seconds
        assert found.time.total_seconds == pytest.approx(mean)
        exposed = sum(row.exposed_seconds for row in found.communication)
        each = [sum(row.exposed_seconds for row in one.communication) for one in (first, second)]
        assert exposed == pytest.approx(SHARE * each[0] + (1 - SHARE) * each[1])
        peaks = [one.memory.peak_device_bytes for one in (first, second)]
        assert found.memory.peak_device_bytes == max(peaks)
        assert rank_memory(case).peak_device_bytes == max(peaks)
        assert [one.precision for one in found.phases] == [
            each.training.precision for each in parts(case)
        ]
        assert [one.step_seconds for one in found.phases] == [
            first.step_seconds,
            second.step_seconds,
        ]
        assert [one.from_fraction for one in found.phases] == [0.0, SHARE]


@pytest.mark.parametrize("switch", ["fp8@0.8", "bf16@0.3"])
def test_floors_are_below_the_step(switch: str) -> None:
    asked = changing(switch)
    space = Space(asked.asked)
    floors = space.floors
    assert isinstance(floors, PhasedFloors)
    looked_at = 0
    for d in list(space.spreads())[::5]:
        for layout in list(space.layouts(d))[::7]:
            seconds = step_time(asked.case(layout)).time.total_seconds
            assert floors.at_first_sight(d) <= seconds
            assert floors.at_usual(layout) <= seconds
            assert floors.of_settled(layout) <= seconds
            assert floors.played(layout) <= seconds
            looked_at += 1
    assert looked_at > 10


def test_it_is_no_slower_than_the_best_of_either_part() -> None:
    asked = changing()
    found = asked.answer().fastest
    assert found is not None
    for training in (each.training for each in parts(asked.case(found.layout))):
        best = replace(asked, training=training).answer().fastest
        assert best is not None
        there = step_time(asked.case(best.layout)).time.total_seconds
        assert found.estimate.step_seconds.expected <= there * (1 + 1e-9)


def test_both_parts_must_be_legal() -> None:
    asked = changing()
    found = asked.answer().fastest
    assert found is not None
    case = asked.case(found.layout)
    old = replace(case.cluster.device, peak_fp8_flops_per_second=None)
    without = replace(case, cluster=replace(case.cluster, device=old))
    problem = legal_layout_problem(without)
    assert problem is not None
    assert "leave --precision-switch out" in problem
    delayed = replace(case.training, fp8_recipe="delayed")
    said = question_problem(
        model=case.model, cluster=case.cluster, training=delayed, pins=asked.pins
    )
    assert said is not None
    assert "delayed" in said
