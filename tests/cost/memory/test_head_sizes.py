"""Head sizes: logits, and what the loss of each software makes of them."""

from __future__ import annotations

import pytest

from fsdpplan.cost.kernels.head import HeadSizes, head_sizes
from fsdpplan.cost.model.shards import Stage, whole_model
from tests.cost.problems import SMALL, Case, case


def head_of(drawn: Case) -> HeadSizes:
    """Of a rank that has the head."""
    return head_sizes(drawn, whole_model(drawn.model))


@pytest.mark.parametrize(
    ("runtime", "bytes_of_a_logit"),
    [
        ("fsdp2", 12),  # log-probabilities and two gradients
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
    assert split.loss_element_bytes == 16


def test_a_stage_without_head_has_no_logits() -> None:
    drawn = case()
    inside = head_sizes(drawn, Stage(blocks=2, has_embedding=False, has_head=False))
    assert (inside.logits_elements, inside.last_normed_bytes, inside.kept_bytes) == (0, 0, 0)
