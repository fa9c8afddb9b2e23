"""What measured runs say decides the search, and the search says what to run next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

import pytest

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import expected_gain, next_run
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate, Interval, LearnedStep
from tests.cost.problems import case

ONE = case("llama-3.2-1b", dp_shard=8)


@dataclass(frozen=True)
class Slower:
    """Some layouts take so many times as long as is predicted."""

    factor: float
    tp: int

    def corrected(self, layout: Layout, estimate: Estimate) -> Estimate:
        factor = self.factor if layout.tp == self.tp else 1.0
        seconds = factor * estimate.time.total_seconds
        return replace(
            estimate,
            step_seconds=Interval(lower=seconds, expected=seconds, upper=seconds),
            learned=LearnedStep(
                runs=1, factor=factor, without=estimate.step_seconds, nearest="one", far=""
            ),
        )

    def difference_fraction(
        self, one: tuple[Layout, Estimate], other: tuple[Layout, Estimate]
    ) -> float:
        return 0.05


def test_runs_change_which_layout_is_first() -> None:
    asked = {"model": ONE.model, "cluster": ONE.cluster, "training": ONE.training, "pins": Pins()}
    plain = recommend(**asked)  # type: ignore[arg-type]
    assert plain.listed.next_run is None
    tp = plain.ranked[0].layout.tp
    learned = recommend(**asked, learner=Slower(factor=4.0, tp=tp))  # type: ignore[arg-type]
    assert learned.ranked[0].layout.tp != tp
    assert learned.ranked[0].estimate.learned is not None
    slow = [one.estimate for one in learned.ranked if one.layout.tp == tp]
    assert all(one.step_seconds.expected > 3.9 * (plain.fastest_seconds or 0.0) for one in slow)


def test_a_search_that_learned_nothing_new_finds_the_same() -> None:
    asked = {"model": ONE.model, "cluster": ONE.cluster, "training": ONE.training, "pins": Pins()}
    plain = recommend(**asked)  # type: ignore[arg-type]
    same = recommend(**asked, learner=Slower(factor=1.0, tp=1))  # type: ignore[arg-type]
    assert same.fastest_seconds == pytest.approx(plain.fastest_seconds)


def test_a_look_may_only_gain() -> None:
    assert expected_gain(behind_log=0.0, deviation=0.1) == pytest.approx(0.1 * 0.398942, rel=1e-4)
    assert expected_gain(behind_log=0.3, deviation=0.1) < 0.001
    assert expected_gain(behind_log=-0.3, deviation=0.0) == 0.3
    assert expected_gain(behind_log=0.3, deviation=0.0) == 0.0


def test_most_worth_running_is_what_is_near_and_unknown() -> None:
    error = exp(NORMAL_80 * 0.1) - 1
    known, near, far = (2, 1.01, 0.001), (3, 1.02, error), (4, 1.5, error)
    found = next_run([known, near, far], 1.0)
    assert found is not None
    assert found.rank == 3
    assert found.chance == pytest.approx(0.42, abs=0.01)
    gain = expected_gain(behind_log=log(1.02), deviation=0.1)
    assert found.expected_gain_fraction == pytest.approx(gain)
    assert next_run([known, far], 1.0) is None
