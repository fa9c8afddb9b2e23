"""Device memory: communicators and what they hold outside of torch's allocator."""

from __future__ import annotations

import pytest

from fsdpplan.cost.memory.peak import communicators, outside_allocator_bytes
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.runtime import runtime_named
from tests.cost.problems import case

PIPELINED = Layout(tp=8, pp=4, dp_shard=2, sharding="zero1", schedule="1f1b", num_microbatches=4)


def test_every_axis_in_use_has_its_communicator() -> None:
    assert communicators(Layout(sharding="ddp")) == 0
    assert communicators(Layout(dp_shard=8)) == 1
    assert communicators(Layout(dp_replicate=2, dp_shard=8)) == 3  # both, and the world
    assert communicators(Layout(dp_shard=8, reshard_after_forward=4)) == 2
    assert communicators(Layout(dp_shard=8, ep=4)) == 3  # shards, exchange, shards of experts


@pytest.mark.parametrize(
    ("runtime", "layout", "groups"),
    [
        # world, tensor parallelism, and the same ranks for the gradient norm
        ("megatron_deepspeed", Layout(tp=8, sharding="ddp"), 3),
        # and data parallelism, the pipeline, its ends, two neighbours, the split outputs
        ("megatron_deepspeed", PIPELINED, 9),
        ("megatron", PIPELINED, 8),
        ("fsdp2", PIPELINED, 4),
    ],
)
def test_softwares_of_megatrons_kind_have_more(runtime: str, layout: Layout, groups: int) -> None:
    assert communicators(layout, runtime_named(runtime)) == groups


def test_context_and_communicators_add_up() -> None:
    drawn = case(dp_replicate=2, dp_shard=8)
    fit = drawn.cluster.device.fit
    assert (
        outside_allocator_bytes(layout=drawn.layout, training=drawn.training, fit=fit)
        == fit.context_bytes + 3 * fit.communicator_bytes
    )
