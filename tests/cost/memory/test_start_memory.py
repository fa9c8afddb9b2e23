"""Start memory: peaks before the first step and while a checkpoint is written."""

from __future__ import annotations

import pytest
from hypothesis import given

from fsdpplan.cost.memory.ledger import DDP_BROADCAST_BYTES
from fsdpplan.cost.model.params import parameter_count
from tests.cost.problems import SMALL, Case, case, cases

COUNT = parameter_count(SMALL)
EMBEDDING_BYTES = 4 * SMALL.vocab * SMALL.hidden


def test_fsdp2_makes_shards_and_one_whole_parameter_at_a_time() -> None:
    memory = case(dp_shard=8).estimate.memory
    assert memory.initialization_peak_bytes == pytest.approx(4 * COUNT / 8 + EMBEDDING_BYTES)
    assert memory.checkpoint_peak_bytes == pytest.approx(12 * COUNT / 8)
    assert memory.checkpoint_host_bytes == memory.checkpoint_peak_bytes


def test_ddp_makes_the_model_and_its_buckets() -> None:
    memory = case(sharding="ddp", dp_replicate=8).estimate.memory
    assert memory.initialization_peak_bytes == 8 * COUNT + DDP_BROADCAST_BYTES
    assert memory.checkpoint_peak_bytes == 16 * COUNT


def test_fsdp1_makes_and_gathers_whole_units() -> None:
    flat, sharded = (case(runtime=name, dp_shard=8).estimate.memory for name in ("fsdp1", "fsdp2"))
    assert flat.initialization_peak_bytes > sharded.initialization_peak_bytes
    assert flat.checkpoint_peak_bytes > sharded.checkpoint_peak_bytes


def test_masters_and_buffers_are_there_before_megatron_trains() -> None:
    memory = case(runtime="megatron", sharding="zero1", dp_shard=8).estimate.memory
    assert memory.initialization_peak_bytes == pytest.approx(COUNT * (2 + 4 + 4 / 8))
    assert memory.checkpoint_peak_bytes == pytest.approx(COUNT * (2 + 4 + 12 / 8))


@given(cases())
def test_a_checkpoint_holds_at_least_parameters_and_optimizer(drawn: Case) -> None:
    memory = drawn.estimate.memory
    assert memory.checkpoint_peak_bytes >= memory.parameters_bytes + memory.optimizer_bytes
    assert memory.initialization_peak_bytes >= memory.parameters_bytes
