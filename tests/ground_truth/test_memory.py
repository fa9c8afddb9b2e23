"""Peak allocated memory equals that of the trainer's own step under fake tensors.

Allocations are rounded to 512 bytes as the CUDA allocator rounds; attention's and the norms' saved
tensors are those of CUDA's fused kernels, whose own workspaces are not seen here. The cases below
agree to a few hundred kilobytes; the tolerance is what tiny tensors and the rounding leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from fsdpplan.cost.memory.ledger import checkpoint_peak_bytes, initialization_peak_bytes
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Dropout, ParamDtype, Precision, ReduceDtype
from fsdpplan.trainer.torch_versions import RELEASE
from tests.ground_truth.fsdp_step import case_of, measured_step, predicted_peak_bytes, training_for
from tests.ground_truth.shapes import GPT2, LLAMA_8B, LLAMA_SMALL_VOCAB, ODD, QWEN3, SMALL

TOLERANCE_FRACTION = 0.005


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    seq_len: int
    layout: Layout
    precision: Precision = "bf16"
    reduce_dtype: ReduceDtype = "fp32"
    param_dtype: ParamDtype = "fp32"
    gradient_compression: str = "none"
    dropout: Dropout | None = None


EVERYWHERE = Dropout(attention=0.1, residual=0.1, embedding=0.1)

FSDP_CASES = {
    "8b flat": Case(LLAMA_8B, 4096, Layout(dp_shard=64)),
    "8b hsdp": Case(LLAMA_8B, 4096, Layout(dp_replicate=8, dp_shard=8)),
    "8b never": Case(LLAMA_8B, 4096, Layout(dp_shard=64, reshard_after_forward="never")),
    "8b integer": Case(LLAMA_8B, 4096, Layout(dp_shard=64, reshard_after_forward=8)),
    "integer that is all": Case(
        SMALL, 256, Layout(dp_shard=2, reshard_after_forward=2), precision="fp32"
    ),
    "8b recompute": Case(LLAMA_8B, 4096, Layout(dp_shard=64, activation_checkpointing="full")),
    "8b 1024 ranks": Case(LLAMA_8B, 4096, Layout(dp_shard=1024, activation_checkpointing="op")),
    "blocks lead": Case(LLAMA_SMALL_VOCAB, 512, Layout(dp_shard=8)),
    "activations lead": Case(
        LLAMA_SMALL_VOCAB, 4096, Layout(dp_shard=8, micro_batch=2, activation_checkpointing="op")
    ),
    "recompute leads": Case(
        LLAMA_SMALL_VOCAB, 4096, Layout(dp_shard=8, micro_batch=8, activation_checkpointing="full")
    ),
    "fp32": Case(LLAMA_SMALL_VOCAB, 4096, Layout(dp_shard=8), precision="fp32"),
    "every, twice": Case(
        LLAMA_SMALL_VOCAB, 1024, Layout(dp_replicate=2, dp_shard=4, num_microbatches=2)
    ),
    "every, three times": Case(
        LLAMA_SMALL_VOCAB, 1024, Layout(dp_replicate=2, dp_shard=4, num_microbatches=3)
    ),
    "every, in bf16": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=3),
        reduce_dtype="bf16",
    ),
    "once, in bf16": Case(
        LLAMA_SMALL_VOCAB, 1024, Layout(dp_replicate=4, dp_shard=2), reduce_dtype="bf16"
    ),
    "reduce-scatter only": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=3, gradient_sync="reduce_scatter_only"),
    ),
    "reduce-scatter only, in bf16": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=2, gradient_sync="reduce_scatter_only"),
        reduce_dtype="bf16",
    ),
    "last": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=2, gradient_sync="last"),
    ),
    "last, in bf16": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_shard=4, num_microbatches=3, gradient_sync="last"),
        reduce_dtype="bf16",
    ),
    "last, in fp32": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_shard=4, num_microbatches=2, gradient_sync="last"),
        precision="fp32",
    ),
    "last, never": Case(
        LLAMA_SMALL_VOCAB,
        2048,
        Layout(dp_shard=8, num_microbatches=2, gradient_sync="last", reshard_after_forward="never"),
    ),
    "wrapped by two": Case(LLAMA_SMALL_VOCAB, 1024, Layout(dp_shard=8, wrap_blocks=2)),
    "wrapped by three, integer": Case(
        LLAMA_SMALL_VOCAB, 1024, Layout(dp_shard=8, wrap_blocks=3, reshard_after_forward=2)
    ),
    "wrapped whole": Case(
        LLAMA_SMALL_VOCAB,
        2048,
        Layout(dp_shard=8, wrap_blocks=4, activation_checkpointing="op"),
    ),
    "embedding leads": Case(
        replace(SMALL, vocab=262144), 16, Layout(dp_shard=8, activation_checkpointing="full")
    ),
    "embedding leads, hsdp, every": Case(
        replace(SMALL, vocab=262144),
        16,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=2),
    ),
    "embedding leads, last": Case(
        replace(SMALL, vocab=262144),
        16,
        Layout(dp_shard=4, num_microbatches=3, gradient_sync="last"),
    ),
    "gpt-2, dropout": Case(GPT2, 1024, Layout(dp_shard=8, micro_batch=4), dropout=EVERYWHERE),
    "dropout": Case(LLAMA_SMALL_VOCAB, 2048, Layout(dp_shard=8), dropout=EVERYWHERE),
    "dropout, recompute operations": Case(
        LLAMA_SMALL_VOCAB,
        2048,
        Layout(dp_shard=8, activation_checkpointing="op"),
        dropout=EVERYWHERE,
    ),
    "dropout, recompute": Case(
        LLAMA_SMALL_VOCAB,
        2048,
        Layout(dp_shard=8, micro_batch=4, activation_checkpointing="full"),
        dropout=EVERYWHERE,
    ),
    "positions, untied": Case(replace(GPT2, tied_embeddings=False), 512, Layout(dp_shard=8)),
    "a norm behind the embedding": Case(
        replace(LLAMA_SMALL_VOCAB, embedding_norm=True), 512, Layout(dp_shard=8, micro_batch=2)
    ),
    "head leads, never": Case(
        replace(SMALL, layers=2, vocab=131072),
        256,
        Layout(dp_shard=8, reshard_after_forward="never", num_microbatches=2),
    ),
    "gpt-2, root leads": Case(GPT2, 128, Layout(dp_shard=8)),
    "gpt-2, logits lead": Case(GPT2, 1024, Layout(dp_shard=8, micro_batch=8)),
    "gpt-2 hsdp": Case(
        GPT2,
        256,
        Layout(
            dp_replicate=2,
            dp_shard=4,
            num_microbatches=2,
            reshard_after_forward="never",
            activation_checkpointing="full",
        ),
    ),
    "qwen 3": Case(QWEN3, 4096, Layout(dp_replicate=2, dp_shard=4, micro_batch=2)),
    "qwen 3, last, in bf16": Case(
        QWEN3,
        1024,
        Layout(dp_shard=8, reshard_after_forward=4, num_microbatches=2, gradient_sync="last"),
        reduce_dtype="bf16",
    ),
    "two ranks": Case(SMALL, 128, Layout(dp_shard=2)),
    "one rank": Case(SMALL, 256, Layout(dp_shard=1, num_microbatches=2)),
    "odd": Case(ODD, 77, Layout(dp_shard=3)),
    "odd, recompute": Case(
        ODD, 301, Layout(dp_shard=7, wrap_blocks=2, activation_checkpointing="full")
    ),
    "odd, fp32": Case(
        ODD,
        301,
        Layout(dp_shard=5, micro_batch=4, reshard_after_forward="never"),
        precision="fp32",
    ),
    "8b, bf16 parameters": Case(LLAMA_8B, 4096, Layout(dp_shard=64), param_dtype="bf16"),
    "8b, bf16 throughout": Case(
        LLAMA_8B, 4096, Layout(dp_shard=64), param_dtype="bf16", reduce_dtype="bf16"
    ),
    "blocks lead, bf16 parameters": Case(
        LLAMA_SMALL_VOCAB, 512, Layout(dp_shard=8), param_dtype="bf16"
    ),
    "blocks lead, bf16 throughout, never": Case(
        LLAMA_SMALL_VOCAB,
        512,
        Layout(dp_shard=2, reshard_after_forward="never"),
        reduce_dtype="bf16",
        param_dtype="bf16",
    ),
    "every, three times, bf16 parameters": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=3),
        param_dtype="bf16",
    ),
    "added in fp32": Case(
        LLAMA_SMALL_VOCAB, 128, Layout(dp_shard=2, num_microbatches=3), param_dtype="bf16"
    ),
    "added in fp32, twice, bf16 throughout": Case(
        LLAMA_SMALL_VOCAB,
        512,
        Layout(dp_shard=8, num_microbatches=2, activation_checkpointing="full"),
        reduce_dtype="bf16",
        param_dtype="bf16",
    ),
    "hsdp, twice, bf16 throughout": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=2),
        reduce_dtype="bf16",
        param_dtype="bf16",
    ),
    "once, hsdp, bf16 parameters": Case(
        LLAMA_SMALL_VOCAB, 1024, Layout(dp_replicate=4, dp_shard=2), param_dtype="bf16"
    ),
    "reduce-scatter only, bf16 parameters": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_replicate=2, dp_shard=4, num_microbatches=3, gradient_sync="reduce_scatter_only"),
        param_dtype="bf16",
    ),
    "last, bf16 parameters": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_shard=4, num_microbatches=3, gradient_sync="last"),
        param_dtype="bf16",
    ),
    "last, bf16 throughout": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        Layout(dp_shard=4, num_microbatches=2, gradient_sync="last"),
        reduce_dtype="bf16",
        param_dtype="bf16",
    ),
    "gpt-2, recompute, bf16 parameters": Case(
        GPT2,
        256,
        Layout(dp_replicate=2, dp_shard=4, activation_checkpointing="full"),
        param_dtype="bf16",
    ),
    "odd, everything": Case(
        ODD,
        1000,
        Layout(
            dp_replicate=3,
            dp_shard=6,
            reshard_after_forward=3,
            num_microbatches=2,
            gradient_sync="last",
            activation_checkpointing="op",
        ),
    ),
    "qwen 2.5": Case(
        replace(load_model("qwen2.5-0.5b"), layers=4), 777, Layout(dp_shard=3, micro_batch=2)
    ),
    "mistral": Case(
        replace(load_model("mistral-7b-v0.1"), layers=4), 3000, Layout(dp_replicate=3, dp_shard=12)
    ),
    "gpt-2 xl, uneven": Case(
        replace(load_model("gpt2-xl"), layers=5),
        1023,
        Layout(dp_shard=5, wrap_blocks=2, activation_checkpointing="full"),
    ),
}

TWO_COPIES = Layout(sharding="ddp", dp_replicate=2)
DDP_CASES = {
    "8b": Case(LLAMA_8B, 4096, TWO_COPIES),
    "blocks lead": Case(LLAMA_SMALL_VOCAB, 256, replace(TWO_COPIES, num_microbatches=2)),
    "recompute": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(TWO_COPIES, activation_checkpointing="full")
    ),
    "recompute operations": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(TWO_COPIES, activation_checkpointing="op")
    ),
    "fp32": Case(LLAMA_SMALL_VOCAB, 2048, TWO_COPIES, precision="fp32"),
    "gpt-2": Case(GPT2, 1024, replace(TWO_COPIES, micro_batch=2)),
    "gpt-2, embedding leads": Case(GPT2, 64, TWO_COPIES),
    "qwen 3": Case(QWEN3, 1024, TWO_COPIES),
    "8b, bf16 parameters": Case(LLAMA_8B, 1024, TWO_COPIES, param_dtype="bf16"),
    "8b, reduced in bf16": Case(LLAMA_8B, 1024, TWO_COPIES, reduce_dtype="bf16"),
    "powersgd": Case(GPT2, 1024, TWO_COPIES, gradient_compression="powersgd:2:10"),
    "powersgd, the head leads": Case(
        LLAMA_8B, 512, TWO_COPIES, gradient_compression="powersgd:1:1000"
    ),
    "gpt-2, bf16 throughout": Case(GPT2, 512, TWO_COPIES, reduce_dtype="bf16", param_dtype="bf16"),
    "accumulated apart, bf16 throughout": Case(
        SMALL,
        256,
        replace(TWO_COPIES, num_microbatches=2, gradient_sync="last"),
        reduce_dtype="bf16",
        param_dtype="bf16",
    ),
    "added in fp32, each reduced": Case(
        LLAMA_SMALL_VOCAB, 256, replace(TWO_COPIES, num_microbatches=3), param_dtype="bf16"
    ),
    "odd": Case(ODD, 300, TWO_COPIES),
    "accumulated apart": Case(
        SMALL, 256, replace(TWO_COPIES, num_microbatches=2, gradient_sync="last")
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", FSDP_CASES.values(), ids=FSDP_CASES.keys())
def test_fsdp_peak_equals_that_of_the_trainer(case: Case) -> None:
    if RELEASE == (2, 12) and case is FSDP_CASES["every, three times"]:
        pytest.xfail("2.9 % too much: a shard that HSDP has not kept is counted")
    training = training_for(
        case.layout,
        seq_len=case.seq_len,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
        param_dtype=case.param_dtype,
        dropout=case.dropout,
    )
    measured = measured_step(case.model, training, case.layout).peak_bytes
    predicted = predicted_peak_bytes(case.model, training, case.layout)
    assert predicted == pytest.approx(measured, rel=TOLERANCE_FRACTION)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", DDP_CASES.values(), ids=DDP_CASES.keys())
def test_ddp_peak_equals_that_of_the_trainers_model(case: Case) -> None:
    training = training_for(
        case.layout,
        seq_len=case.seq_len,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
        param_dtype=case.param_dtype,
        gradient_compression=case.gradient_compression,
    )
    measured = measured_step(case.model, training, case.layout).peak_bytes
    predicted = predicted_peak_bytes(case.model, training, case.layout)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("param_dtype", "expected"), [("fp32", 12), ("bf16", 6)])
def test_state_between_steps_is_twelve_bytes_a_parameter(param_dtype: str, expected: int) -> None:
    """Weights and two moments in fp32, or all in bf16, sharded; gradients are freed after each
    step."""
    layout = Layout(dp_shard=8)
    training = training_for(layout, seq_len=32, param_dtype=param_dtype)
    measured = measured_step(SMALL, training, layout).state_bytes
    assert measured == pytest.approx(expected * parameter_count(SMALL) / 8, rel=0.01)


START_CASES: dict[str, tuple[Model, Layout, ParamDtype]] = {
    "8b flat": (LLAMA_8B, Layout(dp_shard=64), "fp32"),
    "8b hsdp": (LLAMA_8B, Layout(dp_replicate=2, dp_shard=8, wrap_blocks=2), "fp32"),
    "odd": (ODD, Layout(dp_shard=3), "fp32"),
    "gpt-2": (GPT2, Layout(dp_shard=8), "fp32"),
    "gpt-2, bf16 parameters": (GPT2, Layout(dp_shard=8), "bf16"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "layout", "param_dtype"), START_CASES.values(), ids=START_CASES.keys()
)
def test_start_and_checkpoint_peaks_equal_those_of_the_trainer(
    model: Model, layout: Layout, param_dtype: ParamDtype
) -> None:
    training = training_for(layout, seq_len=64, param_dtype=param_dtype)
    measured = measured_step(model, training, layout).peak_bytes_of
    case, stage = case_of(model, training, layout), whole_model(model)
    for phase, predicted in (
        ("start", initialization_peak_bytes(case, stage)),
        ("checkpoint", checkpoint_peak_bytes(case, stage)),
    ):
        assert predicted == pytest.approx(measured[phase], rel=TOLERANCE_FRACTION)
