"""Passes: shapes and groups translated to the seconds that the streams take."""

from __future__ import annotations

import pytest

from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.kernels.head import layout_head_seconds
from fsdpplan.cost.kernels.optimizer import layout_optimizer_seconds, optimizer_elements
from fsdpplan.cost.model.shards import block_size, whole_model
from fsdpplan.cost.network.placement import Group, shard_group
from fsdpplan.cost.read.passes import fsdp_micro_batch
from fsdpplan.cost.step.fsdp import UnitSeconds
from fsdpplan.cost.traffic.calls import group_level, group_seconds
from fsdpplan.cost.traffic.fsdp import CHUNK_CAT_SHARE, copy_seconds, flat_gradient_seconds
from fsdpplan.cost.traffic.replica import bucket_seconds
from tests.cost.problems import SMALL, Case, case


def micro_batch(case: Case):  # type: ignore[no-untyped-def]
    """The micro-batch that the stream simulation gets."""
    return fsdp_micro_batch(case, whole_model(case.model))


def unit(case: Case) -> UnitSeconds:
    """Its first unit of blocks."""
    return micro_batch(case).runs[0][0]


def gradients(case: Case) -> float:
    """Seconds that accumulating and copying gradients takes."""
    return gradient_seconds(case, whole_model(case.model))


def test_a_group_of_one_takes_no_time() -> None:
    alone = Group(axis="tp", ranks=1, stride=1)
    assert group_seconds(case(dp_shard=8).cluster, alone, "all_gather", 10**9) == 0
    assert group_level(case(dp_shard=8).cluster, alone) == "none"


def test_a_group_is_named_by_the_slowest_level_it_crosses() -> None:
    wide = case(dp_replicate=2, dp_shard=8)
    assert group_level(wide.cluster, shard_group(wide.layout)) == "nvlink"
    assert group_level(wide.cluster, Group(axis="dp", ranks=16, stride=1)) == "infiniband"


@pytest.mark.parametrize(
    ("layout", "runtime", "autocast"),
    [
        ({"sharding": "ddp", "dp_replicate": 2}, "fsdp2", True),
        ({"dp_shard": 2}, "fsdp2", False),
        ({"dp_shard": 2}, "autocast", True),
    ],
)
def test_who_computes_under_autocast(
    layout: dict[str, object], runtime: str, autocast: bool
) -> None:
    spread = case(runtime=runtime, **layout)
    work = block_work(spread)
    assert work.autocast is autocast
    if runtime == "fsdp2":
        exact = case(precision="fp32", **layout)
        assert not block_work(exact).autocast


def test_a_flat_parameter_is_gathered_in_place_and_its_gradients_concatenated() -> None:
    size = block_size(model=SMALL, tp=1, shard_ranks=8)
    fsdp2, flat = case(dp_shard=8), case(dp_shard=8, runtime="autocast")
    device = flat.cluster.device
    memory = device.memory_bandwidth_bytes_per_second * device.fit.memory_fraction
    out, into = copy_seconds(size, training=fsdp2.training, device=device)
    assert (out, into) == pytest.approx(
        (4 * size.padded_elements / memory, 6 * size.padded_elements / CHUNK_CAT_SHARE / memory)
    )
    out, into = copy_seconds(size, training=flat.training, device=device)
    assert (out, into) == pytest.approx((0, 8 * size.padded_elements / memory))
    assert flat_gradient_seconds(size, training=flat.training, device=device) == pytest.approx(into)
    assert flat_gradient_seconds(size, training=fsdp2.training, device=device) == 0


def test_never_does_not_gather_again_and_an_integer_gathers_inside() -> None:
    always = unit(case(dp_shard=16))
    inside = unit(case(dp_shard=16, reshard_after_forward=8))
    never = unit(case(dp_shard=16, reshard_after_forward="never"))
    assert never.regather == 0 < inside.regather < always.regather
    assert always.gather == always.regather == inside.gather == never.gather
    assert micro_batch(case(dp_shard=16)).root.regather == 0


def test_only_replicas_that_share_the_shards_links_share_them() -> None:
    assert not micro_batch(case(dp_replicate=2, dp_shard=8)).links_shared
    assert micro_batch(case(dp_replicate=2, dp_shard=4)).links_shared  # both on NVLink
    assert micro_batch(case(dp_replicate=2, dp_shard=16)).links_shared  # both between nodes


def test_accumulation_costs_a_pass_over_what_is_kept() -> None:
    layout = {"sharding": "ddp", "dp_replicate": 8, "gradient_sync": "last"}
    once, twice, thrice = (
        gradients(case(num_microbatches=number, **layout)) for number in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - once)
    whole = gradients(case(dp_shard=8, num_microbatches=2, gradient_sync="last"))
    shards = gradients(case(dp_shard=8, num_microbatches=2, gradient_sync="every"))
    assert 0 < 6 * shards < whole
    assert gradients(case(dp_shard=8)) == 0


def test_halving_the_reduction_halves_ddps_wire() -> None:
    def seconds(reduce_dtype: str) -> float:
        ddp = case(
            "llama-3.1-8b", sharding="ddp", dp_replicate=8, reduce_dtype=reduce_dtype, seq_len=64
        )
        return sum(one.reduction for one in bucket_seconds(ddp, whole_model(ddp.model)))

    assert 0.4 < seconds("bf16") / seconds("fp32") < 0.7


def test_a_flat_parameter_is_fsdp1s_without_autocast_too() -> None:
    size = block_size(model=SMALL, tp=1, shard_ranks=8)
    half = case(dp_shard=8, runtime="fsdp1")
    out, _ = copy_seconds(size, training=half.training, device=half.cluster.device)
    assert out == 0
    assert micro_batch(half).is_flat
    assert not micro_batch(case(dp_shard=8)).is_flat


def test_the_last_unit_is_as_small_as_it_is() -> None:
    (full, number), (rest, last) = micro_batch(case(dp_shard=8, wrap_blocks=3)).runs
    assert (number, last) == (2, 1)
    assert rest.forward == pytest.approx(full.forward * 2 / 3)
    assert rest.gather < full.gather


def test_what_a_rank_updates_is_what_it_owns() -> None:
    def owned(**layout: object) -> int:
        run = case(**layout)
        return optimizer_elements(run, whole_model(run.model))

    whole = owned(sharding="ddp", dp_replicate=8)
    for sharding in ("zero1", "zero2", "fsdp"):
        assert owned(sharding=sharding, dp_shard=8) == pytest.approx(whole / 8, rel=1e-3)
    assert owned(sharding="zero1", dp_replicate=2, dp_shard=4) == pytest.approx(whole / 4, rel=1e-3)


def test_gradients_that_the_product_adds_up_cost_nothing_more() -> None:
    layout = {"sharding": "zero1", "dp_shard": 8, "gradient_sync": "last", "num_microbatches": 4}
    fused, half, added = (
        gradients(case(runtime=runtime, **layout))
        for runtime in ("megatron", "internevo", "nanotron")
    )
    assert fused == 0 < half < added


def test_sharding_shortens_the_optimizer_and_tp_the_head() -> None:
    whole = case("llama-3.1-8b", sharding="ddp", seq_len=4096)
    full, shard = (
        layout_optimizer_seconds(asked, whole_model(whole.model))
        for asked in (whole, whole.with_layout(sharding="fsdp", dp_shard=8))
    )
    assert full == pytest.approx(8 * shard, rel=1e-3)
    split = whole.with_layout(tp=8, sequence_parallel=True, loss_parallel=True)
    one, eighth = (sum(layout_head_seconds(asked)) for asked in (whole, split))
    assert eighth < one / 6
