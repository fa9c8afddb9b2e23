"""One GPU: the trainer's step bare, and under FSDP over one rank, with and without offload.

Peaks are those of the trainer's own step under fake tensors, as in `test_memory`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from fsdpplan.cost.memory.ledger import checkpoint_peak_bytes, initialization_peak_bytes, rank_state
from fsdpplan.cost.memory.peak import stage_memory, staging_bytes
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case as Priced
from fsdpplan.spec.training import ParamDtype, Precision
from tests.ground_truth.fsdp_step import case_of, measured_step, predicted_peak_bytes, training_for
from tests.ground_truth.shapes import GPT2, LLAMA_8B, LLAMA_SMALL_VOCAB, ODD, QWEN3, SMALL


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    seq_len: int
    layout: Layout
    precision: Precision = "bf16"
    param_dtype: ParamDtype = "fp32"


BARE = Layout(sharding="ddp")
ALONE = Layout(sharding="fsdp")
PIECES = {"loss_chunks": 4}

CASES = {
    "bare": Case(LLAMA_8B, 4096, BARE),
    "bare, bf16 parameters": Case(LLAMA_8B, 1024, BARE, param_dtype="bf16"),
    "bare, fp32": Case(LLAMA_SMALL_VOCAB, 2048, BARE, precision="fp32"),
    "bare, twice": Case(LLAMA_SMALL_VOCAB, 256, replace(BARE, num_microbatches=2)),
    "bare, at last": Case(
        LLAMA_SMALL_VOCAB, 256, replace(BARE, num_microbatches=3, gradient_sync="last")
    ),
    "bare, recomputed": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(BARE, activation_checkpointing="full")
    ),
    "bare, recomputed operations": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(BARE, activation_checkpointing="op", micro_batch=2)
    ),
    "bare, recomputed, twice": Case(
        replace(SMALL, layers=24, hidden=1024, ffn_hidden=4096, vocab=65536),
        512,
        replace(BARE, activation_checkpointing="full", num_microbatches=2),
    ),
    "bare, recomputed operations, twice": Case(
        LLAMA_SMALL_VOCAB, 1024, replace(BARE, activation_checkpointing="op", num_microbatches=2)
    ),
    "bare, half recomputed, twice": Case(
        LLAMA_SMALL_VOCAB,
        1024,
        replace(BARE, activation_checkpointing="full", checkpoint_blocks=2, num_microbatches=2),
    ),
    "bare, recomputed attention": Case(
        LLAMA_SMALL_VOCAB, 1024, replace(BARE, activation_checkpointing="attention")
    ),
    "bare, tied": Case(GPT2, 1024, replace(BARE, micro_batch=2)),
    "bare, tied, bf16 parameters": Case(GPT2, 512, BARE, param_dtype="bf16"),
    "bare, in pieces": Case(QWEN3, 1024, replace(BARE, **PIECES)),
    "bare, odd": Case(ODD, 300, BARE),
    "over one rank": Case(LLAMA_8B, 4096, ALONE),
    "over one rank, bf16 parameters": Case(LLAMA_8B, 1024, ALONE, param_dtype="bf16"),
    "over one rank, kept": Case(
        LLAMA_SMALL_VOCAB, 1024, replace(ALONE, reshard_after_forward="never")
    ),
    "over one rank, three times": Case(LLAMA_SMALL_VOCAB, 1024, replace(ALONE, num_microbatches=3)),
    "over one rank, at last": Case(
        LLAMA_SMALL_VOCAB, 1024, replace(ALONE, num_microbatches=3, gradient_sync="last")
    ),
    "over one rank, recomputed": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(ALONE, activation_checkpointing="full", wrap_blocks=2)
    ),
    "over one rank, tied": Case(GPT2, 1024, replace(ALONE, micro_batch=2)),
    "over one rank, fp32": Case(SMALL, 256, ALONE, precision="fp32"),
    "over one rank, odd": Case(ODD, 301, ALONE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_peaks_equal_those_of_the_trainer(case: Case) -> None:
    """Of a step, of the start, and of a checkpoint."""
    training = training_for(
        case.layout, seq_len=case.seq_len, precision=case.precision, param_dtype=case.param_dtype
    )
    measured = measured_step(case.model, training, case.layout)
    predicted = predicted_peak_bytes(case.model, training, case.layout)
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.01)
    priced, stage = case_of(case.model, training, case.layout), whole_model(case.model)
    for phase, expected in (
        ("start", initialization_peak_bytes(priced, stage)),
        ("checkpoint", checkpoint_peak_bytes(priced, stage)),
    ):
        assert expected == pytest.approx(measured.peak_bytes_of[phase], rel=0.01), phase
    assert not measured.rows


OFFLOADED = {
    "loss leads": Case(LLAMA_8B, 4096, ALONE),
    "activations lead": Case(LLAMA_SMALL_VOCAB, 4096, replace(ALONE, micro_batch=4)),
    "gradients lead": Case(LLAMA_SMALL_VOCAB, 1024, ALONE),
    "recomputed": Case(
        LLAMA_SMALL_VOCAB, 4096, replace(ALONE, activation_checkpointing="full", micro_batch=4)
    ),
    "twice": Case(LLAMA_SMALL_VOCAB, 1024, replace(ALONE, num_microbatches=2)),
}


@pytest.mark.parametrize("case", OFFLOADED.values(), ids=OFFLOADED.keys())
def test_with_offload_device_and_host_hold_together_what_the_device_alone_would(case: Case) -> None:
    """On a CPU the copies between them are none, so a step's peak is that of both, without what is
    on its way; the device's own lies below it by the state, and by gradients that left before."""
    layout = replace(case.layout, offload="cpu", compile=False)
    training = training_for(layout, seq_len=case.seq_len)
    measured = measured_step(case.model, training, layout).peak_bytes
    assert measured == pytest.approx(
        predicted_peak_bytes(case.model, training, case.layout), rel=0.01
    )
    priced, stage = case_of(case.model, training, layout), whole_model(case.model)
    depth = case.model.layers
    sizes, state = rank_sizes(priced, stage, in_flight_blocks=depth), rank_state(priced, stage)
    memory = stage_memory(priced, stage, in_flight_blocks=depth)
    kept = state.parameters + state.optimizer
    own = memory.peak_allocated_bytes - staging_bytes(sizes, formats_of(priced))
    left_before = memory.host_bytes - kept  # all gradients, where backward has ended
    assert memory.parameters_bytes == memory.optimizer_bytes == 0
    assert 0.99 * measured <= own + kept + (left_before if memory.peak_phase == "backward" else 0)
    assert own + kept <= 1.01 * measured


def formats_of(case: Priced) -> int:
    """Bytes of an element on its way."""
    return formats(training=case.training, layout=case.layout).kept_gradient
