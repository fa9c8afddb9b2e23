"""From a user's own model and a plan to a distributed model.

plan = load_plan()
model = parallelize(model, plan)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..config import PlanConfig
from ..errors import TrainerError
from ..precision import apply_autocast, keep_parameters
from ..user.context_parallel import share_sequences
from ..user.loss import named_head, put_head_off, watch_own_loss
from ..user.mistakes import (
    require_bare,
    require_blocks,
    require_islands,
    require_same_model,
    warn_of_rules,
    watch_optimizers,
)
from ..user.model import found_ends, remember_meshes, require_applicable, settle_at_exit
from ..user.pipeline import UserPipeline
from ..user.stages import Cut, Stage, cut_model, stages_of
from ..user.targets import ExactCount, watch_targets
from ..user.tensor_parallel import gather_after, split_styles, split_user_model, sum_at_once
from ..user.trace import Inputs, Trace, traced
from .data_parallel import Ends, apply_ddp, equalise_replicas, move_to, require_values
from .distributed import start
from .layout_steps import Part, Steps, lay_out, skip
from .mesh import Meshes, build_meshes
from .support import require_runnable


def parallelize(
    model: nn.Module,
    plan: PlanConfig,
    *,
    blocks: Sequence[nn.Module] | None = None,
    head: nn.Module | None = None,
    tp_plan: Mapping[str, str] | None = None,
    example: Inputs | None = None,
    ends: bool = True,
    numbers: bool | None = None,
) -> nn.Module:
    """Apply the plan's layout to `model` and return what to call in its place.

    FSDP changes `model` in place and returns it (a model on the meta device stays there:
    `materialise` it afterwards); DDP returns a wrapper; a pipeline returns what this rank has of
    the model, for `forward_backward`. The process group is joined if there is none.

    `blocks` are the repeated layers; by default `find_blocks` finds them. `head` makes the logits
    (default: `model.lm_head`), which a loss in pieces puts off into `token_loss`. `tp_plan` says
    how tensor parallelism splits each matrix, by patterns (default: the model's own). `example`:
    what the forward takes, for one micro-batch (default: tokens alone). `ends`: embedding and head
    are units of FSDP where that is safe (`found_ends`); False: of the root. `numbers`: before, a
    tiny reference model steps in the same layout, and PreflightFailed is raised where it does not
    as one process does; None: once for each plan, unless FSDPPLAN_NUMBERS is 0.
    """
    require_runnable(plan)
    require_bare(model)
    blocks = find_blocks(model) if blocks is None else list(blocks)
    require_blocks(model, blocks)
    require_applicable(model, plan)
    require_islands(plan)
    warn_of_rules(plan)
    layout = plan.layout
    whole = Whole(
        model=model,
        blocks=blocks,
        head=named_head(model, head) if layout.loss_chunks > 1 else None,
        styles=split_styles(model, blocks, plan, tp_plan, example) if layout.tp > 1 else {},
        ends=found_ends(model, blocks) if ends else Ends(),
    )
    stop_generation_cache(model)
    trace = traced(model, blocks, plan, example) if layout.pp > 1 else None
    cut = None if trace is None else cut_model(model, blocks, trace, plan)
    device = start(plan)
    settle_at_exit(device)
    require_same_model(model, device)
    replaced = watch_optimizers(model)
    meshes = try_numbers(plan, numbers) or build_meshes(layout, device.type)
    keep_parameters(model, plan.training)
    watch_own_loss(model)
    count = ExactCount()
    model.register_forward_pre_hook(count.put_back, with_kwargs=True)
    if meshes.cp is not None:
        share_sequences(model, layout, meshes.cp)
    if cut is None or trace is None:
        part = Part(
            model=model, blocks=blocks, plan=plan, meshes=meshes, device=device, ends=whole.ends
        )
        steps = user_steps(whole, blocks[0], blocks[-1])
        lay_out(part, steps)
        called = steps.replicas(part)
        model.register_forward_pre_hook(count.leave_out, with_kwargs=True, prepend=True)
    else:
        called = _in_stages(whole, cut, trace, plan, meshes, device)
    remember_meshes(called, meshes)
    watch_targets(called, device)
    replaced(model)
    return called


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What is known of the whole of a user's model."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    head: nn.Linear | None
    """What the loss puts off; None: nothing."""
    styles: Mapping[str, str]
    """Path of each module that tensor parallelism splits -> how."""
    ends: Ends


def _in_stages(
    whole: Whole, cut: Cut, trace: Trace, plan: PlanConfig, meshes: Meshes, device: torch.device
) -> UserPipeline:
    """This rank's stages, each laid out as a model of its own."""
    assert meshes.pp is not None
    stages = stages_of(cut, plan, pp_rank=meshes.pp.get_local_rank(), device=device)
    for stage in stages:
        inside = {id(module) for module in stage.module.modules()}
        head = stage.head(whole.head)
        part = Part(
            model=stage.module,
            blocks=stage.blocks,
            plan=plan,
            meshes=meshes,
            device=device,
            ends=Ends(
                tables=[each for each in whole.ends.tables if id(each) in inside],
                head=[each for each in whole.ends.head if id(each) in inside],
            ),
        )
        steps = user_steps(replace(whole, head=head), stage.first_block, stage.last_block, stage)
        lay_out(part, steps)
        steps.replicas(part)
    return UserPipeline(cut, trace, stages, plan, meshes, device)


def user_steps(
    whole: Whole, first_block: nn.Module, last_block: nn.Module, stage: Stage | None = None
) -> Steps:
    """What is done to a model by its own words, or to one `stage` of it; ep is refused.

    Sequences are shared before: that is done to the whole model.
    """
    is_first, is_last = (
        (True, True) if stage is None else (stage.share.is_first, stage.share.is_last)
    )

    def split_tensors(part: Part) -> None:
        if part.meshes.tp is not None:
            split_user_model(
                part.model,
                part.blocks,
                part.plan.layout,
                part.meshes.tp,
                whole.styles,
                put_off=whole.head,
                first_block=first_block if is_first else None,
            )

    def put_off(part: Part) -> None:
        if whole.head is not None:
            put_head_off(part.model, whole.head, part.plan, part.device)

    def end(part: Part) -> None:
        if part.meshes.tp is not None and is_last:
            gather_after(last_block, part.meshes.tp)
        if stage is not None:
            stage.end()

    return Steps(
        tensors=split_tensors,
        sequences=skip,
        head=put_off,
        sequence_end=end,
        replicas=_same_replicas if stage is None else _same_stages,
    )


def _same_replicas(part: Part) -> nn.Module:
    if part.plan.layout.sharding == "ddp" and part.meshes.tp is not None:
        sum_at_once(_same_stages(part))
        return part.model
    if part.plan.layout.sharding == "ddp":
        return apply_ddp(part.model, part.plan, part.device, part.meshes)
    equalise_replicas(part.model, part.meshes)
    return part.model


def _same_stages(part: Part) -> nn.Module:
    """The pipeline averages the gradients of copies itself."""
    if part.plan.layout.sharding == "ddp":
        require_values(part.model)
        move_to(part.model, part.device)
        apply_autocast(part.model, part.plan, part.device)
    equalise_replicas(part.model, part.meshes)
    return part.model


def try_numbers(plan: PlanConfig, wanted: bool | None) -> Meshes | None:
    """The tiny step on this plan's mesh, and the meshes that were made for it."""
    from ..preflight.program import preflight_of_program  # which assembles a model by what is here

    return preflight_of_program(plan, wanted)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: of all lists and dicts of modules of one class, the one with most
    parameters (the outermost, where one holds another)."""
    best: list[nn.Module] = []
    most = 0
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        children = list(container.children())
        elements = sum(parameter.numel() for parameter in container.parameters())
        if len({type(child) for child in children}) == 1 and elements > most:
            best, most = children, elements
    if not best:
        raise TrainerError(
            "no repeated blocks found in an nn.ModuleList or nn.ModuleDict of modules of one "
            "class: name them to parallelize(..., blocks=[...])"
        )
    return best


def stop_generation_cache(model: nn.Module) -> None:
    """Turn off the key/value cache of Hugging Face models: it is for generation, and recomputing
    a block would fill it twice."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
