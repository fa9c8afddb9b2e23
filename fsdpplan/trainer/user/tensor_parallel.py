"""Tensor parallelism of a model that is not ours, by the `tp_plan` that it carries.

Models of Hugging Face say of each matrix whether it is split by columns or by rows. Here these
words become torch's styles over our mesh, so that FSDP2 can split what is left. Between the
networks of a block the sequence is split (arXiv 2205.05198), from the first block's input to the
last one's output: what a model does before and after, masks and positions, sees all of it.

Source of the words: transformers 5.23, `distributed/tensor_parallel.py`, whose styles of the same
names these are, but for the sequence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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

from ..config import LayoutConfig, PlanConfig
from ..errors import TrainerError
from ..parallel.tensor_parallel import overlap, split_parameter
from ..torch_versions import tell_masks_apart
from .trace import Inputs, NotCallable, traced

COLUMNS = "colwise"
ROWS = "rowwise"
HEADS_NORM = "replicated_with_grad_allreduce"
GATHERED = ("colwise_gather_output", "colwise_rep")
EMBEDDING = ("embedding_rowwise", "vocab_rowwise", "rowwise_rep")
TOKENWISE = ("sequence_parallel", "replicate")
_for_good = ExitStack()
"""Holds `loss_parallel`: the loss and its backward are in the user's loop, and only DTensors that
are split over the vocabulary notice."""
KNOWN = (COLUMNS, ROWS, HEADS_NORM, *GATHERED, *EMBEDDING, *TOKENWISE)


def split_user_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    layout: LayoutConfig,
    mesh: DeviceMesh,
    styles: Mapping[str, str],
    *,
    put_off: nn.Module | None = None,
    first_block: nn.Module | None = None,
) -> None:
    """Split the matrices of `model`, or of a stage of it, over `mesh` by `styles`. `put_off`: a
    head that is not called; `first_block`: before which the sequence is scattered, if it is here.
    """
    if layout.async_tp and mesh.device_type == "cuda":
        overlap(mesh)
    tell_masks_apart()
    ties = tied_names(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside: set[str] = set()
    for block in blocks:
        path = names[id(block)]
        inside |= {name for name, _ in block.named_modules(prefix=path)}
        _split_block(block, path, styles, mesh)
    for name, module in model.named_modules():
        if name in inside or not list(module.parameters(recurse=False)):
            continue
        if put_off is not None and module is put_off:
            parallelize_module(module, mesh, _PutOff())
        elif name in styles:
            parallelize_module(module, mesh, _end_style(styles[name], layout))
        else:
            parallelize_module(module, mesh, Whole())
    if first_block is not None:
        first_block.register_forward_pre_hook(_Scatter(mesh), with_kwargs=True)
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


def sum_at_once(model: nn.Module) -> None:
    """Sum each gradient over the ranks of tp as soon as it is there, where neither FSDP nor a
    pipeline does so: of a norm each rank has what comes of its part of the sequence."""

    def settle(parameter: Tensor) -> None:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(settle)  # type: ignore[no-untyped-call]


def split_styles(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: PlanConfig,
    given: Mapping[str, str] | None,
    example: Inputs | None,
) -> dict[str, str]:
    """How each matrix is split: by the user's plan, which is tried, or by the model's own."""
    ranks = plan.layout.tp
    styles = planned_styles(model, ranks, given)
    _require_modules(model, blocks)
    if given is not None:
        _require_words_for_blocks(model, blocks, styles)
        _require_heads(model, blocks, plan, styles, example)
    return styles


def planned_styles(
    model: nn.Module, ranks: int, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Path of each module that the plan names, the `given` one or the model's own -> how it is
    split; raises where there is none, or one that we cannot follow."""
    plan: Mapping[str, str] = given or getattr(model, "_tp_plan", None) or {}
    kind = type(model).__name__
    whose = f"the tp_plan of {kind}" if given is None else "the tp_plan given"
    if not plan:
        raise TrainerError(
            f"{kind} has no tp_plan that says how its matrices are split: give "
            'parallelize(..., tp_plan={"layers.*.attention.wq": "colwise", ...}), or plan again '
            "with --tp 1"
        )
    unknown = sorted({style for style in plan.values() if style not in KNOWN})
    if unknown:
        raise TrainerError(
            f"{whose} splits by {', '.join(unknown)}, and parallelize knows "
            f"{', '.join(KNOWN[:4])}, {EMBEDDING[0]} and {TOKENWISE[0]}: plan again with --tp 1"
        )
    heads = getattr(getattr(model, "config", None), "num_key_value_heads", None)
    if heads is not None and heads % ranks:
        raise TrainerError(
            f"tp {ranks} cannot split {heads} key/value heads: plan --tp with a divisor of them"
        )
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        # the plan of a config is that of the model inside
        around = getattr(model, "base_model_prefix", "")
        found = list(_matching(pattern, modules)) or (
            list(_matching(f"{around}.{pattern}", modules)) if around else []
        )
        if not found and given is not None:
            raise TrainerError(
                f"{pattern!r} of the tp_plan given names no module of {kind}"
                f"{_nearest(pattern, modules)}"
            )
        styles |= dict.fromkeys(found, style)
    for path, style in styles.items():
        _require_divisible(path, modules[path], style, ranks)
    return styles


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    exact = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return (path for path in modules if exact.fullmatch(path))


def _nearest(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    shapes = {re.sub(r"\b\d+\b", "*", path) for path in modules}
    near = difflib.get_close_matches(pattern, shapes, n=2, cutoff=0.5)
    return f": name one of {', '.join(near)}" if near else ": use names of named_modules()"


def _require_divisible(path: str, module: nn.Module, style: str, ranks: int) -> None:
    if style == HEADS_NORM or style in TOKENWISE:
        return
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | nn.Embedding) or not isinstance(weight, nn.Parameter):
        raise TrainerError(
            f"the tp_plan splits {path} by {style}, and it is a {type(module).__name__}: linear "
            "layers and embeddings can be split; plan again with --tp 1"
        )
    width = weight.shape[1 if style == ROWS else 0]
    if width % ranks:
        raise TrainerError(
            f"tp {ranks} cannot split {path}, of width {width}, evenly: plan --tp with a divisor"
        )


def _require_modules(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise where a module around others has a parameter itself: it is used where no module is
    called, so that nothing can hand it a DTensor."""
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    for path, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        around = any(list(child.parameters()) for child in module.children())
        if id(module) not in inside and own and around:
            raise TrainerError(
                f"{f'{path}.{own[0]}'.removeprefix('.')} is a parameter of a module around others, "
                "which tensor parallelism cannot give them: put it into a module of its own, or "
                "plan again with --tp 1"
            )


def _require_words_for_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, str]
) -> None:
    """Raise where a block holds what the plan given says nothing of. Between its networks a rank
    has a part of each sequence, with which norms can do, and attention cannot."""
    paths = {id(module): path for path, module in model.named_modules()}
    for block in blocks:
        path = paths[id(block)]
        for name, child in block.named_children():
            inside = f"{path}.{name}"
            is_planned = any(each == inside or each.startswith(f"{inside}.") for each in styles)
            if is_planned and inside not in styles:
                _require_all_planned(child, inside, styles)
            is_norm = "norm" in type(child).__name__.lower()
            if not is_planned and not is_norm and list(child.parameters()):
                raise TrainerError(
                    f"the tp_plan given says nothing of {inside}: say how its matrices are split, "
                    f'or "{TOKENWISE[0]}" if it computes each token by itself'
                )


def _require_heads(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: PlanConfig,
    styles: Mapping[str, str],
    example: Inputs | None,
) -> None:
    """Raise where the model does not compute with its own part of the heads when its projections
    are narrower: called in fake tensors, once whole and once as a rank has it."""
    ranks, alone = plan.layout.tp, replace(plan, layout=replace(plan.layout, pp=1))
    whole = traced(model, blocks, alone, example)
    try:
        split = traced(
            model, blocks, alone, example, widths=_local_widths(model, blocks, styles, ranks)
        )
    except NotCallable as error:
        raise TrainerError(
            f"with the part of its matrices that a rank of tp {ranks} has, {type(model).__name__} "
            f"fails ({error.__cause__}): {_ADJUST}"
        ) from error
    for number, (all_heads, own) in enumerate(zip(whole.attention, split.attention, strict=True)):
        if own * ranks != all_heads:
            raise TrainerError(
                f"with the part of its projections that a rank of tp {ranks} has, attention "
                f"{number} of {type(model).__name__} computes {own} of {all_heads} sequences x "
                f"heads, and not {all_heads // ranks}: {_ADJUST}"
            )


_ADJUST = (
    "its attention must take the number of heads from the width that it is given, as in "
    "`q.view(B, T, -1, head_dim)`; or plan again with --tp 1"
)


def _local_widths(
    model: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, str], ranks: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the split parameters inside of the blocks, on one rank."""
    inside = {id(module) for block in blocks for module in block.modules()}
    widths = {}
    for path, style in styles.items():
        module = model.get_submodule(path)
        if id(module) not in inside or style not in (COLUMNS, ROWS):
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            shape = list(parameter.shape)
            if style == COLUMNS:
                shape[0] //= ranks
            elif len(shape) > 1:
                shape[1] //= ranks
            widths[name] = tuple(shape)
    return widths


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
        if f"{path}.{name}" in styles:
            style = styles[f"{path}.{name}"]
            parallelize_module(child, mesh, _direct_style(style))
            continue
        # in the same order on all ranks, which scatter each
        planned = [each[len(path) + 1 :] for each in styles if each.startswith(f"{path}.{name}.")]
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
                f"the tp_plan splits parts of {path} but does not say how {name} is split: "
                "plan again with --tp 1"
            )


def _direct_style(style: str) -> ParallelStyle:
    """Of a matrix that stands in the block itself, outside of any network of it."""
    if style == COLUMNS:
        return ColwiseParallel(input_layouts=Shard(1))
    return _inner_style(style)


def _inner_style(style: str) -> ParallelStyle:
    if style in TOKENWISE:
        return SequenceParallel(use_local_output=True)
    if style == ROWS:
        return RowwiseParallel(output_layouts=Shard(1))
    if style == HEADS_NORM:
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    return ColwiseParallel()


def _end_style(style: str, layout: LayoutConfig) -> ParallelStyle:
    """Of what is before and after the blocks, where all ranks have the whole sequence."""
    if style in TOKENWISE:
        return Whole()
    if style in EMBEDDING:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if style in GATHERED:
        split = layout.loss_parallel
        return ColwiseParallel(
            output_layouts=Shard(-1) if split else Replicate(), use_local_output=not split
        )
    return _inner_style(style)


class _PutOff(ParallelStyle):
    """A head that is not called: the loss takes its rows of the weight."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            split_parameter(module, name, device_mesh)
        return module


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
