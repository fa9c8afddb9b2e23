"""Offload: what leaves the device for the host."""

from __future__ import annotations

import pytest

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import SpecError
from tests.cost.problems import SMALL, case


def test_shards_and_optimizer_are_on_the_host() -> None:
    here, away = (case(dp_shard=8, offload=where).estimate.memory for where in ("none", "cpu"))
    assert here.host_bytes == 0
    # 4 parameters, 4 gradients, 8 moments
    assert away.host_bytes == pytest.approx(16 * parameter_count(SMALL) / 8, rel=1e-3)
    assert (away.parameters_bytes, away.optimizer_bytes) == (0, 0)
    assert away.peak_allocated_bytes < here.peak_allocated_bytes
    assert away.activations_bytes == here.activations_bytes


def test_a_model_too_large_for_the_device_fits_with_its_state_on_the_host() -> None:
    layout = {"dp_shard": 8, "activation_checkpointing": "full"}
    here, away = (
        case("llama-3.1-70b", offload=where, **layout).estimate.memory for where in ("none", "cpu")
    )
    assert here.peak_device_bytes > 100e9
    assert away.peak_device_bytes < 40e9


def test_what_is_not_sharded_by_fsdp_is_refused() -> None:
    with pytest.raises(SpecError, match="--sharding fsdp"):
        _ = case(sharding="zero1", dp_shard=8, offload="cpu").estimate


def test_replicas_keep_on_the_device_what_they_have_to_reduce() -> None:
    """Sums over the shard group wait for the last micro-batch, and what is all-reduced for the end
    of backward; neither is on the host."""

    def gradients(**layout: object) -> int:
        return case(dp_shard=4, offload="cpu", **layout).estimate.memory.gradients_bytes

    alone = gradients(num_microbatches=2)
    partial = gradients(dp_replicate=2, num_microbatches=2, gradient_sync="reduce_scatter_only")
    assert partial - alone == pytest.approx(4 * parameter_count(SMALL) / 4, rel=0.01)
    assert gradients(dp_replicate=2, num_microbatches=2) == pytest.approx(partial, rel=0.01)
