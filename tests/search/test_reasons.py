"""Reasons: generated from the terms of the estimates."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.search.reasons import Entry, reason_against, reason_for
from fsdpplan.spec.estimate import Interval, TimeBreakdown
from tests.cost.problems import case


def entry(*, compute: float = 10.0, **parts: float) -> Entry:
    """A layout whose step takes what is given."""
    run = case("llama-3.1-8b", dp_shard=16, activation_checkpointing=parts.pop("mode", "none"))
    names = ("exposed_communication_seconds", "bubble_seconds", "optimizer_seconds")
    time = TimeBreakdown(
        compute_seconds=compute, **{name: parts.get(name.split("_")[0], 0.0) for name in names}
    )
    seconds = time.total_seconds
    band = Interval(lower=seconds, expected=seconds, upper=seconds)
    return run.layout, replace(run.estimate, step_seconds=band, time=time)


def test_the_fastest_says_so_and_a_simpler_one_says_by_how_much_it_is_behind() -> None:
    assert reason_for([entry(compute=10), entry(compute=11)]) == "fastest of all that fit"
    assert reason_for([entry(compute=10.2), entry(compute=10)]) == (
        "2.0% behind the fastest, which is within the error, and simpler"
    )


def test_a_loser_names_its_largest_loss() -> None:
    best = entry()
    assert reason_against(entry(compute=12), best) == (
        "+20.0% a step: compute: smaller or more matmuls"
    )
    recomputing = entry(compute=12, mode="full")  # type: ignore[arg-type]
    assert reason_against(recomputing, best) == "+20.0% a step: compute: recomputes (full)"
    assert "optimizer over more parameters" in reason_against(entry(optimizer=1), best)
    assert reason_against(entry(bubble=2, exposed=1), best) == (
        "+30.0% a step: pipeline bubble of 1 stages"
    )


def test_exposed_communication_names_the_collective() -> None:
    told = reason_against(entry(exposed=3), entry())
    assert told.startswith("+30.0% a step: ")
    assert "over dp_shard of 16 (infiniband) is exposed" in told


def test_one_that_is_not_slower_is_more_complicated() -> None:
    assert reason_against(entry(compute=9.8), entry()) == (
        "-2.0% a step, within the error, for more kinds of parallelism"
    )
