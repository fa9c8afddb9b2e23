"""The compiled loss: between its passes stay the logits as they are, and nothing in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from fsdpplan.cost.kernels.head import head_sizes
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.trainer.model.loss import next_token_loss
from tests.cost.problems import case

TOKENS, VOCAB = 64, 4096


def kept_bytes_of_a_logit() -> float:
    """What torch's partitioner lets stay between forward and backward of the trainer's loss."""
    kept: list[Tensor] = []

    def partition(joint: torch.fx.GraphModule, inputs: object, **options: object) -> object:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        values = [node.meta.get("val") for node in outputs[options["num_fwd_outputs"] :]]
        kept.extend(value for value in values if isinstance(value, Tensor))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    logits = torch.randn(1, TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(next_token_loss, backend=backend)(logits, torch.randint(0, VOCAB, (1, TOKENS)))
    return sum(each.numel() * each.element_size() for each in kept) / logits.numel()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_compiled_loss_keeps_the_logits_alone() -> None:
    drawn = case()
    head = head_sizes(drawn, whole_model(drawn.model))
    beside = head.last_residual_bytes + head.last_normed_bytes
    predicted = (head.kept_bytes - beside) / head.logits_elements
    assert predicted == pytest.approx(kept_bytes_of_a_logit(), rel=0.02)
