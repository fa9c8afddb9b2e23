"""Compute: blocks on one rank, device and host together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from fsdpplan.cost.compute import block_seconds, device_parts
from fsdpplan.cost.products import block_products
from fsdpplan.cost.work import BlockWork
from tests.cost.works import H100, MODES, work, works


@settings(max_examples=80, deadline=None)
@given(works())
def test_nothing_is_faster_than_the_roofline(block: BlockWork) -> None:
    flops = sum(p.flops / H100.peak_flops_per_second(p.dtype(block)) for p in block_products(block))
    forward, backward = device_parts(block, H100)
    assert forward.matmuls >= flops
    assert backward.matmuls >= 2 * flops
    seconds = block_seconds(block, H100)
    assert seconds.forward >= forward.total
    assert seconds.backward >= backward.total


@settings(max_examples=80, deadline=None)
@given(works())
def test_more_tokens_are_never_faster(block: BlockWork) -> None:
    few = block_seconds(block, H100)
    many = block_seconds(replace(block, tokens=2 * block.tokens), H100)
    assert few.forward <= many.forward
    assert few.backward <= many.backward
    assert few.recompute + few.backward <= many.recompute + many.backward


@settings(max_examples=80, deadline=None)
@given(works())
def test_recomputation_grows_from_nothing_to_one_forward(block: BlockWork) -> None:
    times = {mode: block_seconds(replace(block, mode=mode), H100) for mode in MODES}
    assert times["none"].recompute == 0
    assert 0 < times["attention"].recompute_device <= times["full"].recompute_device
    assert times["op"].recompute_device > 0
    assert times["full"].recompute_device <= times["none"].forward_device
    for mode in MODES:
        assert times[mode].forward == times["none"].forward
        assert times[mode].backward == times["none"].backward


def test_a_checkpoint_that_stops_early_spares_the_last_product() -> None:
    early = block_seconds(work(mode="full"), H100)
    whole = block_seconds(work(mode="full", repeats_whole_block=True), H100)
    assert whole.recompute == pytest.approx(whole.forward)
    assert whole.recompute > 1.15 * early.recompute


@settings(max_examples=60, deadline=None)
@given(works())
def test_compiling_is_never_slower(block: BlockWork) -> None:
    assume(block.precision == "bf16")
    plain = replace(block, compiled=False, fused_kernels=False, mode="none")
    eager, compiled = (
        block_seconds(replace(plain, compiled=compiled), H100) for compiled in (False, True)
    )
    assert compiled.forward <= eager.forward
    assert compiled.backward <= eager.backward


def test_a_small_block_takes_what_its_host_needs() -> None:
    tiny = work(tokens=1, seq_len=1, compiled=False)
    small = replace(tiny, model=replace(tiny.model, hidden=32, ffn_hidden=32, heads=1, kv_heads=1))
    seconds = block_seconds(small, H100)
    assert seconds.forward == seconds.forward_host > seconds.forward_device
    assert seconds.backward == seconds.backward_host > seconds.backward_device


def test_autocast_pays_for_casts_and_a_wide_stream() -> None:
    plain = block_seconds(work(compiled=False), H100)
    cast = block_seconds(work(compiled=False, autocast=True, residual_bytes=4), H100)
    assert cast.forward > plain.forward
    assert cast.backward > plain.backward


def test_a_large_fp8_block_is_faster_by_less_than_its_matmuls() -> None:
    half, quarter = (
        block_seconds(work(tokens=32768, precision=precision), H100)
        for precision in ("bf16", "fp8")
    )
    ratio = (half.forward + half.backward) / (quarter.forward + quarter.backward)
    assert 1.1 < ratio < 1.6
