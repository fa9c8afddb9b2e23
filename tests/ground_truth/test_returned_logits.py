"""Logits that a model of transformers returns beside its loss: a loop may hold them, too."""

from __future__ import annotations

import pytest
import torch

from fsdpplan.cost.kernels.head import head_sizes
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.spec.training import ProgramName
from fsdpplan.trainer.rehearse.live_bytes import LiveBytes
from tests.cost.problems import case

TOKENS, VOCAB, HIDDEN = 1024, 4096, 16
TOLERANCE_BYTES = 0.5
"""Of a logit: the decoder beside them, which is tiny."""


def bytes_of_a_logit(program: ProgramName) -> tuple[float, float]:
    """(what forward leaves, the highest of a step) while the loop holds all that was returned."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    if program == "accelerate":  # as `Accelerator.prepare_model` wraps it under mixed precision
        operations = pytest.importorskip("accelerate.utils.operations")
        forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model.forward = operations.convert_outputs_to_fp32(forward)
    else:
        model = model.to(torch.bfloat16)
    tokens = torch.randint(0, VOCAB, (1, TOKENS))
    with LiveBytes() as live:
        returned = model(input_ids=tokens, labels=tokens)
        kept = live.total
        returned.loss.backward()
    return kept / (TOKENS * VOCAB), live.peak_in_phase[live.phase] / (TOKENS * VOCAB)


@pytest.mark.parametrize("program", ["hf", "accelerate"])
def test_a_loop_holds_the_logits_that_a_model_returns(program: ProgramName) -> None:
    kept, peak = bytes_of_a_logit(program)
    drawn = case(program=program)
    head = head_sizes(drawn, whole_model(drawn.model))
    assert head.loss_element_bytes == pytest.approx(peak, abs=TOLERANCE_BYTES)
    beside = head.last_residual_bytes + head.last_normed_bytes
    in_forward = (head.kept_bytes - beside) / head.logits_elements
    assert in_forward == pytest.approx(kept, abs=TOLERANCE_BYTES)
