"""Enumerate: every way to spread the ranks, and the policies that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.search.enumerate import (
    Degrees,
    context_ranks,
    degrees,
    divisors,
    micro_batches,
    reshard_policies,
    schedules,
    sync_policies,
)
from fsdpplan.search.pins import Pins
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster
from tests.cost.problems import SMALL

MIXTURE = replace(SMALL, experts=Experts(experts=12, active=2, hidden=512))


def spread(**changes: object) -> Degrees:
    """Degrees of one rank but for what is given."""
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    return Degrees(**{"sharding": "fsdp", **ones, **changes})  # type: ignore[arg-type]


def spreads(
    gpus: int,
    *,
    model: Model = SMALL,
    seq_len: int = 1024,
    global_batch: int = 4096,
    **pins: object,
) -> list[Degrees]:
    """Every way to spread `gpus` ranks."""
    return list(
        degrees(
            model=model,
            cluster=cluster(gpus=gpus),
            training=Training(seq_len=seq_len, global_batch=global_batch),
            pins=Pins(**pins),  # type: ignore[arg-type]
        )
    )


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@pytest.mark.parametrize(("gpus", "ways"), [(1, 1), (2, 4), (8, 20), (6, 16)])
def test_every_way_is_there_once(gpus: int, ways: int) -> None:
    every, found = spreads(gpus), spreads(gpus, cp=1)
    assert len(set(every)) == len(every) >= len(found)
    on_device = {d for d in found if d.offload == "none"}
    assert len(on_device) == ways  # ordered products of four degrees
    on_host = {d._replace(offload="none") for d in found if d.offload == "cpu"}
    assert {d for d in on_device if d.sharding == "fsdp"} <= on_host
    for d in every:
        assert d.pp * d.data_parallel * d.cp * d.tp == gpus
        assert (d.sharding == "ddp") == (d.dp_shard * d.cp == 1 and d.offload == "none")


def test_six_gpus_split_by_three() -> None:
    found = {d.dp_shard for d in spreads(6)}
    assert found == {1, 2, 3, 6}


@pytest.mark.parametrize(
    "pins",
    [{"tp": 2}, {"pp": 4}, {"dp_shard": 8}, {"dp_replicate": 2}, {"tp": 2, "dp_shard": 4}],
)
def test_pinned_degrees_are_kept(pins: dict[str, int]) -> None:
    found = spreads(16, **pins)
    assert found
    for d in found:
        assert {name: getattr(d, name) for name in pins} == pins


def test_pinned_sharding_is_kept() -> None:
    for sharding in ("ddp", "fsdp"):
        found = spreads(8, sharding=sharding)
        assert {d.sharding for d in found} == {sharding}


def test_pins_that_do_not_multiply_leave_nothing() -> None:
    assert spreads(8, tp=3) == []


def test_sequences_are_split_into_two_pieces_a_rank() -> None:
    def tried(seq_len: int, gpus: int = 64, **pins: object) -> tuple[int, ...]:
        return context_ranks(
            cluster=cluster(gpus=gpus),
            training=Training(seq_len=seq_len, global_batch=64),
            pins=Pins(**pins),  # type: ignore[arg-type]
        )

    assert tried(4096) == (1, 2, 4, 8, 16, 32, 64)
    assert tried(4096 + 4) == (1, 2)
    assert tried(4096, 24) == (1, 2, 4, 8)
    assert tried(4096, cp=16) == (16,)


def test_experts_are_split_by_what_divides_them_and_the_shard_group() -> None:
    found = spreads(8, model=MIXTURE, tp=1, pp=1, cp=1)
    assert {d.ep for d in found if d.dp_shard == 8} == {1, 2, 4}
    assert {d.ep for d in found if d.dp_shard == 1} == {1}
    assert {d.ep for d in spreads(8)} == {1}
    assert {(d.ep, d.dp_shard % 4) for d in spreads(8, model=MIXTURE, ep=4, cp=1)} == {(4, 0)}


@given(st.integers(1, 64), st.integers(1, 200))
def test_micro_batches_fill_the_share_of_a_rank(data_parallel: int, per_rank: int) -> None:
    training = Training(seq_len=128, global_batch=data_parallel * per_rank)
    found = micro_batches(training=training, data_parallel=data_parallel, pins=Pins())
    assert found[0] == 1
    assert list(found) == sorted(found)
    assert found[-1] == per_rank
    assert all(per_rank % n == 0 for n in found)
    assert micro_batches(
        training=training, data_parallel=data_parallel, pins=Pins(micro_batch=7)
    ) == (7,)


def test_resharding_to_the_node_is_offered_where_the_group_leaves_it() -> None:
    def policies(**changes: object) -> tuple[object, ...]:
        return reshard_policies(d=spread(**changes), cluster=cluster(gpus=64), pins=Pins())

    assert policies(dp_shard=64) == ("always", 8, "never")
    assert policies(dp_shard=32, cp=2) == ("always", 8, "never")
    assert policies(dp_shard=32, tp=2) == ("always", "never")
    assert policies(dp_shard=8, dp_replicate=8) == ("always", "never")
    assert policies(sharding="ddp", dp_replicate=64) == ("always",)
    assert policies(dp_shard=16, pp=4) == ("never",)
    assert policies(dp_shard=64, ep=2) == ("always", "never")
    assert policies(sharding="zero1", dp_shard=64) == ("always",)


def test_only_policies_that_differ_are_offered() -> None:
    def policies(number: int, **changes: object) -> tuple[object, ...]:
        return sync_policies(d=spread(**changes), num_microbatches=number, pins=Pins())

    assert policies(1, dp_shard=8) == ("every",)
    assert policies(4, dp_shard=8) == ("every", "last")
    assert set(policies(4, dp_shard=8, dp_replicate=2)) == {
        "last",
        "reduce_scatter_only",
        "every",
    }
    assert policies(4, sharding="ddp", dp_replicate=8) == ("last",)
    assert policies(4, dp_shard=2, pp=4) == ("last",)


def test_interleaving_needs_blocks_and_whole_rounds() -> None:
    def offered(pp: int, number: int, **pins: object) -> list[tuple[str, int]]:
        return list(
            schedules(
                d=spread(pp=pp),
                model=SMALL,
                num_microbatches=number,
                pins=Pins(**pins),  # type: ignore[arg-type]
            )
        )

    assert offered(1, 8) == [("none", 1)]
    assert offered(2, 8) == [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)]
    assert offered(4, 8) == [("1f1b", 1), ("interleaved_1f1b", 2)]
    assert offered(4, 6) == [("1f1b", 1), ("interleaved_1f1b", 2)]  # one round of six
    assert offered(4, 9) == [("1f1b", 1)]
    assert offered(4, 8, schedule="gpipe") == [("gpipe", 1)]
    assert offered(1, 8, schedule="1f1b") == []
    assert offered(2, 8, schedule="zbv") == [("zbv", 2)]
    assert offered(2, 8, schedule="interleaved_zero_bubble") == [
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 3),
    ]
