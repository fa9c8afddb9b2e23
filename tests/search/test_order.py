"""Order: what is not told apart, and which of it goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.order import (
    COMPARED,
    Entry,
    Ordered,
    form,
    gathers_widely,
    in_order,
    kinds,
    listed,
    preference,
    seconds,
    simplicity,
    spread,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate
from tests.search.entries import CLUSTER, any_entry, entry, uncertain
from tests.search.questions import Question, question

GIB = 2**30
TP = {"sequence_parallel": True, "loss_parallel": True}


def order(*entries: Entry, fraction: float = 0.02) -> Ordered[Entry]:
    """These in order, each difference as uncertain as `fraction`."""
    found = in_order(entries, difference=uncertain(fraction), cluster=CLUSTER)
    assert found is not None
    return found


def first(*entries: Entry, fraction: float = 0.02) -> Entry:
    """The first of these."""
    return order(*entries, fraction=fraction).entries[0]


def test_only_a_gain_that_is_told_apart_buys_another_kind_of_parallelism() -> None:
    plain = entry(compute=10.1, device_bytes=72 * GIB, dp_shard=16)
    split = entry(compute=10.0, dp_shard=8, tp=2, **TP)
    assert first(plain, split) == plain
    assert first(plain, split, fraction=0.005) == split


def test_of_as_many_kinds_tensor_parallelism_goes_before_a_pipeline() -> None:
    split = entry(compute=10.1, dp_shard=8, tp=2, **TP)
    piped = entry(compute=10.0, dp_shard=8, pp=2, schedule="1f1b")
    long = entry(compute=10.0, dp_shard=8, cp=2)
    assert first(split, piped, long) == split
    only_split = entry(compute=10.0, dp_shard=1, tp=16, **TP)
    assert first(only_split, entry(compute=10.1, dp_shard=16)) != only_split


def test_what_fits_whole_is_not_sharded() -> None:
    whole = entry(compute=10.1, dp_replicate=16, dp_shard=1, sharding="ddp")
    for shards in (
        entry(compute=10.0, dp_shard=16),
        entry(compute=10.0, dp_shard=16, sharding="zero1"),
        entry(compute=10.0, dp_replicate=2, dp_shard=8),
    ):
        assert first(whole, shards) == whole


def test_shards_over_all_and_over_a_node_are_everyday_and_other_groups_are_not() -> None:
    flat, by_node, odd = (
        entry(compute=compute, dp_replicate=16 // shard, dp_shard=shard)
        for compute, shard in ((10.1, 16), (10.15, 8), (10.0, 4))
    )
    assert form(flat[0], CLUSTER) == form(by_node[0], CLUSTER) < form(odd[0], CLUSTER)
    assert order(flat, by_node, odd).entries == (flat, by_node, odd)
    inside = entry(dp_replicate=2, dp_shard=4, tp=2, **TP)
    assert form(inside[0], CLUSTER) == form(flat[0], CLUSTER)


def test_then_fewer_unusual_settings_go_first() -> None:
    usual = entry(compute=10.1, device_bytes=72 * GIB)
    for unusual in (
        entry(loss_chunks=4),
        entry(reshard_after_forward=8),
        entry(activation_checkpointing="op"),
        entry(activation_checkpointing="full", checkpoint_blocks=2),
        entry(wrap_blocks=2),
        entry(offload="cpu"),
    ):
        assert first(usual, unusual) == usual


def test_then_head_room_up_to_a_least() -> None:
    tight = entry(compute=10.0, device_bytes=72 * GIB)
    roomy = entry(compute=10.1, device_bytes=66 * GIB, micro_batch=2)
    roomier = entry(compute=10.15, device_bytes=6 * GIB, micro_batch=4)
    assert order(tight, roomier, roomy).entries == (roomy, roomier, tight)


NODES = load_cluster("dgx-h100", gpus=32).cluster


def test_then_gathers_inside_a_domain() -> None:
    flat = entry(compute=10.0, dp_shard=32)
    inside = entry(compute=10.1, dp_replicate=4, dp_shard=8)
    tied = in_order([flat, inside], difference=uncertain(0.1), cluster=NODES)
    assert tied is not None
    assert tied.entries == (inside, flat)
    apart = in_order([flat, inside], difference=uncertain(0.001), cluster=NODES)
    assert apart is not None
    assert apart.entries == (flat, inside)


def test_where_crowds_are_priced_the_time_decides() -> None:
    inner, outer = NODES.levels
    priced = replace(NODES, levels=(inner, replace(outer, crowding_exponent=0.2)))
    flat = entry(compute=10.0, dp_shard=32)[0]
    assert gathers_widely(flat, NODES)
    assert not gathers_widely(flat, priced)


@pytest.mark.parametrize(
    "asked",
    [
        question("llama-2-7b", 128, "dgx-a100-80g-hdr", global_batch=1024),
        question("llama-3.2-3b", 256, global_batch=1024),
    ],
    ids=["7B", "3B"],
)
def test_of_equals_none_with_less_traffic_outside_stands_behind(asked: Question) -> None:
    found = asked.answer()
    tied = [found.ranked[rank - 1] for rank in (1, *found.listed.tied)]
    by_rest = [
        (preference((one.layout, one.estimate), asked.cluster), _outside_bytes(one.estimate, asked))
        for one in tied
    ]
    for rank, (one, passing) in enumerate(by_rest):
        for other, others_passing in by_rest[rank + 1 :]:
            alike = [replace(each, seconds=0, peak_bytes=0, text="") for each in (one, other)]
            if replace(alike[0], is_wide=False) == replace(alike[1], is_wide=False):
                assert one.is_wide <= other.is_wide
                assert one.is_wide == other.is_wide or passing < others_passing


def _outside_bytes(found: Estimate, asked: Question) -> float:
    outermost = asked.cluster.levels[-1].name
    return sum(
        wire_bytes(
            collective=row.collective,  # type: ignore[arg-type]
            gathered_bytes=row.bytes,
            ranks=row.ranks,
        )
        for row in found.communication
        if row.level == outermost
    )


def test_then_the_faster() -> None:
    slow, fast = entry(compute=10.1), entry(compute=10.0, micro_batch=2)
    assert order(slow, fast).entries == (fast, slow)


def test_a_gain_past_3_percent_always_decides() -> None:
    fast = entry(compute=10.0, device_bytes=72 * GIB, tp=2, **TP)
    roomy = entry(compute=10.31, device_bytes=1)
    assert first(fast, roomy, fraction=0.5) == fast


def test_what_is_told_apart_goes_by_time_whatever_it_is() -> None:
    fast = entry(compute=10.0)
    simple = entry(compute=12.0, dp_replicate=16, dp_shard=1, sharding="ddp")
    split = entry(compute=11.9, tp=2, async_tp=True, **TP)
    assert order(simple, split, fast).entries == (fast, split, simple)


@given(st.data())
def test_the_order_is_total_and_does_not_depend_on_how_it_began(data: Any) -> None:
    entries = data.draw(ENTRIES)
    fraction = data.draw(st.floats(0, 0.1))
    mixed = data.draw(st.permutations(entries))
    assert order(*entries, fraction=fraction) == order(*mixed, fraction=fraction)
    found = order(*entries, fraction=fraction).entries
    assert sorted(map(repr, found)) == sorted(map(repr, entries))


ENTRIES = st.lists(any_entry(), min_size=1, max_size=12, unique_by=lambda one: repr(one[0]))


@given(ENTRIES, st.floats(0, 0.1))
def test_all_are_compared_with_the_fastest_alone(entries: list[Entry], fraction: float) -> None:
    found = order(*entries, fraction=fraction)
    fastest = min(map(seconds, entries))
    assert seconds(found.fastest) == fastest
    reach = min(fraction, MOST_INDISTINGUISHABLE_FRACTION)
    for one in found.tied:
        assert seconds(one) / fastest - 1 <= reach
    for one in found.others:
        assert seconds(one) / fastest - 1 > reach
    assert list(found.others) == sorted(found.others, key=seconds)


@given(ENTRIES, st.floats(0, 0.1))
def test_none_that_is_simpler_and_not_told_apart_stands_behind(
    entries: list[Entry], fraction: float
) -> None:
    best = order(*entries, fraction=fraction)
    simplest = [simplicity(one[0], CLUSTER) for one in best.tied]
    assert simplest == sorted(simplest)
    for one in best.tied:
        shown = preference(one, CLUSTER)
        assert shown.kinds == len(kinds(one[0]))
        assert (shown.kinds, shown.weight, shown.form, shown.settings) == simplicity(
            one[0], CLUSTER
        )


@given(ENTRIES, st.floats(0, 0.1), st.integers(1, 5))
def test_the_list_has_the_first_the_fastest_and_what_people_look_for(
    entries: list[Entry], fraction: float, limit: int
) -> None:
    found = order(*entries, fraction=fraction)
    rows = listed(found, limit=limit)
    assert rows[0] is found.entries[0]
    assert any(row is found.fastest for row in rows)
    for is_of_kind in COMPARED.values():
        assert any(is_of_kind(row[0]) for row in rows) == any(is_of_kind(one[0]) for one in entries)
    assert (
        limit <= len(rows) <= limit + 1 + len(COMPARED)
        or len(rows) <= len({spread(e[0]) for e in entries}) + 1
    )
    places = [next(i for i, one in enumerate(found.entries) if one is row) for row in rows]
    assert places == sorted(places)


@pytest.mark.parametrize("fraction", [0.0, 0.02])
def test_one_that_is_alone_is_first(fraction: float) -> None:
    alone = entry()
    assert order(alone, fraction=fraction).entries == (alone,)
    assert in_order([], difference=uncertain(fraction), cluster=CLUSTER) is None


def test_equal_rows_have_an_order_too() -> None:
    one, other = entry(micro_batch=1), entry(micro_batch=2)
    assert order(one, other).entries == order(other, one).entries


def test_a_difference_that_depends_on_both_is_asked_of_the_fastest() -> None:
    asked: list[Entry] = []

    def difference(one: Entry, other: Entry) -> float:
        asked.append(one)
        return 0.02

    fast, slow = entry(compute=10.0), entry(compute=10.1, micro_batch=2)
    in_order([slow, fast], difference=difference, cluster=CLUSTER)
    assert all(one is fast for one in asked)


def test_every_setting_of_a_layout_is_a_degree_usual_or_unusual() -> None:
    """Whoever adds a field says here what it asks of whoever runs it."""
    degrees = {"dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "sharding"}
    usual = {"micro_batch", "num_microbatches", "sequence_parallel", "loss_parallel", "compile"}
    usual |= {"cp_attention"}  # the heads decide it
    unusual = {
        "reshard_after_forward": 4,
        "gradient_sync": "reduce_scatter_only",
        "wrap_blocks": 2,
        "ddp_bucket_bytes": 2**20,
        "schedule": "zbv",
        "virtual_stages": 2,
        "stage_blocks": (1, 1),
        "activation_checkpointing": "op",
        "checkpoint_blocks": 2,
        "async_tp": True,
        "experts_over_tp": True,
        "offload": "cpu",
        "loss_chunks": 2,
    }
    assert degrees | usual | set(unusual) == set(Layout.__dataclass_fields__)
    plain = Layout(pp=2, schedule="1f1b", activation_checkpointing="full")
    for name, value in unusual.items():
        odd = replace(plain, **{name: value})  # type: ignore[arg-type]
        assert simplicity(odd, CLUSTER) > simplicity(plain, CLUSTER), name
