"""Units of several blocks: their calls and their peaks equal those of the trainer's own step."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Experts, Model
from tests.ground_truth.fsdp_step import (
    measured_step,
    predicted_peak_bytes,
    predicted_rows,
    training_for,
)
from tests.ground_truth.shapes import LLAMA_SMALL_VOCAB
from tests.ground_truth.test_mixtures import ROUTED, SECOND, SHARED

PEAK_TOLERANCE_FRACTION = 0.001

SPLIT = Layout(
    compile=False, dp_shard=4, tp=4, sequence_parallel=True, loss_parallel=True, wrap_blocks=3
)
GELU = replace(LLAMA_SMALL_VOCAB, mlp="gelu", norm="layernorm", layers=4)


WIDE = replace(
    GELU, hidden=8192, ffn_hidden=16384, heads=64, kv_heads=64, head_dim=128, tied_embeddings=True
)
"""Of so few parameters for its width that activations make the peak."""


def assert_equal_peaks(model: Model, layout: Layout, *, seq_len: int) -> None:
    training = training_for(layout, seq_len=seq_len)
    peak = predicted_peak_bytes(model, training, layout)
    measured = measured_step(model, training, layout).peak_bytes
    assert peak == pytest.approx(measured, rel=PEAK_TOLERANCE_FRACTION)


@pytest.mark.parametrize(("micro_batch", "seq_len"), [(16, 1024), (1, 16384)])
@pytest.mark.parametrize("wrap_blocks", [3, 4])
def test_gathers_over_the_sequence_are_laid_out_by_sequences(
    micro_batch: int, seq_len: int, wrap_blocks: int
) -> None:
    """Of several sequences in a copy; of one the gathered buffer serves as it is."""
    layout = replace(SPLIT, tp=16, dp_shard=16, micro_batch=micro_batch, wrap_blocks=wrap_blocks)
    assert_equal_peaks(WIDE, layout, seq_len=seq_len)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "model", [replace(LLAMA_SMALL_VOCAB, layers=4), GELU], ids=["gated", "gelu"]
)
@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("mode", ["none", "op", "full"])
def test_peaks_of_units_under_tensor_parallelism(
    model: Model, micro_batch: int, mode: ActivationCheckpointing
) -> None:
    layout = replace(SPLIT, micro_batch=micro_batch, activation_checkpointing=mode)
    assert_equal_peaks(model, layout, seq_len=2048)


BORDER = replace(
    SHARED,
    layers=6,
    experts=Experts(experts=8, active=2, hidden=2048, shared_hidden=4096, dense_layers=2),
)
TURNS = replace(SECOND, layers=6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "wrap_blocks"),
    [(replace(ROUTED, layers=5), 2), (BORDER, 3), (BORDER, 4), (TURNS, 3), (TURNS, 4)],
    ids=["all", "border by three", "border by four", "turns by three", "turns by four"],
)
@pytest.mark.parametrize(("ep", "mode"), [(1, "none"), (4, "none"), (4, "op")])
def test_units_gather_blocks_together_and_routed_experts_apart(
    model: Model, wrap_blocks: int, ep: int, mode: ActivationCheckpointing
) -> None:
    """Whatever kinds of blocks a unit has: calls, bytes and peak are those of the trainer."""
    layout = Layout(
        compile=False, dp_shard=8, ep=ep, wrap_blocks=wrap_blocks, activation_checkpointing=mode
    )
    training = training_for(layout, seq_len=64)
    measured = measured_step(model, training, layout)
    rows = {key: row for key, row in measured.rows.items() if key[3] != "int64"}
    assert rows == predicted_rows(model, training, layout)
    peak = predicted_peak_bytes(model, training, layout)
    assert peak == pytest.approx(measured.peak_bytes, rel=PEAK_TOLERANCE_FRACTION)


@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize("wrap_blocks", [1, 4])
@pytest.mark.parametrize("model", [replace(ROUTED, layers=6), BORDER, TURNS])
def test_the_peak_is_over_every_unit_with_its_own_blocks(
    model: Model, wrap_blocks: int, reshard: Literal["always", "never"]
) -> None:
    """Experts over four ranks are smaller than what stands in their place in a dense block."""
    layout = Layout(
        compile=False, dp_shard=8, ep=4, wrap_blocks=wrap_blocks, reshard_after_forward=reshard
    )
    training = training_for(layout, seq_len=64)
    peak = predicted_peak_bytes(model, training, layout)
    measured = measured_step(model, training, layout).peak_bytes
    assert peak == pytest.approx(measured, rel=PEAK_TOLERANCE_FRACTION)


@pytest.mark.parametrize("model", [replace(ROUTED, layers=4), TURNS])
def test_sums_of_experts_go_when_they_are_reduced(model: Model) -> None:
    """Of two micro-batches the last one reduces what both have left."""
    layout = Layout(
        compile=False, dp_shard=8, ep=4, wrap_blocks=1, gradient_sync="last", num_microbatches=2
    )
    training = training_for(layout, seq_len=64)
    peak = predicted_peak_bytes(model, training, layout)
    measured = measured_step(model, training, layout).peak_bytes
    assert peak == pytest.approx(measured, rel=PEAK_TOLERANCE_FRACTION)


assert TURNS.experts is not None
HEAVY_TURNS = replace(TURNS, layers=4, experts=replace(TURNS.experts, experts=32))
"""Routed experts of one block are most of the model, and the block before has none."""


@pytest.mark.parametrize("wrap_blocks", [1, 3])
@pytest.mark.parametrize("mode", ["op", "full"])
def test_what_experts_were_gathered_into_for_recomputation_goes_with_the_next_gather(
    wrap_blocks: int, mode: ActivationCheckpointing
) -> None:
    layout = Layout(
        compile=False, dp_shard=8, ep=2, wrap_blocks=wrap_blocks, activation_checkpointing=mode
    )
    training = training_for(layout, seq_len=64)
    peak = predicted_peak_bytes(HEAVY_TURNS, training, layout)
    measured = measured_step(HEAVY_TURNS, training, layout).peak_bytes
    assert peak == pytest.approx(measured, rel=PEAK_TOLERANCE_FRACTION)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("wrap_blocks", "mode"), [(1, "full"), (3, "none"), (3, "op")])
def test_a_block_is_half_way_when_its_experts_are_gathered(
    wrap_blocks: int, mode: ActivationCheckpointing, tp: int
) -> None:
    """What it has made by then is there beside their buffer and that of its unit."""
    layout = Layout(
        compile=False,
        dp_shard=6,
        tp=tp,
        ep=2,
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        wrap_blocks=wrap_blocks,
        micro_batch=2,
        num_microbatches=2,
        gradient_sync="last",
        activation_checkpointing=mode,
        loss_chunks=2,
    )
    assert_equal_peaks(HEAVY_TURNS, layout, seq_len=512)


def test_experts_are_recomputed_beside_what_they_were_gathered_into() -> None:
    """With many tokens their recomputation is the peak, and lasts longer than the copy-out."""
    layout = Layout(
        compile=False,
        dp_shard=6,
        tp=4,
        ep=2,
        sequence_parallel=True,
        loss_parallel=True,
        wrap_blocks=3,
        micro_batch=16,
        num_microbatches=3,
        gradient_sync="last",
        activation_checkpointing="op",
        loss_chunks=2,
    )
    model = replace(load_model("llama-4-maverick-17b-128e"), layers=4)
    training = training_for(layout, seq_len=2048)
    peak = predicted_peak_bytes(model, training, layout)
    assert peak == pytest.approx(measured_step(model, training, layout).peak_bytes, rel=0.01)
