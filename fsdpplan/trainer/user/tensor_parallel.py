"""Tensor parallelism of a model that is not ours, by the `tp_plan` that it carries.

Models of Hugging Face say of each matrix whether it is split by columns or by rows. Here these
words become torch's styles over our mesh, so that FSDP2 can split what is left. Between the
networks of a block the sequence is split (arXiv 2205.05198), from the first block's input to the
last one's output: what a model does before and after, masks and positions, sees all of it.

Source of the words: transformers 5.23, `distributed/tensor_parallel.py`, whose styles of the same
names these are, but for the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ..config import LayoutConfig
from ..errors import TrainerError
from ..private_torch import overlap_tensor_parallel

COLUMNS = "colwise"
ROWS = "rowwise"
HEADS_NORM = "replicated_with_grad_allreduce"
GATHERED = ("colwise_gather_output", "colwise_rep")
EMBEDDING = ("embedding_rowwise", "vocab_rowwise")
_for_good = ExitStack()
"""Holds `loss_parallel`: the loss and its backward are in the user's loop, and only DTensors that
are split over the vocabulary notice."""
KNOWN = (COLUMNS, ROWS, HEADS_NORM, *GATHERED, *EMBEDDING)


def split_user_model(
    model: nn.Module, blocks: Sequence[nn.Module], layout: LayoutConfig, mesh: DeviceMesh
) -> None:
    """Split the matrices of `model` over `mesh` by its own plan."""
    styles = planned_styles(model, mesh.size())
    if layout.async_tp and mesh.device_type == "cuda":
        overlap_tensor_parallel(mesh.get_group())
    ties = tied_names(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside: set[str] = set()
    for block in blocks:
        path = names[id(block)]
        inside |= {name for name, _ in block.named_modules(prefix=path)}
        _split_block(block, path, styles, mesh)
    for path, style in styles.items():
        if path not in inside:
            parallelize_module(model.get_submodule(path), mesh, _end_style(style, layout))
    for name, module in model.named_modules():
        if name not in inside and name not in styles and list(module.parameters(recurse=False)):
            parallelize_module(module, mesh, Whole())
    blocks[0].register_forward_pre_hook(_Scatter(mesh), with_kwargs=True)
    for name, first in ties.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    if layout.loss_parallel:
        _for_good.enter_context(loss_parallel())


def gather_after(block: nn.Module, mesh: DeviceMesh) -> None:
    """Make the sequence whole after the last block.

    To be called when FSDP has put its hooks on the block: it must not be given a view.
    """
    block.register_forward_hook(_Gather(mesh))


def planned_styles(model: nn.Module, ranks: int) -> dict[str, str]:
    """Path of each module that the model's plan names -> how it is split; raises where it has no
    plan, or one that we cannot follow."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    kind = type(model).__name__
    if not plan:
        raise TrainerError(
            f"{kind} has no tp_plan that says how its matrices are split: plan again with --tp 1"
        )
    unknown = sorted({style for style in plan.values() if style not in KNOWN})
    if unknown:
        raise TrainerError(
            f"the tp_plan of {kind} splits by {', '.join(unknown)}, and parallelize knows "
            f"{', '.join(KNOWN[:4])} and {EMBEDDING[0]}: plan again with --tp 1"
        )
    heads = getattr(getattr(model, "config", None), "num_key_value_heads", None)
    if heads is not None and heads % ranks:
        raise TrainerError(
            f"tp {ranks} cannot split {heads} key/value heads: plan --tp with a divisor of them"
        )
    modules = dict(model.named_modules())
    styles = {
        path: style for pattern, style in plan.items() for path in _matching(pattern, modules)
    }
    for path, style in styles.items():
        _require_divisible(path, modules[path], style, ranks)
    return styles


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    exact = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return (path for path in modules if exact.fullmatch(path))


def _require_divisible(path: str, module: nn.Module, style: str, ranks: int) -> None:
    if style == HEADS_NORM:
        return
    weight = module.get_parameter("weight")
    width = weight.shape[1 if style == ROWS else 0]
    if width % ranks:
        raise TrainerError(
            f"tp {ranks} cannot split {path}, of width {width}, evenly: plan --tp with a divisor"
        )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that have several -> the first."""
    first_of: dict[nn.Parameter, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_of.setdefault(parameter, name)
        if first != name:
            ties[name] = first
    return ties


def _split_block(block: nn.Module, path: str, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """A block's networks gather the sequence at their input and scatter it at their output; what
    is beside them, norms, works on the rank's part of it."""
    for name, child in block.named_children():
        planned = {each[len(path) + 1 :] for each in styles if each.startswith(f"{path}.{name}.")}
        if not planned:
            for norm in [m for m in child.modules() if list(m.parameters(recurse=False))]:
                parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))
            continue
        _require_all_planned(child, f"{path}.{name}", styles)
        child.register_forward_pre_hook(_GatherInput(mesh), with_kwargs=True)
        for each in planned:
            style = styles[f"{path}.{each}"]
            parallelize_module(block.get_submodule(each), mesh, _inner_style(style))


def _require_all_planned(network: nn.Module, path: str, styles: Mapping[str, str]) -> None:
    for name, module in network.named_modules(prefix=path):
        if name not in styles and list(module.parameters(recurse=False)):
            raise TrainerError(
                f"the model's tp_plan splits parts of {path} but does not say how {name} is split: "
                "plan again with --tp 1"
            )


def _inner_style(style: str) -> ParallelStyle:
    if style == ROWS:
        return RowwiseParallel(output_layouts=Shard(1))
    if style == HEADS_NORM:
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    return ColwiseParallel()


def _end_style(style: str, layout: LayoutConfig) -> ParallelStyle:
    """Of what is before and after the blocks, where all ranks have the whole sequence."""
    if style in EMBEDDING:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if style in GATHERED:
        split = layout.loss_parallel
        return ColwiseParallel(
            output_layouts=Shard(-1) if split else Replicate(), use_local_output=not split
        )
    return _inner_style(style)


class Whole(ParallelStyle):
    """A module that every rank computes alike; its parameters are on the mesh like all others, or
    optimizers could not step them together."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_distributed(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(each, mesh, (Replicate(),), run_check=False)
                if isinstance(each, Tensor) and not isinstance(each, DTensor)
                else each
                for each in inputs
            )

        def as_tensor(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(
            module,
            device_mesh,
            input_fn=as_distributed,
            output_fn=as_tensor,
        )


class _Hook:
    """Changes how the hidden states, a module's first argument, are laid out."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def moved(self, x: Tensor, source: Placement, target: Placement) -> DTensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, (source,), run_check=False)
        return x.redistribute(placements=(target,))


class _Scatter(_Hook):
    """Before the first block: each rank takes its part of the sequence."""

    def __call__(self, _: nn.Module, args: Any, given: Any) -> Any:
        def own_part(x: Tensor) -> Tensor:
            if x.shape[1] % self.mesh.size():
                raise TrainerError(
                    f"a sequence of {x.shape[1]} tokens cannot be split over tp "
                    f"{self.mesh.size()}: pad it to a multiple"
                )
            return self.moved(x, Replicate(), Shard(1)).to_local()

        return on_hidden_states(own_part, args, given)


class _GatherInput(_Hook):
    """Before a network: once for all its projections."""

    def __call__(self, _: nn.Module, args: Any, given: Any) -> Any:
        return on_hidden_states(lambda x: self.moved(x, Shard(1), Replicate()), args, given)


class _Gather(_Hook):
    """After the last block."""

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self(_, __, output[0]), *output[1:])
        return self.moved(output, Shard(1), Replicate()).to_local()


def on_hidden_states(change: Any, args: Any, given: Any) -> tuple[Any, Any]:
    """The arguments of a call with `change` applied to the hidden states: the first argument by
    position or, where there is none, the one of that name."""
    if args:
        return (change(args[0]), *args[1:]), given
    if "hidden_states" not in given:
        raise TrainerError(
            "a layer of the model is called without hidden_states, so its sequence cannot be "
            "split: plan again with --tp 1"
        )
    return args, {**given, "hidden_states": change(given["hidden_states"])}
