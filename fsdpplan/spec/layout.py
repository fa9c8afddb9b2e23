"""Layout: the degrees, the schedule and the policies of one way to train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.conventions import MESH_AXES as MESH_AXES
from fsdpplan.spec.conventions import SPLIT_BACKWARD_SCHEDULES as SPLIT_BACKWARD_SCHEDULES
from fsdpplan.spec.values import (
    RemembersHash,
    remembered_hash,
    require_choice,
    require_positive_int,
)

Sharding = Literal["ddp", "zero1", "zero2", "fsdp"]
GradientSync = Literal["every", "reduce_scatter_only", "last"]
Schedule = Literal[
    "none",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
ActivationCheckpointing = Literal["none", "attention", "op", "full"]
Offload = Literal["none", "cpu"]
Reshard = Literal["always", "never"] | int
CpAttention = Literal["ring", "ulysses"]
CheckpointBlocks = Literal["all"] | int

_CHOICES = {
    "sharding": get_args(Sharding),
    "gradient_sync": get_args(GradientSync),
    "schedule": get_args(Schedule),
    "activation_checkpointing": get_args(ActivationCheckpointing),
    "offload": get_args(Offload),
    "cp_attention": get_args(CpAttention),
}
"""Named once: a search makes thousands of layouts."""


_NUMBERS = (
    *MESH_AXES,
    *("ep", "wrap_blocks", "ddp_bucket_bytes", "micro_batch", "num_microbatches"),
    *("virtual_stages", "loss_chunks"),
)
"""Whole numbers from 1 on."""

_choices_of, _numbers_of = attrgetter(*_CHOICES), attrgetter(*_NUMBERS)


@lru_cache(maxsize=1024)
def _are_choices(chosen: tuple[str, ...]) -> bool:
    return all(value in known for value, known in zip(chosen, _CHOICES.values(), strict=True))


DDP_BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default `bucket_cap_mb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(RemembersHash):
    """How the model, the batch and the schedule are spread over the ranks."""

    __hash__ = remembered_hash

    dp_replicate: int = 1
    """Copies of the parameters over which gradients are all-reduced."""
    dp_shard: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded."""
    cp: int = 1
    """Context-parallel ranks: they split the sequence."""
    tp: int = 1
    """Tensor-parallel ranks: they split each matrix."""
    pp: int = 1
    """Pipeline stages' ranks: they split the blocks."""
    ep: int = 1
    """Expert-parallel ranks; divides `dp_shard * cp` and adds no ranks."""
    experts_over_tp: bool = False
    """Tensor-parallel ranks have whole experts each: experts are spread over `ep * tp` ranks, as
    Megatron does with an expert tensor parallelism of 1. Without, `tp` splits every expert."""
    sharding: Sharding = "fsdp"
    """`ddp` keeps a full copy on each of `dp_replicate` ranks, and one copy bare, without DDP;
    `zero1` shards only the optimizer's state over `dp_shard * cp` ranks, `zero2` the reduced
    gradients too; `fsdp` is `fully_shard`, which over one rank frees what it has gathered."""
    reshard_after_forward: Reshard = "always"
    """Free gathered blocks after forward (`always`), keep them (`never`), or reshard to
    groups of N ranks."""
    gradient_sync: GradientSync = "every"
    """Which micro-batches reduce gradients: all; reduce-scatter in all and all-reduce in the
    last; or only the last."""
    wrap_blocks: int = 1
    """Transformer blocks an FSDP unit: the bucket of FSDP."""
    ddp_bucket_bytes: int = DDP_BUCKET_BYTES
    """Bucket of DistributedDataParallel."""
    micro_batch: int = 1
    """Sequences a data-parallel rank in one forward pass."""
    num_microbatches: int = 1
    """Forward passes a rank and optimizer step: gradient accumulation, or pipeline
    micro-batches."""
    schedule: Schedule = "none"
    """Pipeline schedule; `none` exactly when pp is 1."""
    virtual_stages: int = 1
    """Model chunks a pipeline rank."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of each pipeline stage, first to last; plans and JSON with a pipeline name them. Empty
    beside `pp` above 1, as the search has it: balanced, the head's product counted in blocks."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What backward recomputes: nothing, attention only, cheap operations, whole blocks."""
    checkpoint_blocks: CheckpointBlocks = "all"
    """How many blocks of each pipeline stage, the first ones, `activation_checkpointing` is of; the
    others keep everything. They are the last in backward, where the kept ones are gone: so what is
    recomputed never stands on top of the most that is kept."""
    sequence_parallel: bool = False
    """Split the sequence outside the tensor-parallel matmuls."""
    loss_parallel: bool = False
    """Keep logits split over the vocabulary in the loss."""
    async_tp: bool = False
    """Overlap tensor-parallel collectives with their matmuls."""
    offload: Offload = "none"
    """Where parameter shards, their gradients and the optimizer state live, and where the optimizer
    runs: `cpu` is FSDP2's `CPUOffloadPolicy`."""
    compile: bool = True
    """torch.compile each block."""
    loss_chunks: int = 1
    """Pieces of a micro-batch's tokens whose logits exist at a time; from two on, the loss makes
    the gradients beside it."""
    cp_attention: CpAttention = "ring"
    """How context-parallel ranks see the whole sequence: keys and values go around a ring of them,
    or they trade heads for tokens around attention (`ulysses`), as CPU processes do in any case."""

    @property
    def reshards_stages(self) -> bool:
        """Each forward pass of a pipeline's stage frees the blocks that FSDP gathered for it."""
        frees = self.sharding == "fsdp" and self.reshard_after_forward == "always"
        return self.pp > 1 and frees

    def __post_init__(self) -> None:
        numbers = _numbers_of(self)
        if {*map(type, numbers)} != {int} or min(numbers) < 1:
            require_positive_int(**dict(zip(_NUMBERS, numbers, strict=True)))
        chosen = _choices_of(self)
        if {*map(type, chosen)} != {str} or not _are_choices(chosen):
            for (name, choices), value in zip(_CHOICES.items(), chosen, strict=True):
                require_choice(name, value, choices)
        reshard = self.reshard_after_forward
        if reshard not in ("always", "never") and (
            isinstance(reshard, bool) or not isinstance(reshard, int) or reshard < 2
        ):
            raise SpecError(
                "reshard_after_forward must be always, never or a whole number of at least 2, "
                f"not {reshard!r}"
            )
        self._require_checkpoint_blocks()
        if (self.schedule == "none") != (self.pp == 1):
            raise SpecError(
                f"schedule {self.schedule} does not go with pp {self.pp}: use none with pp 1, "
                "and gpipe, 1f1b or interleaved_1f1b above"
            )
        if self.stage_blocks and len(self.stage_blocks) != self.pp * self.virtual_stages:
            raise SpecError(
                f"stage_blocks names {len(self.stage_blocks)} stages, but pp {self.pp} with "
                f"{self.virtual_stages} stages a rank has {self.pp * self.virtual_stages}: name "
                "each, or leave stage_blocks empty"
            )
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.stage_blocks):
            raise SpecError(
                f"stage_blocks must be whole numbers of at least 0, not {self.stage_blocks}"
            )
        if (self.dp_shard * self.cp) % self.ep:
            raise SpecError(f"ep {self.ep} must divide dp_shard * cp = {self.dp_shard * self.cp}")
        if self.sharding == "ddp" and self.dp_shard > 1:
            raise SpecError(
                f"sharding ddp keeps whole copies: use dp_replicate, not dp_shard {self.dp_shard}"
            )

    def _require_checkpoint_blocks(self) -> None:
        number = self.checkpoint_blocks
        if number == "all":
            return
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SpecError(
                f"checkpoint_blocks must be all or a whole number of at least 1, not {number!r}: "
                "activation_checkpointing none recomputes no block"
            )
        if self.activation_checkpointing == "none":
            raise SpecError(
                f"checkpoint_blocks {number} does not go with activation_checkpointing none: say "
                "what they recompute (attention, op or full), or leave checkpoint_blocks at all"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks over which the batch splits."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Ranks over which FSDP shards parameters."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which whole experts are spread."""
        return self.ep * self.tp if self.experts_over_tp else self.ep

    @property
    def expert_ways(self) -> tuple[int, bool]:
        """What decides where experts are."""
        return (self.ep, self.experts_over_tp)

    @property
    def global_batch(self) -> int:
        """Sequences an optimizer step."""
        return self.data_parallel * self.micro_batch * self.num_microbatches

    @property
    def recomputation(self) -> str:
        """What backward recomputes, in words: `full`, or `full in the first 4 blocks`."""
        mode, number = self.activation_checkpointing, self.checkpoint_blocks
        if number == "all":
            return mode
        where = " of each stage" if self.pp > 1 else ""
        return f"{mode} in the first {number} block{'s' if number > 1 else ''}{where}"

    @property
    def inner_ranks(self) -> dict[str, int]:
        """Ranks between neighbours on each mesh axis: the product of the axes inside it."""
        strides: dict[str, int] = {}
        stride = 1
        for axis in reversed(MESH_AXES):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides
