"""Pipelines of software that reshards stages: no pin finds what the search does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.search.pins import Pins
from fsdpplan.spec.layout import Reshard
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
