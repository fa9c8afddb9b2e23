"""No pin beats the free search where memory is tight; `make tight` has a hundred questions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.cost.memory.peak import node_host_bytes
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.units import format_gib
from tests.search.tight import (
    ALONE,
    CARDS,
    MIXTRAL,
    pins_of,
    questions,
    seconds,
    small_questions,
    winners,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_no_pin_wins(seed: int) -> None:
    *_, drawn = questions(3, seed=seed)
    assert winners(drawn, pins_of) == []


@pytest.mark.parametrize(
    ("at", "pin"),
    [(0, {"pp": 2}), (1, {"pp": 2}), (2, {"sharding": "fsdp"}), (3, {"sharding": "fsdp"})],
)
def test_a_pipeline_that_is_far_from_the_fastest_is_tried_with_other_stages(
    at: int, pin: dict[str, Any]
) -> None:
    *_, asked = small_questions(at + 1)
    assert winners(asked, lambda _: iter([pin])) == []


def test_what_full_recomputation_makes_much_slower_is_looked_at_with_less_of_it() -> None:
    free, pinned = seconds(MIXTRAL), seconds(replace(MIXTRAL, pins=Pins(micro_batch=1)))
    assert free is not None
    assert pinned is not None
    assert free <= pinned * (1 + 1e-9)


def test_pieces_of_the_loss_that_were_needed_to_fit_are_no_floor_of_what_needs_fewer() -> None:
    assert winners(ALONE, pins_of) == []


def test_state_goes_to_the_host_where_that_is_faster_than_links_between_devices() -> None:
    free = recommend(model=CARDS.model, cluster=CARDS.cluster, training=CARDS.training, pins=Pins())
    here = seconds(replace(CARDS, pins=Pins(offload="none")))
    assert free.fastest is not None
    assert free.fastest_seconds is not None
    assert here is not None
    assert free.fastest.layout.offload == "cpu"
    assert 2 * free.fastest_seconds < here
    assert not any(row.layout.async_tp for row in free.ranked)


def test_state_on_the_host_is_no_more_than_a_node_has() -> None:
    def on_host(gib: int | None) -> bool:
        size = None if gib is None else gib * 2**30
        cluster = replace(CARDS.cluster, host_memory_bytes=size)
        found = recommend(model=CARDS.model, cluster=cluster, training=CARDS.training, pins=Pins())
        for row in found.ranked:
            case = Case(
                model=CARDS.model, cluster=cluster, training=CARDS.training, layout=row.layout
            )
            assert size is None or node_host_bytes(case) <= size
            least = row.estimate.memory.host_bytes
            assert least <= node_host_bytes(case) <= least * cluster.gpus_per_node
        assert found.fastest is not None
        return found.fastest.layout.offload == "cpu"

    assert on_host(None)
    assert on_host(128)
    assert not on_host(64)


def test_a_pinned_layout_that_a_node_cannot_hold_is_refused_in_numbers() -> None:
    layout = Layout(dp_shard=8, sharding="fsdp", offload="cpu", num_microbatches=8, compile=True)
    cluster = replace(CARDS.cluster, host_memory_bytes=64 * 2**30)
    case = replace(CARDS, cluster=cluster).case(layout)
    problem = first_problem(case)
    assert problem is not None
    assert "does not fit in host memory" in problem.reason
    assert format_gib(node_host_bytes(case)) in problem.sentence
    assert "64.0 GiB" in problem.sentence
    assert first_problem(CARDS.case(layout)) is None
