"""Peak memory of packed sequences equals that of the trainer's own step: by the kernel of
documents, and where they go one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.trainer.torch_versions import RELEASE
from tests.ground_truth.fsdp_step import case_of, measured_step, training_for
from tests.ground_truth.shapes import LLAMA_SMALL_VOCAB
from tests.ground_truth.test_block_kinds import ALIBI, GEMMA, LATENT, SINKS, STARCODER

KERNEL = pytest.mark.skipif(RELEASE < (2, 12), reason="torch has no kernel of documents")


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    seq_len: int
    mode: ActivationCheckpointing = "none"
    layout: Mapping[str, Any] = MappingProxyType({})
    training: Mapping[str, Any] = MappingProxyType({})
    tolerance_fraction: float = 0.002


PIPED = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 4,
    "reshard_after_forward": "never",
    "gradient_sync": "last",
}
CASES = {
    "none": Case(LLAMA_SMALL_VOCAB, 4096),
    "attention": Case(LLAMA_SMALL_VOCAB, 4096, "attention"),
    "operations": Case(LLAMA_SMALL_VOCAB, 4096, "op"),
    "full": Case(LLAMA_SMALL_VOCAB, 4096, "full"),
    "32k": Case(LLAMA_SMALL_VOCAB, 32768, "op"),
    "two sequences": Case(LLAMA_SMALL_VOCAB, 4096, layout={"micro_batch": 2}),
    "tensor parallel": Case(
        LLAMA_SMALL_VOCAB,
        8192,
        layout={"tp": 4, "sequence_parallel": True, "loss_parallel": True},
    ),
    "pipeline": Case(LLAMA_SMALL_VOCAB, 4096, layout=PIPED, tolerance_fraction=0.02),
    "windows": Case(STARCODER, 16384),
    "windows, norms behind, operations": Case(GEMMA, 4096, "op"),
    "alibi": Case(ALIBI, 2048),
    "latent": Case(LATENT, 4096),
    "latent, operations": Case(LATENT, 4096, "op"),
    "one by one": Case(LLAMA_SMALL_VOCAB, 4096, training={"precision": "fp32"}),
    "one by one, operations": Case(LLAMA_SMALL_VOCAB, 4096, "op", training={"precision": "fp32"}),
    "one by one, attention": Case(
        LLAMA_SMALL_VOCAB, 4096, "attention", training={"precision": "fp32"}
    ),
    "one by one, full": Case(LLAMA_SMALL_VOCAB, 4096, "full", training={"precision": "fp32"}),
}


def peaks(case: Case) -> tuple[int, int]:
    """(predicted, measured) bytes of the first rank."""
    layout = Layout(dp_shard=8, activation_checkpointing=case.mode, compile=False, **case.layout)
    training = training_for(layout, seq_len=case.seq_len, packed=True, **case.training)
    measured = measured_step(case.model, training, layout).peak_bytes
    stage = pipeline_ranks(model=case.model, layout=layout)[0]
    in_flight = in_flight_blocks(model=case.model, layout=layout)[0]
    eager = case_of(case.model, training, layout)
    memory = stage_memory(eager, stage, in_flight_blocks=in_flight)
    return memory.peak_allocated_bytes, measured


@pytest.mark.sampled(1)
@KERNEL
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_peak_of_packed_sequences_equals_that_of_the_trainer(case: Case) -> None:
    predicted, measured = peaks(case)
    assert predicted == pytest.approx(measured, rel=case.tolerance_fraction)


@KERNEL
def test_documents_and_sinks_are_priced_as_if_the_longest_were_the_sequence() -> None:
    predicted, measured = peaks(Case(replace(SINKS, layers=1), 4096, "op"))
    assert 0.98 * measured < predicted < 1.5 * measured
