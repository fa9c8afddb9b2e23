"""Compute: blocks on one rank, device and host together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given

from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.compute import block_seconds, device_parts
from tests.cost.works import H100, MODES, work, works


@given(works())
def test_nothing_is_faster_than_the_roofline(block: BlockWork) -> None:
    flops = sum(p.flops / H100.peak_flops_per_second(p.dtype(block)) for p in block_products(block))
    forward, backward = device_parts(block, H100)
    assert forward.matmuls >= flops
    assert backward.matmuls >= 2 * flops
    seconds = block_seconds(block, H100)
    assert seconds.forward_seconds >= forward.total
    assert seconds.backward_seconds >= backward.total


@given(works())
def test_more_tokens_are_never_faster(block: BlockWork) -> None:
    few = block_seconds(block, H100)
    many = block_seconds(replace(block, tokens=2 * block.tokens), H100)
    assert few.forward_seconds <= many.forward_seconds
    assert few.backward_seconds <= many.backward_seconds
    assert (
        few.recompute_seconds + few.backward_seconds
        <= many.recompute_seconds + many.backward_seconds
    )


@given(works())
def test_recomputation_grows_from_nothing_to_one_forward(block: BlockWork) -> None:
    assume(block.model.mixer != "-")
    times = {mode: block_seconds(replace(block, mode=mode), H100) for mode in MODES}
    assert times["none"].recompute_seconds == 0
    assert 0 < times["attention"].recompute_device_seconds <= times["full"].recompute_device_seconds
    assert times["op"].recompute_device_seconds > 0
    assert times["full"].recompute_device_seconds <= times["none"].forward_device_seconds
    for mode in MODES:
        assert times[mode].forward_seconds == times["none"].forward_seconds
        assert times[mode].backward_seconds == times["none"].backward_seconds


def test_a_checkpoint_that_stops_early_spares_the_last_product() -> None:
    early = block_seconds(work(mode="full"), H100)
    whole = block_seconds(work(mode="full", repeats_whole_block=True), H100)
    assert whole.recompute_seconds == pytest.approx(whole.forward_seconds)
    assert whole.recompute_seconds > 1.15 * early.recompute_seconds


@given(works())
def test_compiling_is_never_slower(block: BlockWork) -> None:
    assume(block.precision == "bf16")
    plain = replace(block, compiled=False, fused_kernels=False, mode="none")
    eager, compiled = (
        block_seconds(replace(plain, compiled=compiled), H100) for compiled in (False, True)
    )
    assert compiled.forward_seconds <= eager.forward_seconds
    assert compiled.backward_seconds <= eager.backward_seconds


def test_a_small_block_takes_what_its_host_needs() -> None:
    tiny = work(tokens=1, seq_len=1, compiled=False)
    small = replace(tiny, model=replace(tiny.model, hidden=32, ffn_hidden=32, heads=1, kv_heads=1))
    seconds = block_seconds(small, H100)
    assert seconds.forward_seconds == seconds.forward_host_seconds > seconds.forward_device_seconds
    assert (
        seconds.backward_seconds == seconds.backward_host_seconds > seconds.backward_device_seconds
    )


def test_autocast_pays_for_casts_and_a_wide_stream() -> None:
    plain = block_seconds(work(compiled=False), H100)
    cast = block_seconds(work(compiled=False, autocast=True, residual_bytes=4), H100)
    assert cast.forward_seconds > plain.forward_seconds
    assert cast.backward_seconds > plain.backward_seconds


def test_a_large_fp8_block_is_faster_by_less_than_its_matmuls() -> None:
    half, quarter = (
        block_seconds(work(tokens=32768, precision=precision), H100)
        for precision in ("bf16", "fp8")
    )
    ratio = (half.forward_seconds + half.backward_seconds) / (
        quarter.forward_seconds + quarter.backward_seconds
    )
    assert 1.1 < ratio < 1.6
