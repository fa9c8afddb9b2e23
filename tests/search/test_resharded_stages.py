"""Pipelines of software that reshards stages: no pin finds what the search does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.spec.layout import Layout, Reshard
from tests.search.questions import WIDE, Question, question

POLICIES: tuple[Reshard, ...] = ("always", "never")


def asked(gib: float, **pins: object) -> Question:
    """A pipeline of two stages on devices with so much memory."""
    one = question(WIDE, 8, seq_len=2048, global_batch=16)
    device = replace(one.cluster.device, memory_bytes=int(gib * 2**30))
    return replace(
        one,
        cluster=replace(one.cluster, device=device),
        training=replace(one.training, runtime="automodel"),
        pins=Pins(pp=2, tp=1, **pins),  # type: ignore[arg-type]
    )


def test_what_trains_says_whether_stages_can_be_resharded() -> None:
    """torchtitan lets FSDP do so where it is told to, and AutoModel; our own trainer does not."""
    layout = Layout(
        pp=2,
        dp_shard=4,
        schedule="1f1b",
        num_microbatches=4,
        gradient_sync="last",
        reshard_after_forward="always",
    )
    one = question("llama-3.1-8b", 8, global_batch=16)
    answers = {
        name: first_problem(replace(one.case(layout), training=replace(one.training, **software)))
        for name, software in SOFTWARE.items()
    }
    assert {name for name, problem in answers.items() if problem is None} == CAN


SOFTWARE: dict[str, dict[str, Any]] = {
    "own": {},
    "hf": {"program": "hf"},
    "torchtitan": {"program": "torchtitan"},
    "automodel": {"runtime": "automodel"},
}
CAN = {"torchtitan", "automodel"}


def test_a_pin_of_torchtitan_never_wins() -> None:
    found = asked(24.5)
    training = replace(found.training, runtime="fsdp2", program="torchtitan")
    free = seconds(replace(found, training=training))
    assert free is not None
    for policy in POLICIES:
        pins = replace(found.pins, reshard_after_forward=policy)
        pinned = seconds(replace(found, training=training, pins=pins))
        assert pinned is None or free <= pinned * (1 + 1e-9)


def seconds(one: Question) -> float | None:
    """Of the fastest; None where nothing fits."""
    found = one.answer().fastest
    return found.estimate.step_seconds.expected if found else None


@pytest.mark.parametrize("gib", [20.5, 21.0, 22.5, 23.5, 24.5, 28.0])
def test_a_pinned_policy_never_wins(gib: float) -> None:
    free = seconds(asked(gib))
    pinned = [seconds(asked(gib, reshard_after_forward=policy)) for policy in POLICIES]
    some = [each for each in pinned if each is not None]
    assert (free is None) == (not some)
    if free is not None:
        assert free <= min(some) * (1 + 1e-9)


def test_resharding_lets_a_pipeline_fit_where_it_did_not() -> None:
    pins = {"schedule": "interleaved_1f1b", "virtual_stages": 3}
    assert seconds(asked(20.5, reshard_after_forward="never", **pins)) is None
    found = asked(20.5, **pins).answer().fastest
    assert found is not None
    assert found.layout.reshards_stages
