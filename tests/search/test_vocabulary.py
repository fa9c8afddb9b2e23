"""Vocabulary: padded where the head's products are faster so, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.vocabulary import OFFERED_MULTIPLE, padding
from fsdpplan.spec.training import Training

GPT2 = load_model("gpt2")
TRAINING = Training(seq_len=1024, global_batch=8)
DGX = load_cluster("dgx-h100", gpus=8).cluster


@pytest.mark.parametrize(
    "hardware",
    ["dgx-h100", "dgx-a100-80g-hdr", "dgx-b200", "azure-nd-mi300x-v5", "gcp-g2-standard-96"],
)
def test_gpt2_is_padded_on_any_gpu(hardware: str) -> None:
    found = padding(GPT2, training=TRAINING, cluster=load_cluster(hardware, gpus=1).cluster)
    assert found is not None
    assert found.model.vocab == GPT2.vocab
    assert found.model.vocab_rows(1) == 50_304
    assert found.seconds < found.plain_seconds


@given(vocab=st.integers(1_000, 300_000))
def test_a_vocabulary_is_padded_only_where_that_is_faster(vocab: int) -> None:
    found = padding(replace(GPT2, vocab=vocab), training=TRAINING, cluster=DGX)
    if vocab % OFFERED_MULTIPLE == 0:
        assert found is None
    if found is not None:
        assert found.seconds < found.plain_seconds


@pytest.mark.parametrize("program", ["own", "hf", "accelerate", "torchtitan", "megatron"])
def test_tables_of_others_are_left_alone(program: str) -> None:
    runtime = "megatron" if program == "megatron" else "fsdp2"
    theirs = replace(TRAINING, program=program, runtime=runtime)  # type: ignore[arg-type]
    assert padding(GPT2, training=theirs, cluster=DGX) is None


def test_nothing_is_padded_on_a_cpu_nor_twice() -> None:
    assert padding(GPT2, training=TRAINING, cluster=load_cluster("cpu", gpus=1).cluster) is None
    padded = replace(GPT2, vocab_multiple=128)
    assert padding(padded, training=TRAINING, cluster=DGX) is None
