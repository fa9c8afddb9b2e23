"""What per-operation checkpointing keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.decoder import Block
from fsdpplan.trainer.parallel.recompute import ATTENTION_OPS, MATMUL_OPS, checkpoint_block
from tests.trainer import plans


class Calls(TorchDispatchMode):
    """Counts matmuls and fused attention that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matmuls += func in MATMUL_OPS
        self.attentions += func in ATTENTION_OPS
        return func(*args, **(kwargs or {}))


def backward_calls(mode: str, model: dict[str, Any]) -> tuple[int, int, torch.Tensor]:
    """(matmuls, attentions) of one block's backward, and the input's gradient."""
    torch.manual_seed(0)
    block = Block(parse_plan(plans.plan_text(model=model)).model, layer=0)
    checkpoint_block(block, mode)
    x = torch.randn(2, 24, 48, requires_grad=True)
    out = block(x).sum()
    with Calls() as calls:
        out.backward()
    assert x.grad is not None
    return calls.matmuls, calls.attentions, x.grad


# keys of their own for each head: the CPU's kernel takes no others before torch 2.9
@pytest.mark.parametrize(
    ("model", "matmuls"),
    [({"kv_heads": 4}, 7), (plans.GPT2_STYLE, 6)],
    ids=["swiglu", "gelu_with_biases"],
)
def test_backward_recomputes_every_second_matmul_and_no_attention(
    model: dict[str, Any], matmuls: int
) -> None:
    plain, attentions, gradient = backward_calls("none", model)
    assert (plain, attentions) == (2 * matmuls, 0)

    found, attentions, same = backward_calls("op", model)
    # the 2nd, 4th and 6th, unless it is the block's last, whose output backward does not need
    assert found - plain == {7: 3, 6: 2}[matmuls]
    assert attentions == 0
    torch.testing.assert_close(same, gradient)

    found, attentions, same = backward_calls("full", model)
    assert found - plain == matmuls - 1
    assert attentions == 1
    torch.testing.assert_close(same, gradient)

    found, attentions, same = backward_calls("attention", model)
    assert (found, attentions) == (plain, 1)
    torch.testing.assert_close(same, gradient)


@pytest.mark.parametrize("mode", ["none", "attention", "op", "full"])
def test_all_blocks_are_one_program_for_the_compiler(mode: str) -> None:
    """It gives up after eight programs of one function."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    plan = parse_plan(plans.plan_text())
    x = torch.randn(1, 8, 48, requires_grad=True)
    for layer in range(3):
        block = Block(plan.model, layer=layer)
        checkpoint_block(block, mode)
        torch.compile(block.forward, backend=backend)(x)
    assert len(compiled) == 1


def test_attention_is_recomputed_in_the_reference_decoder_only() -> None:
    with pytest.raises(TrainerError, match="attention needs the reference decoder's blocks"):
        checkpoint_block(torch.nn.Linear(2, 2), "attention")


@pytest.mark.parametrize("mode", ["attention", "op", "full"])
@pytest.mark.parametrize(
    "model",
    [
        {"experts": {"experts": 5, "active": 2, "hidden": 24, "bias": True}},
        {"attention_sinks": True, "sliding_window": 5, "full_attention_every": 2},
        {"positions": "alibi", "kv_heads": 4},
    ],
    ids=["experts", "sinks", "alibi"],
)
def test_any_model_has_the_gradients_that_it_has_without(mode: str, model: dict[str, Any]) -> None:
    _, _, expected = backward_calls("none", model)
    _, _, gradient = backward_calls(mode, model)
    torch.testing.assert_close(gradient, expected)
