"""The compiled loss: between its passes stay the logits as they are, and nothing in fp32."""

from __future__ import annotations

import pytest
import torch

from fsdpplan.cost.kernels.head import head_sizes
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.trainer.model.loss import next_token_loss
from tests.cost.problems import case
from tests.ground_truth.partitioned import kept_between_passes

TOKENS, VOCAB = 64, 4096


def kept_bytes_of_a_logit() -> float:
    """What torch's partitioner lets stay between forward and backward of the trainer's loss."""
    logits = torch.randn(1, TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, VOCAB, (1, TOKENS))
    kept = kept_between_passes(next_token_loss, logits, targets)
    return sum(each.numel() * each.element_size() for each in kept) / logits.numel()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_compiled_loss_keeps_the_logits_alone() -> None:
    drawn = case()
    head = head_sizes(drawn, whole_model(drawn.model))
    beside = head.last_residual_bytes + head.last_normed_bytes
    predicted = (head.kept_bytes - beside) / head.logits_elements
    assert predicted == pytest.approx(kept_bytes_of_a_logit(), rel=0.02)
