"""Head: output head, loss and embedding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.kernels.head import embedding_seconds, head_seconds
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.cost.problems import some_models
from tests.cost.works import H100

LLAMA = load_model("llama-3.1-8b")


def head(model: Model = LLAMA, **changes: object) -> tuple[float, float]:
    """Of 8192 tokens and the whole vocabulary on one H100."""
    arguments = {"tokens": 8192, "vocab": model.vocab, "precision": "bf16", "device": H100}
    return head_seconds(model=model, **(arguments | changes))  # type: ignore[arg-type]


def test_a_split_vocabulary_splits_the_head() -> None:
    for whole, part in zip(head(), head(vocab=LLAMA.vocab // 8), strict=True):
        assert part == pytest.approx(whole / 8, rel=0.15)


def test_ranks_that_gather_the_logits_see_all_of_them_in_the_loss() -> None:
    split = head(vocab=LLAMA.vocab // 8)
    gathered = head(vocab=LLAMA.vocab // 8, loss_vocab=LLAMA.vocab)
    assert split[0] < gathered[0] < head()[0]


def test_a_joined_loss_moves_less() -> None:
    assert sum(head(joins_loss=True)) < sum(head())


def test_an_odd_vocabulary_falls_off_the_fast_kernels_unless_padded() -> None:
    gpt2 = load_model("gpt2-large")
    odd, padded, even = head(gpt2), head(gpt2, pads=True), head(gpt2, vocab=50304)
    assert sum(odd) > 1.3 * sum(padded)
    assert sum(padded) == pytest.approx(sum(even), rel=0.01)


def test_fp8_leaves_the_head_in_16_bits() -> None:
    assert head(precision="fp8") == head()


@given(some_models(), st.integers(1, 2**15))
def test_the_head_is_never_faster_than_the_roofline(model: Model, tokens: int) -> None:
    forward, backward = head(model, tokens=tokens)
    flops = 2 * tokens * model.hidden * model.vocab
    assert forward >= flops / H100.peak_bf16_flops_per_second
    assert backward >= 2 * flops / H100.peak_bf16_flops_per_second
    more = head(model, tokens=2 * tokens)
    assert forward <= more[0]
    assert backward <= more[1]


def test_the_embedding_fills_its_whole_tables_gradient() -> None:
    forward, backward = embedding_seconds(
        model=LLAMA, tokens=1, rows=LLAMA.vocab, element_bytes=2, tied=False, device=H100
    )
    table = LLAMA.vocab * LLAMA.hidden * 2 / H100.memory_bandwidth_bytes_per_second
    assert forward < 1e-6
    assert table <= backward < 2 * table
