"""What torch does with a backward pass in halves: the facts behind zero-bubble schedules."""

from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.trainer.config import ModelConfig
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.parallel.recompute import apply_checkpointing
from fsdpplan.trainer.torch_versions import RELEASE

PARAMETERS, MATRICES, RECOMPUTED = 9, 7, 6
"""Of a block; recomputation stops before the last product."""


class _Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Plain matmuls."""
        return self.counts["mm"]

    @property
    def attentions(self) -> int:
        """Fused attention, forward."""
        return self.counts["_scaled_dot_product_flash_attention_for_cpu"]


def _block(checkpointing: str, *, is_split: bool = False) -> nn.Module:
    config = ModelConfig(
        name="tiny",
        layers=1,
        hidden=64,
        ffn_hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=128,
        mlp="swiglu",
        norm="rmsnorm",
        positions="rope",
        max_positions=128,
        tied_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_theta=1e4,
        norm_epsilon=1e-5,
    )
    blocks = list(Decoder(config).layers.values())
    schedule = {"pp": 2, "schedule": "zbv"} if is_split else {"pp": 1, "schedule": "none"}
    layout: Any = SimpleNamespace(
        activation_checkpointing=checkpointing, checkpoint_blocks="all", **schedule
    )
    apply_checkpointing(blocks, layout)
    return nn.Sequential(*blocks)


def _halves(block: nn.Module) -> tuple[_Operators, _Operators]:
    """(by inputs, by weights) of one backward pass."""
    x, y = _forward(block)
    by_input, by_weight = _Operators(), _Operators()
    with by_input:
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], block.parameters())
    with by_weight:
        stage_backward_weight(block.parameters(), groups)
    return by_input, by_weight


def _forward(block: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, 32, 64, requires_grad=True)
    return x, block(x)


def test_the_halves_are_together_one_backward_pass() -> None:
    block = _block("none")
    x, y = _forward(block)
    whole = _Operators()
    with whole:
        stage_backward((y,), (torch.ones_like(y),), (x,))
    by_input, by_weight = _halves(block)
    assert by_input.products == by_weight.products == MATRICES
    assert whole.products == 2 * MATRICES
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.skipif(
    RELEASE < (2, 9), reason="torch 2.8 has no fused attention of grouped keys here"
)
def test_the_weights_half_recomputes_a_checkpointed_block_once_a_parameter() -> None:
    """Each parameter is a backward pass of its own to the checkpoint: not worth having."""
    by_input, by_weight = _halves(_block("full"))
    assert by_input.products == MATRICES + RECOMPUTED
    assert by_input.attentions == 1
    assert by_weight.attentions == PARAMETERS
    assert by_weight.products == MATRICES + PARAMETERS * RECOMPUTED


def test_our_own_recomputes_once_for_both_halves_and_equals_what_is_kept() -> None:
    gradients = []
    for checkpointing in ("none", "full"):
        torch.manual_seed(0)
        block = _block(checkpointing, is_split=True)
        by_input, by_weight = _halves(block)
        assert by_weight.products == MATRICES
        assert by_input.products == MATRICES + (RECOMPUTED if checkpointing == "full" else 0)
        gradients.append([parameter.grad for parameter in block.parameters()])
    assert len(gradients[0]) == PARAMETERS
    for kept, remade in zip(*gradients, strict=True):
        assert torch.equal(kept, remade)


def test_our_own_is_let_go_of_with_the_graph_and_makes_no_circles() -> None:
    block = _block("full", is_split=True)
    gc.collect()
    gc.disable()
    try:
        x, y = _forward(block)
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], block.parameters())
        stage_backward_weight(block.parameters(), groups)
        del x, y, groups
        left = [one for one in gc.get_objects() if type(one).__name__ == "_MadeOnce"]
    finally:
        gc.enable()
    assert not left


def test_selective_checkpointing_refuses_the_weights_half() -> None:
    with pytest.raises(RuntimeError, match="backward an extra time"):
        _halves(_block("op"))
