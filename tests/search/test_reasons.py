"""Reasons: generated from the terms of the estimates."""

from __future__ import annotations

from fsdpplan.search.order import Entry, Tied
from fsdpplan.search.reasons import reason_against, reason_for, reason_not_apart
from fsdpplan.spec.estimate import Estimate
from tests.search.entries import entry

DEVICE_BYTES = 80 * 2**30


def uncertain(one: Estimate, other: Estimate) -> float:
    """The same error for all."""
    return 0.025


def told(*entries: Entry) -> str:
    """Why the first of these, which are not told apart, is first; the last is the fastest."""
    tied = Tied(leader=entries[-1], entries=entries)
    return reason_for(tied, difference=uncertain, device_bytes=DEVICE_BYTES)


def not_apart(one: Entry, first: Entry) -> str:
    """What stands against one that is not told apart from the first, which is the fastest."""
    tied = Tied(leader=first, entries=(first, one))
    return reason_not_apart(one, tied, difference=uncertain, device_bytes=DEVICE_BYTES)


def test_the_fastest_says_so() -> None:
    assert told(entry()) == "fastest of all that fit"


def test_one_that_is_behind_says_by_how_much_of_what_error_and_why_it_is_first() -> None:
    fast = entry(compute=10, device_bytes=73 * 2**30)
    assert told(entry(compute=10.2, micro_batch=2, device_bytes=53 * 2**30), fast) == (
        "2.0% behind the fastest (micro-batch 1), which is within the error of their difference "
        "(2.5%), and leaves 20.0 GiB more free"
    )
    split = entry(compute=10, tp=2, dp_shard=8, sequence_parallel=True, loss_parallel=True)
    assert told(entry(compute=10.2), split) == (
        "2.0% behind the fastest (dp_shard 8 x tp 2), which is within the error of their "
        "difference (2.5%), and simpler"
    )
    assert told(entry(compute=10.1), entry(wrap_blocks=2)).endswith("has fewer settings to mind")


def test_a_loser_names_its_largest_loss() -> None:
    best = entry()
    assert reason_against(entry(compute=12), best) == (
        "+20.0% a step: compute: smaller or more matmuls"
    )
    recomputing = entry(compute=12, activation_checkpointing="full")
    assert reason_against(recomputing, best) == "+20.0% a step: compute: recomputes (full)"
    assert "optimizer over more parameters" in reason_against(entry(optimizer=1), best)
    assert reason_against(entry(bubble=2, exposed=1), best) == (
        "+30.0% a step: pipeline bubble of 1 stages"
    )


def test_exposed_communication_names_the_collective() -> None:
    said = reason_against(entry(exposed=3), entry())
    assert said.startswith("+30.0% a step: ")
    assert "over dp_shard of 16 (infiniband) is exposed" in said


def test_one_that_is_not_told_apart_says_what_stands_against_it() -> None:
    first = entry()
    fuller = entry(compute=9.8, device_bytes=72 * 2**30)
    assert not_apart(fuller, entry(device_bytes=60 * 2**30)) == (
        "-2.0% a step, not told apart (error 2.5%); 12.0 GiB less head-room"
    )
    split = entry(compute=9.9, tp=2, sequence_parallel=True, loss_parallel=True)
    assert "more kinds of parallelism" in not_apart(split, first)
    assert "more settings" in not_apart(entry(wrap_blocks=2), first)
    assert "hardly more head-room" in not_apart(entry(compute=10.1), first)
