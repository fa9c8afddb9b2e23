"""Two steps by their terms: they add up, nothing changed is no difference, shared errors cancel."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isclose
from typing import Any

import pytest
from hypothesis import given, settings

from fsdpplan.cost.band import (
    NORMAL_80,
    difference_fraction,
    difference_log_error,
    error_of,
    log_error,
    ratio_log_error,
)
from fsdpplan.cost.estimate import estimate
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.difference import (
    Priced,
    changed_inputs,
    difference,
    kept_layout,
    memory_terms,
    step_terms,
)
from fsdpplan.spec.plan import Case
from tests.cost.problems import case, cases


def priced(asked: Case) -> Priced:
    """A case with its estimate."""
    return Priced(case=asked, estimate=estimate(asked))


@settings(max_examples=30, deadline=None)
@given(one=cases(), other=cases())
def test_terms_add_up_to_the_whole(one: Case, other: Case) -> None:
    before, after = priced(one), priced(other)
    steps = [each.estimate.step_seconds.expected for each in (before, after)]
    assert isclose(sum(step_terms(before.estimate).values()), steps[0], rel_tol=1e-9)
    peak = before.estimate.memory.peak_device_bytes
    assert sum(memory_terms(before.estimate).values()) == peak
    found = difference(before, after)
    change = sum(term.change for term in found.time)
    assert isclose(change, steps[1] - steps[0], rel_tol=1e-9, abs_tol=1e-9 * max(steps))
    assert sum(term.change for term in found.memory) == (
        after.estimate.memory.peak_device_bytes - peak
    )


@settings(max_examples=15, deadline=None)
@given(one=cases(), other=cases())
def test_there_and_back(one: Case, other: Case) -> None:
    forth = difference(priced(one), priced(other))
    back = difference(priced(other), priced(one))
    assert isclose(forth.ratio * back.ratio, 1)
    assert isclose(forth.error_fraction, back.error_fraction)
    assert isclose(forth.faster_chance, 1 - back.faster_chance, abs_tol=1e-12)


def test_nothing_changed_is_no_difference() -> None:
    one = priced(case(dp_shard=8, sharding="fsdp", reshard_after_forward="always"))
    found = difference(one, one)
    assert (found.ratio, found.told_apart, found.faster_chance) == (1, False, 0.5)
    assert not any(term.change for term in (*found.time, *found.memory))
    assert changed_inputs(one.case, one.case) == ()


def test_of_one_question_the_error_is_that_of_its_ranking() -> None:
    one = priced(case(dp_shard=8, sharding="fsdp", reshard_after_forward="always"))
    layout = replace(one.case.layout, activation_checkpointing="full")
    other = priced(replace(one.case, layout=layout))
    ranked = difference_fraction(one.estimate, other.estimate, cluster=one.case.cluster)
    assert difference(one, other).error_fraction == pytest.approx(ranked, rel=1e-12)


def test_what_two_machines_do_not_share_does_not_cancel() -> None:
    shape: dict[str, Any] = {"dp_shard": 16, "sharding": "fsdp", "reshard_after_forward": "always"}
    one, other = (priced(case(profile=name, **shape)) for name in ("dgx-h100", "dgx-h200"))
    errors = [
        log_error(each.estimate.time, error_of(each.case.cluster, "own")) for each in (one, other)
    ]
    whole = exp(NORMAL_80 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5) - 1
    assert difference(one, other).error_fraction == pytest.approx(whole)


def test_another_network_has_an_error_of_its_own() -> None:
    one = priced(case(dp_shard=16, sharding="fsdp", reshard_after_forward="always"))
    slow = load_cluster("dgx-h100", gpus=16, inter_bandwidth_bytes_per_second=5e9).cluster
    other = priced(replace(one.case, cluster=slow))
    shared = difference_log_error(
        one.estimate.time, other.estimate.time, one.case.cluster.device.error
    )
    assert ratio_log_error(one.step, other.step) > shared
    found = difference(one, other)
    assert found.told_apart
    assert found.first.name == "exposed dp_shard"
    assert [one.name for one in changed_inputs(one.case, other.case)] == [
        "infiniband_bytes_per_second"
    ]


def test_more_nodes_share_the_network() -> None:
    one = case(dp_replicate=2, dp_shard=8, sharding="fsdp", reshard_after_forward="always")
    more = load_cluster("dgx-h100", gpus=32).cluster
    kept = kept_layout(one, replace(one, cluster=more)).problem
    assert "global batch" in kept
    training = replace(one.training, global_batch=32)
    asked = replace(one, training=training)
    layout = kept_layout(
        replace(asked, layout=replace(one.layout, num_microbatches=2)),
        replace(asked, cluster=more),
    ).layout
    assert layout is not None
    assert (layout.dp_replicate, layout.dp_shard, layout.num_microbatches) == (4, 8, 1)
    before = priced(replace(asked, layout=replace(one.layout, num_microbatches=2)))
    after = priced(replace(asked, cluster=more, layout=layout))
    error = before.case.cluster.device.error
    shared = difference_log_error(before.estimate.time, after.estimate.time, error)
    assert ratio_log_error(before.step, after.step) == shared


@pytest.mark.parametrize(
    ("degrees", "gpus", "then"),
    [
        ({"dp_shard": 16}, 32, {"dp_shard": 32}),
        ({"dp_replicate": 16, "sharding": "ddp"}, 8, {"dp_replicate": 8}),
        ({"dp_replicate": 2, "dp_shard": 4, "tp": 2}, 64, {"dp_replicate": 8, "dp_shard": 4}),
        ({"dp_shard": 2, "tp": 8}, 8, {"dp_shard": 1}),
        ({"dp_replicate": 2, "dp_shard": 8}, 8, {"dp_replicate": 1, "dp_shard": 8}),
    ],
)
def test_data_parallelism_takes_what_comes_and_goes(
    degrees: dict[str, Any], gpus: int, then: dict[str, int]
) -> None:
    fsdp: dict[str, Any] = {"sharding": "fsdp", "reshard_after_forward": "always"}
    split: dict[str, Any] = (
        {"sequence_parallel": True, "loss_parallel": True} if "tp" in degrees else {}
    )
    one = case(**{**(fsdp if "sharding" not in degrees else {}), **split, **degrees})
    cluster = load_cluster("dgx-h100", gpus=gpus).cluster
    batch = replace(one.training, global_batch=64)
    kept = kept_layout(one, replace(one, cluster=cluster, training=batch))
    if kept.layout is None:
        assert then["dp_shard"] == 1, "FSDP over one rank is none"
        return
    assert {name: getattr(kept.layout, name) for name in then} == then
    assert (kept.layout.world, kept.layout.global_batch) == (gpus, 64)


def test_experts_that_do_not_divide_other_shards_cannot_be_kept() -> None:
    one = case(dp_shard=16, ep=16, sharding="fsdp", reshard_after_forward="always")
    more = load_cluster("dgx-h100", gpus=24).cluster
    kept = kept_layout(one, replace(one, cluster=more))
    assert kept.layout is None
    assert "ep 16 must divide dp_shard * cp = 24" in kept.problem


def test_what_cannot_be_kept_says_why() -> None:
    one = case(dp_replicate=2, dp_shard=8, sharding="fsdp", reshard_after_forward="always")
    three = load_cluster("dgx-h100", gpus=24, gpus_per_node=4).cluster
    assert kept_layout(one, replace(one, cluster=three)).layout is None
    odd = load_cluster("dgx-h100", gpus=4).cluster
    assert "do not fill 4 GPUs" in kept_layout(one, replace(one, cluster=odd)).problem
