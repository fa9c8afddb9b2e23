"""Activation checkpointing: what backward computes again instead of keeping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..config import LayoutConfig
from ..errors import TrainerError
from ..model.attention import AttentionCore
from ..private_torch import goes_back_again
from ..rng import restore_generators, torch_states
from ..torch_versions import windowed_operators
from .local_parameters import has_distributed_parameters
from .pipeline_stages import SPLIT_BACKWARD_SCHEDULES

aten = torch.ops.aten

ATTENTION_OPS = windowed_operators() | frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Fused attention: always kept, as the costliest to compute again."""

MATMUL_OPS = frozenset({aten.mm.default, aten.addmm.default})
"""What `nn.Linear` becomes, without and with a bias: every other one is kept. Not those of routed
experts: their outputs are as many as the experts of each token."""

RANDOM_OPS = frozenset({aten.native_dropout.default})
"""Kept as attention is: what is computed again begins with the generator as it was, and would draw
other numbers behind attention, which is not computed again and draws none."""

MARKS = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
"""What the profiler is told. FSDP's hooks around experts do so more often when they meet their
block again, and torch 2.13 refuses an operator that forward has not seen as often."""

SAC_IGNORED_OPS.update(MARKS)


def apply_checkpointing(blocks: Sequence[nn.Module], layout: LayoutConfig) -> None:
    """Recompute the first blocks in backward, or all, as far as the layout says.

    The first: backward comes to them when what the others keep is gone.
    """
    number = layout.checkpoint_blocks
    if isinstance(number, int) and layout.pp == 1 and number > len(blocks):
        raise TrainerError(
            f"the plan recomputes {number} blocks, the model has {len(blocks)}: plan again with "
            "--checkpoint-blocks all"
        )
    is_split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES
    for block in blocks[: number if isinstance(number, int) else None]:
        if is_split and layout.activation_checkpointing == "full":
            block.forward = recomputed_once(block)
        else:
            checkpoint_block(block, layout.activation_checkpointing)


def checkpoint_block(block: nn.Module, mode: str) -> None:
    """Let backward recompute `block`: all of it (`full`), all but attention and every other matmul
    (`op`), or attention between the projections only (`attention`: arXiv 2205.05198, section 5).

    The block's `forward` is replaced, not the block: parameter names stay as they are, and FSDP's
    hooks stay outside, so that the recomputation finds the parameters gathered by backward.
    """
    if mode == "none":
        return
    if mode == "attention":
        for core in attention_cores(block):
            core.forward = recomputed(core)  # type: ignore[method-assign]
            if has_distributed_parameters(block):
                # torch 2.13 would keep a mesh for backward, and raise that it is no tensor
                core.forward = torch.compiler.disable(core.forward)  # type: ignore[method-assign, no-untyped-call]
        return
    context: dict[str, Any] = {"context_fn": save_costly_operations} if mode == "op" else {}
    block.forward = recomputed(block, **context)


def recomputed(module: nn.Module, **context: Any) -> Callable[..., Any]:
    """The forward of `module`, computed again in backward.

    A function that is handed the module, not a `partial` and not the module's method: torch.compile
    takes each of those for another program, before torch 2.10 also of modules that are alike, and
    gives up compiling after eight blocks.
    """
    replaced = vars(module).get("forward")
    forward, first = (replaced, ()) if replaced else (type(module).forward, (module,))

    def again(*args: Any, **given: Any) -> Any:
        return checkpoint(forward, *first, *args, use_reentrant=False, **context, **given)

    return again


def recomputed_once(module: nn.Module) -> Callable[..., Any]:
    """The forward of `module`, computed again when backward first asks for something that it saved,
    and kept until backward is done with it.

    Where backward is split, torch's checkpoint would compute it again for each half, and for each
    parameter of the weights' half: each is a backward pass of its own.
    """
    forward = module.forward

    def again(*args: Any, **given: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **given)
        saved = _MadeOnce(forward, args, given)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return forward(*args, **given)

    return again


class _Enough(Exception):
    """All that backward needs is made: what is left of forward is left out."""


class _MadeOnce:
    """What one call saves for backward. The graph holds it; with the graph it goes."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
    ) -> None:
        self.function, self.args, self.given = function, args, given
        self.number = 0
        self.made: list[torch.Tensor | None] = []
        device = next((one.device.type for one in args if isinstance(one, torch.Tensor)), "cpu")
        self.autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self.generators = torch_states()

    def pack(self, _: torch.Tensor) -> int:
        """The place of a tensor that is saved, instead of it."""
        self.number += 1
        return self.number - 1

    def unpack(self, place: int) -> torch.Tensor:
        """That tensor, made with all others when the first of them is asked for; let go of where
        nothing will ask for it again."""
        if not self.made:
            self._make()
        tensor = self.made[place]
        assert tensor is not None
        if not goes_back_again():
            self.made[place] = None
        return tensor

    def _make(self) -> None:
        def keep(tensor: torch.Tensor) -> None:
            """Nothing for the second graph, which nobody goes back through: what it saves of its
            own results would keep it alive."""
            self.made.append(tensor.detach())
            if len(self.made) == self.number:
                raise _Enough

        args = [_as_leaf(one) for one in self.args]
        given = {name: _as_leaf(one) for name, one in self.given.items()}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept)
        behind = torch_states()
        restore_generators(self.generators)
        with (
            contextlib.suppress(_Enough),
            torch.enable_grad(),
            self.autocast,
            hooks,
        ):
            self.function(*args, **given)
        restore_generators(behind)


def _as_leaf(value: Any) -> Any:
    """A tensor without the graph behind it, which backward goes through by itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def attention_cores(block: nn.Module) -> list[AttentionCore]:
    """What computes attention in `block`, which must be one of the reference decoder's."""
    cores = [module for module in block.modules() if isinstance(module, AttentionCore)]
    if not cores:
        raise TrainerError(
            f"activation_checkpointing attention needs the reference decoder's blocks, and this is "
            f"{type(block).__name__}: plan with none, op or full"
        )
    return cores


def save_costly_operations() -> Any:
    """The two contexts (forward, recompute) of per-operation checkpointing for one block call."""
    return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        _costly_operations_policy()
    )


def _costly_operations_policy() -> Callable[..., CheckpointPolicy]:
    """Keep attention, and the 1st, 3rd, 5th ... matmul of a block.

    Forward and recomputation count their matmuls apart, or the second would begin where the first
    ended.
    """
    matmuls = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kept = operation in ATTENTION_OPS or operation in RANDOM_OPS
        if operation in MATMUL_OPS:
            matmuls[context.is_recompute] += 1
            kept = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
