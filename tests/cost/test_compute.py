"""Compute: blocks, head and optimizer on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.compute import (
    BlockWork,
    backward_matmul_seconds,
    block_seconds,
    element_wise_bytes,
    forward_matmul_seconds,
    head_seconds,
    operators,
    optimizer_seconds,
    projection_shapes,
)
from fsdpplan.cost.params import block_tensors
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from tests.cost.clusters import cluster
from tests.cost.problems import some_models

DEVICE = cluster(gpus=1).device
MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")


def work(model: Model | None = None, **changes: object) -> BlockWork:
    """A block of 8B for one sequence of 4096 tokens, compiled, on one rank."""
    base = BlockWork(
        model=model or load_model("llama-3.1-8b"),
        tokens=4096,
        seq_len=4096,
        tp=1,
        sequence_parallel=False,
        precision="bf16",
        mode="none",
        compiled=True,
        autocast=False,
        residual_bytes=2,
        wrapper_operators=0.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@given(some_models())
def test_the_products_use_every_matrix_of_the_block_once(model: Model) -> None:
    weights = sum(n * k for _, n, k in projection_shapes(work(model)))
    assert weights == sum(t.elements for t in block_tensors(model) if len(t.shape) == 2)


def test_tensor_parallel_splits_the_products() -> None:
    whole = sum(m * n * k for m, n, k in projection_shapes(work()))
    assert sum(m * n * k for m, n, k in projection_shapes(work(tp=8))) == whole // 8


def test_backward_is_two_products_for_each_forward_one() -> None:
    shapes = projection_shapes(work(tokens=65536))
    forward = forward_matmul_seconds(shapes, dtype="bf16", device=DEVICE)
    backward = backward_matmul_seconds(shapes, dtype="bf16", device=DEVICE)
    assert backward == pytest.approx(2 * forward, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(some_models(), st.integers(1, 2**14), st.sampled_from(MODES), st.booleans())
def test_more_tokens_are_never_faster(
    model: Model, tokens: int, mode: ActivationCheckpointing, compiled: bool
) -> None:
    few = block_seconds(work(model, tokens=tokens, mode=mode, compiled=compiled), DEVICE)
    many = block_seconds(work(model, tokens=2 * tokens, mode=mode, compiled=compiled), DEVICE)
    assert few.forward <= many.forward
    assert few.backward <= many.backward


@given(some_models(), st.booleans())
def test_each_mode_recomputes_at_most_one_forward(model: Model, compiled: bool) -> None:
    times = {
        mode: block_seconds(work(model, mode=mode, compiled=compiled), DEVICE) for mode in MODES
    }
    assert times["none"].recompute == 0
    for mode in MODES[1:]:
        assert 0 < times[mode].recompute <= times[mode].forward
        assert times[mode].forward == times["none"].forward
        assert times[mode].backward == times["none"].backward
    assert times["full"].recompute > times["attention"].recompute


@given(some_models())
def test_compiling_moves_less_and_launches_less(model: Model) -> None:
    eager, compiled = (work(model, compiled=compiled) for compiled in (False, True))
    assert all(
        a >= b for a, b in zip(element_wise_bytes(eager), element_wise_bytes(compiled), strict=True)
    )
    assert operators(compiled)[0] < operators(eager)[0]
    assert block_seconds(compiled, DEVICE).forward <= block_seconds(eager, DEVICE).forward


def test_a_small_block_takes_what_its_launches_take() -> None:
    tiny = work(tokens=1, seq_len=1, compiled=False)
    small = replace(tiny, model=replace(tiny.model, hidden=32, ffn_hidden=32, heads=1, kv_heads=1))
    launches = operators(small)[0] * DEVICE.fit.kernel_launch_seconds
    assert block_seconds(small, DEVICE).forward == pytest.approx(launches)


def test_autocast_pays_for_casts_and_a_wide_stream() -> None:
    plain = block_seconds(work(), DEVICE)
    cast = block_seconds(work(autocast=True, residual_bytes=4), DEVICE)
    assert cast.forward > plain.forward
    assert cast.backward > plain.backward


def test_a_split_vocabulary_splits_the_head() -> None:
    model = load_model("llama-3.1-8b")
    whole, split = (
        head_seconds(model=model, tokens=8192, vocab=vocab, precision="bf16", device=DEVICE)
        for vocab in (model.vocab, model.vocab // 8)
    )
    for all_of_it, part in zip(whole, split, strict=True):
        assert part == pytest.approx(all_of_it / 8, rel=0.1)


def test_the_optimizer_reads_and_writes_40_bytes_a_parameter() -> None:
    memory = DEVICE.memory_bandwidth_bytes_per_second * DEVICE.fit.memory_fraction
    seconds = optimizer_seconds(local_parameters=10**9, device=DEVICE, tensors=1)
    assert seconds == pytest.approx(40e9 / memory)
