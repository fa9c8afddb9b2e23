"""What a user's model computes before, between and behind its blocks: found by calling it once.

The call is made in fake tensors: shapes, dtypes and the graph of autograd are real, memory and
arithmetic are not. Around each block the graph is cut, so that what its parts depend on can be
read off it: the embedding's parameters are what the first block's input comes from, the head's
what the output comes from. What would make a cut another model is refused here, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..config import PlanConfig
from ..errors import TrainerError
from ..precision import compute_dtype
from ..private_torch import fake_tensors
from ..torch_versions import fused_attention

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a model is called with: one tensor, several, or several by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one call of a model has shown."""

    before: frozenset[str]
    """Names of the parameters that the first block's input comes from."""
    behind: frozenset[str]
    """Names of those that the output comes from, the blocks' own apart."""
    hidden_shape: tuple[int, ...]
    """Of what blocks hand on."""
    hidden_dtype: torch.dtype
    attention: tuple[int, ...]
    """Sequences x heads of each attention, in order."""


def called_with(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,), {}) if isinstance(inputs, Tensor) else (tuple(inputs), {})


def usual_inputs(model: nn.Module, plan: PlanConfig) -> Inputs:
    """A micro-batch of tokens, as a decoder takes it; by name if it is a Hugging Face model."""
    length = plan.training.seq_len // plan.layout.cp
    tokens = torch.zeros(plan.layout.micro_batch, length, dtype=torch.int64, device="meta")
    name = getattr(model, "main_input_name", None)
    return {name: tokens} if isinstance(name, str) else tokens


def traced(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: PlanConfig,
    inputs: Inputs | None,
    *,
    widths: Mapping[str, tuple[int, ...]] | None = None,
) -> Trace:
    """Call `model` once. `widths`: shapes of parameters in the place of their own, by name."""
    example = usual_inputs(model, plan) if inputs is None else inputs
    # grouped products of fake tensors are of bf16 only (torch 2.13, `_meta_grouped_mm_common`)
    is_fp32 = compute_dtype(plan.training) is torch.float32
    has_stacks = is_fp32 and any(parameter.ndim == 3 for parameter in model.parameters())
    stands_for = torch.bfloat16 if has_stacks else None
    found = _traced(model, blocks, plan, example, widths or {}, stands_for=stands_for)
    return replace(found, hidden_dtype=torch.float32) if has_stacks else found


def _traced(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: PlanConfig,
    example: Inputs,
    widths: Mapping[str, tuple[int, ...]],
    *,
    stands_for: torch.dtype | None,
) -> Trace:
    with ExitStack() as stack:
        watch = _Watch(blocks)
        stack.enter_context(fake_tensors())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fused_attention())
        stack.enter_context(_autocast(plan))
        stack.callback(watch.leave)
        values = _fake_values(model, plan, widths, stands_for)
        watch.names = {id(value): name for name, value in values.items()}
        args, given = called_with(example)
        args, given = tuple(map(_fake, args)), {key: _fake(each) for key, each in given.items()}
        stack.enter_context(watch.attention)
        try:
            output = functional_call(model, values, args, given, tie_weights=False)
        except TrainerError:
            raise
        except Exception as error:
            raise NotCallable(
                f"{type(model).__name__} could not be called with "
                f"{_shapes(args, given)} to see how it is made ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}): give parallelize(..., example=...) what "
                "its forward takes, as tensors of one micro-batch"
            ) from error
        return watch.found(output)


class NotCallable(TrainerError):
    """The model's forward failed."""


def _autocast(plan: PlanConfig) -> Any:
    dtype = compute_dtype(plan.training)
    if plan.layout.sharding != "ddp" or dtype is torch.float32:
        return nullcontext()
    return torch.autocast("cpu", dtype=dtype)


def _fake_values(
    model: nn.Module,
    plan: PlanConfig,
    widths: Mapping[str, tuple[int, ...]],
    stands_for: torch.dtype | None,
) -> dict[str, Tensor]:
    """A leaf for each name, also of tied parameters, so that it shows by which name one is used;
    in the dtype in which FSDP gathers it."""
    gathered = stands_for
    if gathered is None and plan.layout.sharding == "fsdp":
        gathered = compute_dtype(plan.training)
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dtype = gathered if gathered and parameter.is_floating_point() else parameter.dtype
        made = torch.empty(widths.get(name, tuple(parameter.shape)), dtype=dtype)
        values[name] = made.requires_grad_(parameter.is_floating_point())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        values[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return values


def _fake(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _shapes(args: Sequence[Any], given: Mapping[str, Any]) -> str:
    named = [("", each) for each in args] + [(f"{name}=", each) for name, each in given.items()]
    return ", ".join(
        f"{name}{each.dtype}{list(each.shape)}" if isinstance(each, Tensor) else f"{name}{each!r}"
        for name, each in named
    )


class _Watch:
    """Hooks on the blocks for one call."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.names: dict[int, str] = {}
        self.count = 0
        self.last: Tensor | None = None
        self.before: set[str | None] = set()
        self.shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.attention = _Attention()
        self._number = {id(block): number for number, block in enumerate(blocks)}
        self._hooks = [
            hook
            for block in blocks
            for hook in (
                block.register_forward_pre_hook(self._enter, with_kwargs=True),
                block.register_forward_hook(self._leave),
            )
        ]

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, block: nn.Module, args: Any, given: Any) -> Any:
        number = self._number[id(block)]
        if number != self.count:
            raise TrainerError(
                f"block {number} is called where block {self.count} is expected: a pipeline runs "
                "each block once, in the order of `blocks`; plan again with --pp 1"
            )
        hidden, others = _hidden_and_others(args, given)
        if self.last is not None and hidden is not self.last:
            raise TrainerError(
                f"between blocks {number - 1} and {number} the model changes the hidden states, "
                "and a stage hands on what a block returns: move that into the blocks, or plan "
                "again with --pp 1"
            )
        if any(each.requires_grad for each in others):
            raise TrainerError(
                f"block {number} takes more than the hidden states of what came before it, and a "
                "stage hands on one tensor: plan again with --pp 1"
            )
        if self.last is not None:
            return None
        self.before = set(_reached([hidden], self.names))
        cut = hidden.detach().requires_grad_(hidden.is_floating_point())
        return with_hidden(cut, args, given)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        if not isinstance(first, Tensor) or any(isinstance(each, Tensor) for each in others):
            raise TrainerError(
                f"block {self.count} returns {_kinds(output)}, and a stage hands on one tensor: "
                "return the hidden states alone, or plan again with --pp 1"
            )
        self.count += 1
        self.last = first.detach().requires_grad_(first.is_floating_point())
        self.shapes.append((tuple(first.shape), first.dtype))
        return (self.last, *others) if isinstance(output, tuple) else self.last

    def found(self, output: Any) -> Trace:
        if self.count != len(self._number):
            raise TrainerError(
                f"the model called {self.count} of its {len(self._number)} blocks: a pipeline runs "
                "all; plan again with --pp 1"
            )
        if len(set(self.shapes)) != 1:
            raise TrainerError(
                "the blocks return hidden states of several shapes or dtypes, and stages hand on "
                "tensors of one: plan again with --pp 1"
            )
        assert self.last is not None
        self.names[id(self.last)] = ""
        behind = set(_reached(list(tensors_of(output)), self.names))
        if None in behind:
            raise TrainerError(
                "behind its blocks the model uses what was computed before the last one, which "
                "another stage has: plan again with --pp 1"
            )
        ((shape, dtype),) = set(self.shapes)
        return Trace(
            before=frozenset(name for name in self.before if name),
            behind=frozenset(name for name in behind if name),
            hidden_shape=shape,
            hidden_dtype=dtype,
            attention=tuple(self.attention.leading),
        )


class _Attention(TorchFunctionMode):
    """Counts the sequences and heads of each attention that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.leading: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._count(args[0] if args else given["query"])
        elif getattr(func, "__name__", "") == "softmax":
            scores = args[0] if args else given.get("input")
            if isinstance(scores, Tensor) and scores.ndim > 2:
                rows, columns = scores.shape[-2:]
                if rows == columns > 1:
                    self._count(scores)
        return func(*args, **given)

    def _count(self, x: Tensor) -> None:
        self.leading.append(prod(x.shape[:-2]))


def _hidden_and_others(args: Any, given: Any) -> tuple[Tensor, list[Tensor]]:
    hidden = args[0] if args else given.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise TrainerError(
            "a block of the model is called without hidden states: pass them as its first "
            "argument, or as the one of that name"
        )
    rest = [args[1:], {name: each for name, each in given.items() if each is not hidden}]
    return hidden, list(tensors_of(rest))


def with_hidden(hidden: Tensor, args: Any, given: Any) -> tuple[Any, Any]:
    """The arguments of a block with other hidden states."""
    if args:
        return (hidden, *args[1:]), given
    return args, {**given, "hidden_states": hidden}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in what a module returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def _reached(outputs: Collection[Tensor], names: Mapping[int, str]) -> Iterator[str | None]:
    """Names of the leaves that `outputs` come from; None for one that has none."""
    nodes = [each.grad_fn for each in outputs if each.grad_fn is not None]
    for each in outputs:
        if each.grad_fn is None and each.requires_grad:
            yield names.get(id(each))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield names.get(id(leaf))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)


def _kinds(output: Any) -> str:
    each = output if isinstance(output, tuple) else (output,)
    return ", ".join(type(one).__name__ for one in each)
