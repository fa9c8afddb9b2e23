"""Head sizes: logits, and what the loss of each software makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.kernels.head import HeadSizes, head_sizes
from fsdpplan.cost.model.shards import Stage, whole_model
from tests.cost.problems import SMALL, Case, case


def head_of(drawn: Case) -> HeadSizes:
    """Of a rank that has the head."""
    return head_sizes(drawn, whole_model(drawn.model))


@pytest.mark.parametrize(
    ("runtime", "bytes_of_a_logit"),
    [
        ("fsdp2", 4),  # compiled: the logits and their gradient
        ("fsdp2_2024", 12),  # eager: log-probabilities and two gradients
        ("megatron", 6),  # one fp32 copy beside the logits, then beside their gradient
        ("nanotron", 8),  # the fp32 copy and the one that the loss works on
        ("composer", 4),  # the logits and their gradient
    ],
)
def test_a_logit_at_the_losss_highest(runtime: str, bytes_of_a_logit: int) -> None:
    head = head_of(case(runtime=runtime, micro_batch=2))
    assert head.logits_elements == 2 * 1024 * SMALL.vocab
    assert head.loss_element_bytes == bytes_of_a_logit


def test_vocabulary_parallel_loss_splits_the_logits() -> None:
    tensor_parallel = {"tp": 4, "sequence_parallel": True}
    split = head_of(case(loss_parallel=True, **tensor_parallel))
    gathered = head_of(case(**tensor_parallel))
    assert 4 * split.logits_elements == gathered.logits_elements
    assert split.gather_bytes == 0
    assert gathered.gather_bytes == 2 * 1024 * (SMALL.vocab + SMALL.vocab // 4)
    assert split.loss_element_bytes == 10  # the logits, and two in fp32
    eager = head_of(case(loss_parallel=True, compile=False, **tensor_parallel))
    assert eager.loss_element_bytes == 16
    assert gathered.loss_element_bytes == 4


@given(
    runtime=st.sampled_from(["fsdp2", "fsdp2_2024", "fsdp1", "megatron", "nanotron"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    compiled=st.booleans(),
)
def test_compiled_without_pieces_nothing_in_fp32_is_kept_of_the_logits(
    runtime: str, precision: str, compiled: bool
) -> None:
    drawn = case(runtime=runtime, precision=precision, compile=compiled, sharding="ddp")
    head, element = head_of(drawn), 2 if precision == "bf16" else 4
    if compiled and runtime in ("fsdp2", "fsdp1"):
        assert head.loss_element_bytes == 2 * element
        assert head.loss_gradient_element_bytes == element
    else:
        assert head.loss_element_bytes >= 4 + element % 4


@pytest.mark.parametrize(("program", "returned"), [("hf", 2), ("accelerate", 4)])
def test_what_a_model_returns_beside_its_loss_is_held(program: str, returned: int) -> None:
    """Compiled or not: such programs hand the compiler their blocks alone."""
    eager = head_of(case(compile=False))
    for compiled in (False, True):
        theirs = head_of(case(compile=compiled, program=program))
        assert theirs.loss_element_bytes == eager.loss_element_bytes + returned


def test_a_stage_without_head_has_no_logits() -> None:
    drawn = case()
    inside = head_sizes(drawn, Stage(blocks=2, has_embedding=False, has_head=False))
    assert (inside.logits_elements, inside.last_normed_bytes, inside.kept_bytes) == (0, 0, 0)
