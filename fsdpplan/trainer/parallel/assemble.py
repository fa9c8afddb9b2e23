"""From a plan to the reference model on this rank: built, cut, split, sharded, initialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import PlanConfig
from ..model.adapters import adapt
from ..model.decoder import Decoder
from ..model.loss import defer_head
from ..model.positions import at_length
from ..model.weights import initialise, materialise
from ..precision import apply_autocast, compute_dtype, keep_parameters
from ..scaler import LossScaler
from .context_parallel import apply_context_parallel
from .data_parallel import Ends, apply_ddp
from .distributed import start
from .expert_parallel import apply_expert_parallel
from .layout_steps import Part, Steps, lay_out
from .mesh import Meshes, build_meshes
from .pipeline import Pipeline
from .pipeline_stages import RankModel, rank_shares
from .support import require_runnable
from .tensor_parallel import apply_tensor_parallel, mask_padding
from .tied_tables import copied_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A model that is ready to train."""

    model: nn.Module
    """All parameters of this rank, under their names in the whole model."""
    parts: tuple[nn.Module, ...]
    """What is called: the model, its DDP wrapper, or the pipeline stages of this rank."""
    meshes: Meshes
    pipeline: Pipeline | None
    """What runs the parts; None without pipeline parallelism."""
    scaler: LossScaler | None
    """Keeps fp16 gradients in range; None with other number formats."""


def assemble(
    plan: PlanConfig,
    device: torch.device,
    *,
    seed: int,
    meshes: Meshes | None = None,
    fill: Callable[[nn.Module], None] | None = None,
) -> Assembled:
    """The reference decoder in the plan's layout, with values by `fill`, else drawn; joins the
    process group if there is none. Process groups cost memory, so meshes that there are already
    are taken."""
    require_runnable(plan)
    start(plan)
    meshes = meshes or build_meshes(plan.layout, device.type)
    model, parts = build_parts(plan, meshes, device)
    return finish(plan, device, meshes, model, parts, seed=seed, fill=fill)


def build_parts(
    plan: PlanConfig, meshes: Meshes, device: torch.device
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """(the model, its parts) on the meta device: split, wrapped, and sharded where FSDP does it.

    This and `assemble` apart: meshes and DTensors are made outside of a fake mode, values inside.
    """
    with torch.device("meta"):
        parts = _build_stages(plan, meshes.pp) if meshes.pp else (_build(plan),)
    for part in parts:
        lay_out(_part(part, plan, meshes, device), REFERENCE_STEPS)
    return parts[0] if len(parts) == 1 else RankModel(parts), parts


def _build(plan: PlanConfig, **part: Any) -> Decoder:
    """The decoder, or a `part` of it, its vocabulary padded to what tensor parallelism splits."""
    rows, dropout = plan.model.vocab_rows(plan.layout.tp), plan.training.dropout
    latent, width = plan.model.latent, plan.model.head_dim
    # ranks may share a sequence, and each see a part of it alone
    config = at_length(plan.model, plan.training.seq_len, latent.rope_head_dim if latent else width)
    model = Decoder(config, vocab_rows=rows, dropout=dropout, **part)
    keep_parameters(model, plan.training)
    return model


def _build_stages(plan: PlanConfig, pp: DeviceMesh) -> tuple[Decoder, ...]:
    """The parts of the decoder that are this rank's."""
    return tuple(
        _build(plan, blocks=share.blocks, has_embedding=share.is_first, has_head=share.is_last)
        for share in rank_shares(plan, pp_rank=pp.get_local_rank())
    )


def _part(model: nn.Module, plan: PlanConfig, meshes: Meshes, device: torch.device) -> Part:
    assert isinstance(model, Decoder)
    return Part(
        model=model,
        blocks=list(model.layers.values()),
        plan=plan,
        meshes=meshes,
        device=device,
        ends=_ends(model),
    )


def _ends(model: Decoder) -> Ends:
    """Of a table that is the head's weight, too, there are none: one unit holds it."""
    tables = [each for each in (model.tok_embeddings, model.pos_embeddings) if each is not None]
    head = [each for each in (model.norm, model.output) if each is not None]
    if tables and head and model.config.tied_embeddings:
        return Ends()
    return Ends(tables=tables, head=head)


def _split_tensors(part: Part) -> None:
    if part.meshes.tp is not None:
        apply_tensor_parallel(part.model, part.plan, part.meshes.tp)


def _split_experts(part: Part) -> None:
    meshes = part.meshes
    if meshes.experts is not None or (part.plan.model.experts and meshes.tp is not None):
        apply_expert_parallel(part.model, meshes)


def _put_adapters(part: Part) -> None:
    training = part.plan.training
    if training.adapters is not None:
        with torch.device("meta"):
            adapt(part.model, part.blocks, part.plan.model, training.adapters)


def _share_sequences(part: Part) -> None:
    if part.meshes.cp is not None:
        apply_context_parallel(part.model, part.plan, part.meshes.cp)


def _end_head(part: Part) -> None:
    if part.plan.layout.loss_chunks > 1:
        defer_head(part.model)
    elif isinstance(head := getattr(part.model, "output", None), nn.Module):
        mask_padding(head, vocab=part.plan.model.vocab)


def _replicas(part: Part) -> nn.Module:
    """Values are drawn alike on all ranks: FSDP's copies are equal."""
    if part.plan.layout.sharding != "ddp":
        return part.model
    if part.meshes.pp is None:
        return apply_ddp(part.model, part.plan, part.device, part.meshes)
    apply_autocast(part.model, part.plan, part.device)  # the pipeline averages the gradients
    return part.model


REFERENCE_STEPS = Steps(
    tensors=_split_tensors,
    experts=_split_experts,
    adapters=_put_adapters,
    sequences=_share_sequences,
    head=_end_head,
    replicas=_replicas,
)
"""Of the reference decoder, whose parts are known by name."""


def finish(
    plan: PlanConfig,
    device: torch.device,
    meshes: Meshes,
    model: nn.Module,
    parts: tuple[nn.Module, ...],
    *,
    seed: int,
    fill: Callable[[nn.Module], None] | None = None,
) -> Assembled:
    """Give the parameters memory and values, then what needs them: the last step, the schedule."""
    for part in parts:
        home = torch.device("cpu") if plan.layout.offload == "cpu" else device
        materialise(part, home, buffers=device)
    if fill is not None:
        fill(model)
    else:
        layers, vocab, copies = plan.model.layers, plan.model.vocab, copied_parameters(plan)
        dtype = compute_dtype(plan.training)
        initialise(model, seed=seed, layers=layers, copies=copies, vocab=vocab, dtype=dtype)
    parts = tuple(REFERENCE_STEPS.replicas(_part(part, plan, meshes, device)) for part in parts)
    pipeline = None if meshes.pp is None else Pipeline(parts, plan, meshes, device)
    scaler = LossScaler(device) if plan.training.precision == "fp16" else None
    return Assembled(model=model, parts=parts, meshes=meshes, pipeline=pipeline, scaler=scaler)
