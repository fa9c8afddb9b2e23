"""Around a loop of the user's own: what of a plan applies to their model, and their part of it."""

from __future__ import annotations

import atexit
import inspect
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..clip import clip_gradients
from ..config import PlanConfig
from ..errors import TrainerError
from ..model.buffers import restore_buffers
from ..model.weights import materialise as allocate
from ..parallel.data_parallel import Ends
from ..parallel.mesh import Meshes, batch_rank

_meshes_of: WeakKeyDictionary[nn.Module, Meshes] = WeakKeyDictionary()
"""The meshes of each model that `parallelize` returned, as long as it lives."""


def remember_meshes(model: nn.Module, meshes: Meshes) -> None:
    """Keep the meshes of a model for `clip_grad_norm`."""
    _meshes_of[model] = meshes


def settle_at_exit(device: torch.device) -> None:
    """Give gloo's threads time to let go of their last tensors before the interpreter ends, which
    they would abort otherwise (see `distributed.leave`)."""
    if device.type == "cpu":
        atexit.unregister(_pause)
        atexit.register(_pause)


def _pause() -> None:
    time.sleep(0.5)


def require_applicable(model: nn.Module, plan: PlanConfig) -> None:
    """Raise TrainerError naming what of the plan cannot be applied to a model that is not ours."""
    problems = list(_problems(plan))
    if problems:
        raise TrainerError(
            f"parallelize cannot apply {'; '.join(problems)} to {type(model).__name__}, which is "
            "not the reference decoder: plan again with these"
        )


def _problems(plan: PlanConfig) -> Iterator[str]:
    layout, vocab = plan.layout, plan.model.vocab
    if layout.pp > 1 and plan.training.precision == "fp16":
        yield f"pp {layout.pp} in fp16 (a schedule scales no loss; bf16 works)"
    if plan.training.precision_switch != "none":
        yield f"precision_switch {plan.training.precision_switch} (one precision works)"
    if plan.training.adapters is not None:
        yield "adapters (they go beside layers of the reference decoder; no --lora works)"
    if layout.ep > 1:
        yield f"ep {layout.ep} (it needs to know how tokens reach experts; --ep 1 works)"
    if layout.tp > 1 and plan.model.experts is not None:
        yield f"tp {layout.tp} with experts (no tp_plan here splits them; --tp 1 works)"
    if layout.tp > 1 and layout.sharding == "ddp" and layout.dp_replicate > 1 == layout.pp:
        yield f"tp {layout.tp} with ddp (--sharding fsdp works)"
    if plan.model.vocab_multiple > 1:
        multiple = plan.model.vocab_multiple
        yield f"vocab_multiple {multiple} (its tables are its own; 1 works)"
    elif vocab % layout.tp:
        yield f"tp {layout.tp} with a vocabulary of {vocab} (a divisor of it works)"


def found_ends(model: nn.Module, blocks: Sequence[nn.Module]) -> Ends:
    """The token table, and the final norm with the head, where FSDP may gather each by itself.

    A unit is gathered when its module is called, so the model's own code must call it, and read its
    weight in no other way; else, or where both are one parameter, they are left in the root.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    tables = [module for module in outside if isinstance(module, nn.Embedding)]
    table = max(tables, key=lambda each: each.weight.numel(), default=None)
    order = [id(module) for module in model.modules()]
    last_block = max((order.index(id(block)) for block in blocks), default=-1)
    behind = [module for module in outside if order.index(id(module)) > last_block]
    heads = [
        module
        for module in behind
        if isinstance(module, nn.Linear)
        and table is not None
        and module.out_features == table.num_embeddings
    ]
    if table is None or len(heads) != 1 or heads[0].weight is table.weight:
        return Ends()
    if not _is_only_called(model, table) or not _is_only_called(model, heads[0]):
        return Ends()
    norms = [
        module
        for module in behind
        if "norm" in type(module).__name__.lower()
        and list(module.parameters(recurse=False))
        and _is_only_called(model, module)
    ]
    return Ends(tables=[table], head=[*norms[-1:], heads[0]])


def _is_only_called(model: nn.Module, module: nn.Module) -> bool:
    """Whether the code of the modules around `module` calls it, and has no word of its weight."""
    path = next(name for name, each in model.named_modules() if each is module)
    *around, name = path.split(".")
    owners = [model.get_submodule(".".join(around[:depth])) for depth in range(len(around) + 1)]
    code = "".join(_code(owner) for owner in owners)
    reads = re.search(rf"\b{re.escape(name)}\.weight\b", code)
    return bool(re.search(rf"\b{re.escape(name)}\(", code)) and not reads


_BESIDE_FORWARD = re.compile("init|tie|resize|load|save")
"""Names of methods that run before training or after it."""


def _code(owner: nn.Module) -> str:
    """Source text of what a module runs in its forward pass, as far as its class has it."""
    methods = {**vars(type(owner)), "forward": owner.forward}
    found = []
    for name, method in methods.items():
        if not _BESIDE_FORWARD.search(name) and inspect.isroutine(method):
            try:
                found.append(inspect.getsource(inspect.unwrap(method)))
            except (OSError, TypeError):
                continue
    return "".join(found)


def sampler_arguments(plan: PlanConfig) -> dict[str, int]:
    """`num_replicas` and `rank` for a DistributedSampler: ranks that share a sequence or a matrix
    get the same sequences, so neither is that of the process group."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return {
        "num_replicas": plan.layout.data_parallel,
        "rank": batch_rank(plan.layout, rank),
    }


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of what `parallelize` returned down to `max_norm` in all; returns their
    norm before. It is right where parameters are on several meshes; all ranks call this."""
    meshes = _meshes_of.get(model)
    if meshes is None:
        raise TrainerError(
            "clip_grad_norm takes what parallelize returned, and this is not it: give it that model"
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    copied = getattr(model, "copied_names", ())
    return clip_gradients(inner, meshes, max_norm, counted_elsewhere=copied)


def materialise(
    model: nn.Module, device: torch.device, *, buffers: Mapping[str, Tensor] | None = None
) -> None:
    """Give a model on the meta device memory: parameters without values yet, and buffers with.

    Buffers that checkpoints do not hold, rotary frequencies say, are computed again; `buffers`
    gives those, by name, that cannot be.
    """
    values = {name: each for name, each in model.named_buffers() if not each.is_meta}
    missing = {name for name, each in model.named_buffers() if each.is_meta}
    allocate(model, device)
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])
    restore_buffers(model, missing, given=buffers or {})
