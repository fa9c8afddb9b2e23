"""From a user's own model and a plan to a distributed model.

plan = load_plan()
model = parallelize(model, plan)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..config import PlanConfig
from ..errors import TrainerError
from ..precision import keep_parameters
from ..user.context_parallel import share_sequences
from ..user.mistakes import (
    require_bare,
    require_blocks,
    require_islands,
    require_same_model,
    warn_of_rounding,
    watch_optimizers,
)
from ..user.model import found_ends, remember_meshes, require_applicable, settle_at_exit
from ..user.tensor_parallel import gather_after, split_user_model
from .data_parallel import Ends, apply_ddp, equalise_replicas
from .distributed import start
from .layout_steps import Part, Steps, lay_out
from .mesh import Meshes, build_meshes
from .support import require_runnable


def parallelize(
    model: nn.Module,
    plan: PlanConfig,
    *,
    blocks: Sequence[nn.Module] | None = None,
    ends: bool = True,
    numbers: bool | None = None,
) -> nn.Module:
    """Apply the plan's layout to `model` and return what to call in its place.

    FSDP changes `model` in place and returns it (a model on the meta device stays there:
    `materialise` it afterwards); DDP returns a wrapper. The process group is joined if there is
    none. `blocks` are the repeated layers; by default `find_blocks` finds them. `ends`: embedding
    and head are units of FSDP where that is safe (`found_ends`); False: of the root. `numbers`:
    before, a tiny reference model steps in the same layout, and PreflightFailed is raised where it
    does not as one process does; None: once for each plan, unless FSDPPLAN_NUMBERS is 0.
    """
    require_runnable(plan)
    require_bare(model)
    blocks = find_blocks(model) if blocks is None else list(blocks)
    require_blocks(model, blocks)
    require_applicable(model, plan)
    require_islands(plan)
    warn_of_rounding(plan)
    device = start(plan)
    settle_at_exit(device)
    require_same_model(model, device)
    replaced = watch_optimizers(model)
    stop_generation_cache(model)
    meshes = try_numbers(plan, numbers) or build_meshes(plan.layout, device.type)
    keep_parameters(model, plan.training)
    part = Part(
        model=model,
        blocks=blocks,
        plan=plan,
        meshes=meshes,
        device=device,
        ends=found_ends(model, blocks) if ends else Ends(),
    )
    lay_out(part, USER_STEPS)
    called = USER_STEPS.replicas(part)
    remember_meshes(called, meshes)
    replaced(model)
    return called


def _split_tensors(part: Part) -> None:
    if part.meshes.tp is not None:
        split_user_model(part.model, part.blocks, part.plan.layout, part.meshes.tp)


def _share_sequences(part: Part) -> None:
    if part.meshes.cp is not None:
        share_sequences(part.model, part.plan.layout, part.meshes.cp)


def _gather_at_the_end(part: Part) -> None:
    if part.meshes.tp is not None:
        gather_after(part.blocks[-1], part.meshes.tp)


def _same_replicas(part: Part) -> nn.Module:
    if part.plan.layout.sharding == "ddp":
        return apply_ddp(part.model, part.plan, part.device, part.meshes)
    equalise_replicas(part.model, part.meshes)
    return part.model


USER_STEPS = Steps(
    tensors=_split_tensors,
    sequences=_share_sequences,
    sequence_end=_gather_at_the_end,
    replicas=_same_replicas,
)
"""Of a model by its own tp_plan and its own attention; ep is refused."""


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
