"""The options of a layout: what the user fixes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fsdpplan.cli.options import synonyms
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import checkpoint_blocks, choice, reshard, stage_blocks, whole
from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CheckpointBlocks,
    CpAttention,
    GradientSync,
    Offload,
    Reshard,
    Schedule,
    Sharding,
)
from fsdpplan.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Parts of the layout that the user fixes."""

    HEADING: ClassVar[str] = "Layout (what is given is kept, the rest is searched)"

    dp_replicate: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Replicas of the model (HSDP, DDP)."),
    ] = None
    dp_shard: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Ranks that shard one replica (FSDP)."),
    ] = None
    tp: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=8), help="Tensor-parallel ranks.")
    ] = None
    cp: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Context-parallel ranks."),
    ] = None
    pp: Annotated[int | None, Flag(metavar="N", parse=whole(example=4), help="Pipeline ranks.")] = (
        None
    )
    ep: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=8),
            help="Expert-parallel ranks, among those that shard one replica.",
        ),
    ] = None
    experts_over_tp: Annotated[
        bool | None,
        Flag(
            name="--experts-over-tp/--no-experts-over-tp",
            help="Spread whole experts over ep x tp ranks (Megatron: expert tensor parallelism "
            "of 1). Default: both ways are tried where the runtime has both.",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Sequences per forward pass and rank."),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Flag(
            metavar="NAME",
            parse=choice(Schedule, synonyms.SCHEDULES),
            help="Pipeline schedule: none, gpipe, 1f1b, interleaved_1f1b, looped_bfs, "
            "interleaved_zero_bubble, zbv, dualpipev.",
        ),
    ] = None
    virtual_stages: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Model chunks per pipeline rank."),
    ] = None
    stage_blocks: Annotated[
        tuple[int, ...] | None,
        Flag(
            metavar="N,N,...",
            parse=stage_blocks,
            help="With --pp: transformer blocks of each stage, first to last. Default: balanced, "
            "the head counted.",
        ),
    ] = None
    sharding: Annotated[
        Sharding | None,
        Flag(
            metavar="ddp|zero1|zero2|fsdp",
            parse=choice(Sharding, synonyms.SHARDING),
            help="What is sharded: nothing (ddp), optimizer state (zero1), gradients too (zero2), "
            "parameters too (fsdp).",
        ),
    ] = None
    reshard_after_forward: Annotated[
        Reshard | None,
        Flag(
            metavar="always|never|N",
            parse=reshard,
            help="After forward: always free gathered parameters, never free them, or keep them "
            "sharded within groups of N ranks.",
        ),
    ] = None
    gradient_sync: Annotated[
        GradientSync | None,
        Flag(
            metavar="every|reduce_scatter_only|last",
            parse=choice(GradientSync),
            help="Micro-batches that reduce gradients: every one; every one within a replica and "
            "the last across replicas; or the last alone.",
        ),
    ] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None,
        Flag(
            metavar="none|attention|op|full",
            parse=choice(ActivationCheckpointing, synonyms.CHECKPOINTING),
            help="What backward recomputes: nothing, attention, cheap operators (op), or whole "
            "blocks (full).",
        ),
    ] = None
    checkpoint_blocks: Annotated[
        CheckpointBlocks | None,
        Flag(
            metavar="all|N",
            parse=checkpoint_blocks,
            help="Blocks that are recomputed: all, or the first N of each stage.",
        ),
    ] = None
    async_tp: Annotated[
        bool | None,
        Flag(
            name="--async-tp/--no-async-tp",
            help="Overlap tensor-parallel collectives with their matmuls (needs symmetric memory).",
        ),
    ] = None
    offload: Annotated[
        Offload | None,
        Flag(
            metavar="none|cpu",
            parse=choice(Offload, synonyms.OFFLOAD),
            help="Keep sharded parameters and optimizer state in host memory. Default none.",
        ),
    ] = None
    wrap_blocks: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Transformer blocks per FSDP unit."),
    ] = None
    ddp_bucket_bytes: Annotated[
        int | None,
        Flag(
            name="--ddp-bucket",
            metavar="25MiB",
            parse=parse_bytes,
            help="Size of DDP's gradient buckets.",
        ),
    ] = None
    cp_attention: Annotated[
        CpAttention | None,
        Flag(
            metavar="ring|ulysses",
            parse=choice(CpAttention, synonyms.CP_ATTENTION),
            help="Context-parallel attention: pass keys and values around, or exchange heads for "
            "tokens. Default: ulysses where --cp divides a rank's heads.",
        ),
    ] = None
    loss_chunks: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=8),
            help="Compute head and loss in N chunks.",
        ),
    ] = None
    compile: Annotated[
        bool | None,
        Flag(name="--compile/--no-compile", help="Compile each block with torch.compile."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayoutOptions(LayoutOptions):
    """The parts of one layout."""

    HEADING: ClassVar[str] = "Layout (what is not given has a default; nothing is searched)"
