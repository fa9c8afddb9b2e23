"""Counts and bytes of every collective equal those of the trainer's own FSDP2 step, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import ParamDtype, Precision, ReduceDtype
from tests.ground_truth.fsdp_step import measured_step, predicted_rows, training_for
from tests.ground_truth.shapes import GPT2, LLAMA_8B, LLAMA_70B, ODD, QWEN3, SMALL


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    layout: Layout
    precision: Precision = "bf16"
    reduce_dtype: ReduceDtype = "fp32"
    rank: int = 0
    param_dtype: ParamDtype = "fp32"
    gradient_compression: str = "none"


CASES = {
    "flat": Case(LLAMA_8B, Layout(dp_shard=64)),
    "hsdp": Case(LLAMA_8B, Layout(dp_replicate=8, dp_shard=8)),
    "never": Case(SMALL, Layout(dp_shard=8, reshard_after_forward="never")),
    "integer": Case(SMALL, Layout(dp_shard=16, reshard_after_forward=4)),
    "integer hsdp": Case(SMALL, Layout(dp_replicate=2, dp_shard=16, reshard_after_forward=8)),
    "integer, wrapped": Case(SMALL, Layout(dp_shard=8, reshard_after_forward=2, wrap_blocks=2)),
    "every, accumulated": Case(SMALL, Layout(dp_replicate=2, dp_shard=4, num_microbatches=3)),
    "reduce-scatter only": Case(
        SMALL,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=3, gradient_sync="reduce_scatter_only"),
    ),
    "last": Case(
        SMALL, Layout(dp_replicate=2, dp_shard=4, num_microbatches=4, gradient_sync="last")
    ),
    "last, never": Case(
        SMALL,
        Layout(
            dp_shard=8,
            num_microbatches=4,
            gradient_sync="last",
            reshard_after_forward="never",
        ),
    ),
    "bf16 reduction": Case(SMALL, Layout(dp_replicate=2, dp_shard=8), reduce_dtype="bf16"),
    "fp32": Case(SMALL, Layout(dp_shard=8), precision="fp32"),
    "padding at 1,024 ranks": Case(LLAMA_8B, Layout(dp_shard=1024)),
    "padding at 1,024 ranks, hsdp": Case(ODD, Layout(dp_replicate=4, dp_shard=256)),
    "padding, last rank": Case(ODD, Layout(dp_shard=7), rank=6),
    "three shard ranks": Case(ODD, Layout(dp_replicate=5, dp_shard=3)),
    "recompute all": Case(SMALL, Layout(dp_shard=8, activation_checkpointing="full")),
    "recompute operations": Case(
        SMALL,
        Layout(
            dp_shard=8, activation_checkpointing="op", reshard_after_forward="never", micro_batch=2
        ),
    ),
    "wrapped by three": Case(SMALL, Layout(dp_shard=8, wrap_blocks=3)),
    "wrapped whole": Case(
        SMALL, Layout(dp_shard=8, wrap_blocks=4, activation_checkpointing="full")
    ),
    "70b, 256 ranks": Case(replace(LLAMA_70B, layers=16), Layout(dp_shard=256)),
    "70b, hsdp, integer": Case(
        replace(LLAMA_70B, layers=8),
        Layout(dp_replicate=4, dp_shard=64, reshard_after_forward=8, wrap_blocks=2),
    ),
    "gpt-2": Case(GPT2, Layout(dp_shard=8)),
    "positions, untied": Case(
        replace(GPT2, tied_embeddings=False), Layout(dp_replicate=2, dp_shard=4, num_microbatches=3)
    ),
    "a norm behind the embedding": Case(
        replace(SMALL, embedding_norm=True), Layout(dp_shard=8, num_microbatches=2)
    ),
    "gpt-2 hsdp, wrapped": Case(GPT2, Layout(dp_replicate=2, dp_shard=4, wrap_blocks=4)),
    "qwen 3": Case(QWEN3, Layout(dp_replicate=2, dp_shard=12, num_microbatches=2)),
    "ddp": Case(GPT2, Layout(sharding="ddp", dp_replicate=4)),
    "ddp, buckets of a stated size": Case(
        GPT2, Layout(sharding="ddp", dp_replicate=4, ddp_bucket_bytes=100 * 2**20)
    ),
    "bf16 parameters": Case(SMALL, Layout(dp_replicate=2, dp_shard=4), param_dtype="bf16"),
    "bf16 parameters, reduced in bf16": Case(
        SMALL, Layout(dp_shard=8, num_microbatches=2), param_dtype="bf16", reduce_dtype="bf16"
    ),
    "ddp, bf16 parameters": Case(GPT2, Layout(sharding="ddp", dp_replicate=4), param_dtype="bf16"),
    "ddp, bf16 throughout, buckets of a stated size": Case(
        GPT2,
        Layout(sharding="ddp", dp_replicate=4, ddp_bucket_bytes=10 * 2**20),
        param_dtype="bf16",
        reduce_dtype="bf16",
    ),
    "ddp, powersgd": Case(
        GPT2,
        Layout(sharding="ddp", dp_replicate=4),
        gradient_compression="powersgd:2:10",
    ),
    "ddp, powersgd, small buckets": Case(
        SMALL,
        Layout(sharding="ddp", dp_replicate=4, ddp_bucket_bytes=3 * 2**20),
        gradient_compression="powersgd:5:10",
    ),
    "ddp, powersgd, the last of two": Case(
        ODD,
        Layout(sharding="ddp", dp_replicate=2, num_microbatches=2, gradient_sync="last"),
        gradient_compression="powersgd:1:2",
    ),
    "one rank": Case(SMALL, Layout(dp_shard=1)),
    "one shard rank": Case(SMALL, Layout(dp_replicate=4, dp_shard=1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_calls_equal_those_of_the_trainer(case: Case) -> None:
    training = training_for(
        case.layout,
        seq_len=64,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
        param_dtype=case.param_dtype,
        gradient_compression=case.gradient_compression,
    )
    measured = measured_step(case.model, training, case.layout, rank=case.rank)
    assert measured.rows == predicted_rows(case.model, training, case.layout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("reshard", "expected"), [("always", 73), ("never", 37)])
def test_gathers_of_36_blocks(reshard: str, expected: int) -> None:
    """A micro-batch of GPT-2 Large: each block twice and the root once, or everything once."""
    model = load_model("gpt2-large")
    assert model.layers == 36
    layout = Layout(dp_shard=2, reshard_after_forward=reshard)
    training = training_for(layout, seq_len=64)
    row = ("all_gather", "dp_shard", 2, "bf16")
    assert measured_step(model, training, layout).rows[row].count == expected
    assert predicted_rows(model, training, layout)[row].count == expected


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_never_gathers_again_in_each_micro_batch(micro_batches: int) -> None:
    """FSDP2's "never" is not ZeRO-2: it reshards after backward, also when it reduces nothing."""
    layout = Layout(
        dp_shard=2,
        num_microbatches=micro_batches,
        gradient_sync="last",
        reshard_after_forward="never",
    )
    training = training_for(layout, seq_len=32)
    rows = measured_step(replace(SMALL, layers=3), training, layout).rows
    assert rows["all_gather", "dp_shard", 2, "bf16"].count == 5 * micro_batches
    assert rows["reduce_scatter", "dp_shard", 2, "fp32"].count == 5
