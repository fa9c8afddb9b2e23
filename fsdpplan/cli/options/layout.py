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

    HEADING: ClassVar[str] = "Layout (each one given is kept; the others are searched)"

    dp_replicate: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Copies of the parameters."),
    ] = None
    dp_shard: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Ranks that share one copy."),
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
            help="Expert-parallel ranks, of those that share one copy.",
        ),
    ] = None
    experts_over_tp: Annotated[
        bool | None,
        Flag(
            name="--experts-over-tp/--no-experts-over-tp",
            help="Whole experts on each tensor-parallel rank, over ep x tp ranks: Megatron's "
            "expert tensor parallelism of 1. Default: where the runtime has both ways, both are "
            "tried.",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Sequences a forward pass and rank."),
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
        Flag(metavar="N", parse=whole(example=2), help="Model chunks a pipeline rank."),
    ] = None
    stage_blocks: Annotated[
        tuple[int, ...] | None,
        Flag(
            metavar="N,N,...",
            parse=stage_blocks,
            help="Blocks of each pipeline stage, first to last; with --pp. Default: as even as "
            "can be, the head counted.",
        ),
    ] = None
    sharding: Annotated[
        Sharding | None,
        Flag(
            metavar="ddp|zero1|zero2|fsdp",
            parse=choice(Sharding, synonyms.SHARDING),
            help="Whole copies; sharded optimizer state; gradients too; FSDP2.",
        ),
    ] = None
    reshard_after_forward: Annotated[
        Reshard | None,
        Flag(
            metavar="always|never|N",
            parse=reshard,
            help="Free gathered blocks, keep them, or reshard to groups of N ranks.",
        ),
    ] = None
    gradient_sync: Annotated[
        GradientSync | None,
        Flag(
            metavar="every|reduce_scatter_only|last",
            parse=choice(GradientSync),
            help="Which micro-batches reduce gradients.",
        ),
    ] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None,
        Flag(
            metavar="none|attention|op|full",
            parse=choice(ActivationCheckpointing, synonyms.CHECKPOINTING),
            help="What backward recomputes.",
        ),
    ] = None
    checkpoint_blocks: Annotated[
        CheckpointBlocks | None,
        Flag(
            metavar="all|N",
            parse=checkpoint_blocks,
            help="Which blocks of each stage recompute: all, or only the first N.",
        ),
    ] = None
    async_tp: Annotated[
        bool | None,
        Flag(
            name="--async-tp/--no-async-tp",
            help="Tensor-parallel collectives beside their matmuls.",
        ),
    ] = None
    offload: Annotated[
        Offload | None,
        Flag(
            metavar="none|cpu",
            parse=choice(Offload, synonyms.OFFLOAD),
            help="Where shards and optimizer state live. Default none: on the device.",
        ),
    ] = None
    wrap_blocks: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Blocks an FSDP unit: FSDP's bucket."),
    ] = None
    ddp_bucket_bytes: Annotated[
        int | None,
        Flag(name="--ddp-bucket", metavar="25MiB", parse=parse_bytes, help="Bucket of DDP."),
    ] = None
    cp_attention: Annotated[
        CpAttention | None,
        Flag(
            metavar="ring|ulysses",
            parse=choice(CpAttention, synonyms.CP_ATTENTION),
            help="How context-parallel ranks see a whole sequence: keys go around, or heads are "
            "traded for tokens. Default: ulysses where --cp divides a rank's heads.",
        ),
    ] = None
    loss_chunks: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=8),
            help="Pieces in which head and loss are computed.",
        ),
    ] = None
    compile: Annotated[
        bool | None, Flag(name="--compile/--no-compile", help="torch.compile of each block.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayoutOptions(LayoutOptions):
    """The parts of one layout."""

    HEADING: ClassVar[str] = "Layout (what is not given is derived, or a default, never searched)"
