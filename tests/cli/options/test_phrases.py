"""What a screen prints of a layout can be typed after `--why`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.options.wanted import wanted
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.words import (
    batch_words,
    compact,
    degrees,
    describe,
    differences,
    name,
    policy,
    settings,
)
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from tests.strategies import clusters, spoken_layouts


@st.composite
def spoken(draw: st.DrawFn) -> tuple[Cluster, Layout, Layout]:
    """A machine and two layouts on it."""
    cluster = draw(clusters())
    one, other = (draw(spoken_layouts(gpus=cluster.gpus)) for _ in range(2))
    return cluster, one, other


def lines(layout: Layout, other: Layout, cluster: Cluster) -> list[str]:
    """What screens print of `layout`, beside another one."""
    row = "; ".join((degrees(layout), *differences(layout, other)))
    return [
        describe(layout, cluster),
        degrees(layout),
        policy(layout),
        batch_words(layout),
        name(layout),
        row,
        f"   2  36.4 min, 21.4 GiB, fits over 99 %: {row}",
        f"{describe(layout, cluster)}, {policy(layout)}, {batch_words(layout)}",
        compact(layout),
        f"  12  {compact(layout)}  74.6 s  65.9 GiB  a tie; needs tensor parallelism",
        f"  USE   {describe(layout, cluster)}; {', '.join(settings(layout))}",
    ]


@given(spoken())
def test_each_line_of_a_layout_asks_for_what_that_layout_has(
    drawn: tuple[Cluster, Layout, Layout],
) -> None:
    cluster, layout, other = drawn
    for line in lines(layout, other, cluster):
        assert wanted(line, name="--why").allows(layout), line


@given(spoken())
def test_a_description_asks_for_nothing_that_another_one_says(
    drawn: tuple[Cluster, Layout, Layout],
) -> None:
    cluster, layout, other = drawn
    both = [
        f"{degrees(one)}, {describe(one, cluster)}, {batch_words(one)}" for one in (layout, other)
    ]
    asked = wanted(both[0], name="--why")
    if asked.allows(other):
        assert (layout.dp_shard, layout.cp, layout.micro_batch) == (
            other.dp_shard,
            other.cp,
            other.micro_batch,
        )
        assert layout.num_microbatches == other.num_microbatches


PHRASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "FSDP over 8, tp 2, full recomputation": (
        {"sharding": "fsdp", "dp_shard": 8, "cp": 1, "tp": 2, "activation_checkpointing": "full"},
        (),
    ),
    "FSDP: shard over 2 GPUs of a node, tensor parallel over 2 GPUs of a node": (
        {"sharding": "fsdp", "dp_shard": 2, "cp": 1, "tp": 2},
        (),
    ),
    "FSDP: shard over the 8 GPUs of a node, context parallel over 2 GPUs of a node": (
        {"sharding": "fsdp", "dp_shard": 4, "cp": 2},
        (),
    ),
    "HSDP 2 x 32": ({"sharding": "fsdp", "dp_replicate": 2, "dp_shard": 32, "cp": 1}, ()),
    "loss in 8 pieces": ({"loss_chunks": 8}, ()),
    "pieces of the loss 8": ({"loss_chunks": 8}, ()),
    "state and optimizer on the host": ({"offload": "cpu"}, ()),
    "full in the first 4 blocks of each stage": (
        {"activation_checkpointing": "full", "checkpoint_blocks": 4},
        (),
    ),
    "pipeline of 4 stages (interleaved 1F1B)": ({"pp": 4, "schedule": "interleaved_1f1b"}, ()),
    "ep 4 x tp 2": ({"ep": 4, "tp": 2, "experts_over_tp": True}, ()),
    "tensor parallel over 2 nodes, whole experts over 8 GPUs": (
        {"ep": 4, "tp": 2, "experts_over_tp": True},
        (),
    ),
    "TP + FSDP": ({"sharding": "fsdp"}, ("tp",)),
    "one GPU: nothing to spread": (
        {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1},
        (),
    ),
}


@pytest.mark.parametrize("text", PHRASES)
def test_phrases_mean_what_they_say(text: str) -> None:
    found = wanted(text, name="--why")
    assert (found.pins.given(), found.split) == PHRASES[text]


def test_passes_and_ranks_of_a_batch_are_asked_for() -> None:
    found = wanted("micro-batch 8, 64 accumulation steps, 2 data-parallel ranks", name="--why")
    assert found.pins.given() == {"micro_batch": 8}
    assert found.numbers == (("data_parallel", 2), ("num_microbatches", 64))


def test_shards_that_do_not_split_are_refused() -> None:
    with pytest.raises(SpecError, match="shards over 8 ranks do not go with cp 3"):
        wanted("FSDP over 8, cp 3", name="--why")
