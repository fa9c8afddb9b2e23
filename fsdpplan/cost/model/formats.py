"""Formats: bytes of one element of each kind of tensor, and how many tokens a rank sees.

Torch traits: where bytes depend on the release of PyTorch that will run.

Ways: what of a case decides a part of its step.

How gradients are reduced, how often, over how many ranks, decides nothing of what is inside a
block, and what is inside a block nothing of what FSDP moves; so the thousands of layouts of a
search have a few dozen kinds of blocks, and a few hundred of moves.

Low rank: what PowerSGD makes of the gradients of a bucket.

A matrix M of n x m that is worth it is sent as P = M Q (n x r) and Q = Mᵀ P (m x r); vectors, and
matrices that would hardly shrink, are sent as they are, together. What P Qᵀ lacks of M is added to
the next step's gradient (error feedback).

Source: Vogels et al., "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2; torch 2.13
torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `powerSGD_hook`, `_should_compress`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES, TorchRelease, Training, program_named

FP32_BYTES = DTYPE_BYTES["fp32"]


def local_tokens(*, training: Training, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank, before sequence parallelism splits them."""
    return layout.micro_batch * -(-training.seq_len // layout.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes of one element of each kind of tensor."""

    computed: int
    """Matmuls' inputs, outputs and weights."""
    gathered: int
    """Unsharded parameters and their gradients."""
    residual: int
    """The residual stream."""
    reduced: int
    """Gradients in the collectives."""
    gathered_matrix: int
    """Unsharded matrices of the blocks: fp8 where FSDP gathers them so."""
    resident: int
    """Parameters between steps, masters apart."""
    kept_gradient: int
    """Gradients that wait for an optimizer without half-precision parameters and fp32 masters, and
    DDP's buckets of them: in the dtype of the parameters."""

    @property
    def autocasts(self) -> bool:
        """Weights and inputs are cast for each matmul."""
        return self.computed < self.gathered


def formats(*, training: Training, layout: Layout) -> Formats:
    """Number formats of a training: DDP has fp32 parameters and autocast, unless they are kept in
    half precision; FSDP2 gathers in the compute dtype. The reference decoder keeps its
    residual stream in the compute dtype under autocast too; a script of the runtime `autocast` has
    it in fp32, as plain autocast leaves it."""
    return _formats(training, layout.sharding == "fsdp")


@lru_cache(maxsize=64)
def _formats(training: Training, is_fsdp: bool) -> Formats:
    traits = training.traits
    computed = DTYPE_BYTES[training.activation_dtype]
    resident = computed if traits.half_parameters or training.half_states else FP32_BYTES
    gathered = FP32_BYTES if traits.gathers_fp32 else computed if is_fsdp else resident
    is_fp8 = is_fsdp and training.fp8_all_gather
    return Formats(
        computed=computed,
        gathered=gathered,
        residual=FP32_BYTES if traits.fp32_residual else computed,
        reduced=DTYPE_BYTES[training.reduce_dtype],
        gathered_matrix=DTYPE_BYTES["fp8"] if is_fp8 else gathered,
        resident=resident,
        kept_gradient=computed if training.half_states else FP32_BYTES,
    )


def joins_loss(*, training: Training, layout: Layout) -> bool:
    """Whether the loss is one kernel a pass: the software's own, or the compiler's where that gets
    the loss beside the blocks."""
    traits = training.traits
    is_given = traits.compiles_loss and program_named(training.program).compiles_loss
    return traits.fused_loss or (layout.compile and is_given)


LEAN_PIPELINES = TorchRelease(2, 15)
GRADIENTS_IN_REDUCE_DTYPE = TorchRelease(2, 15)
LEAN_UNITS = TorchRelease(2, 15)
PARTIAL_PRODUCTS = TorchRelease(2, 11)
REDUCTIONS_KEPT, REDUCTIONS_LET_GO = TorchRelease(2, 12), TorchRelease(2, 13)


def _runs_since(release: TorchRelease, training: Training) -> bool:
    """Whether `release` or a newer one will run; not where none is said."""
    planned = training.torch_release
    return planned is not None and planned >= release


def has_lean_pipelines(training: Training) -> bool:
    """Whether pipeline stages make room for a message when it comes, and let go of what has been
    sent and of weights' gradients that have been added up; and reduce gradients of embedding and
    head after those of their blocks.

    Before torch 2.15 a rank has a buffer for each message of a step, and under schedules that split
    backward the latest gradients of weights beside their sums, and reduces the root's first. So it
    is priced where no release is said. Source: torch/distributed/pipelining/stage.py of both, and
    the peaks of their schedules under a fake process group (tests/ground_truth/test_pipeline.py).
    """
    return _runs_since(LEAN_PIPELINES, training)


def sums_in_reduce_dtype(training: Training) -> bool:
    """Whether FSDP2's gradients that add up over micro-batches are cast to the reduce dtype one by
    one, and are so when tensor-parallel ranks sum them, and where a loss in pieces makes them
    outside of any unit; before, a whole unit's were together in the compute dtype first.

    Source: `grad_dtype` of torch 2.15's torch/distributed/fsdp/_fully_shard/_fsdp_param.py and
    `_set_unsharded_grad_dtypes` of _fsdp_param_group.py; counts and peaks under a fake process
    group (tests/ground_truth).
    """
    return _runs_since(GRADIENTS_IN_REDUCE_DTYPE, training)


def has_lean_units(training: Training) -> bool:
    """Whether FSDP2 lets go of the flat buffer of a forward gather before the next unit's copy-out,
    and of a gradient before what its reduction returns; before torch 2.15 they overlapped. Seen in
    the peaks of its steps under fake tensors (tests/ground_truth/test_memory.py).
    """
    return _runs_since(LEAN_UNITS, training)


def keeps_reduction_behind(training: Training) -> bool:
    """Whether FSDP2 still has the buffer that a unit's gradients were reduced from while it reduces
    those of the next: torch 2.12 alone, where a loop's variable refers to it to the end of
    `FSDPParamGroup.post_backward`. Seen in the peaks of its steps (tests/ground_truth).
    """
    release = training.torch_release
    return release is not None and REDUCTIONS_KEPT <= release < REDUCTIONS_LET_GO


def sums_before_products(training: Training) -> bool:
    """Whether DTensor sums a gradient of which ranks have parts before it is multiplied, and not
    what comes of it: before torch 2.11 so. Counted with latent attention under tensor parallelism
    (tests/trainer/test_parallel_layouts.py).
    """
    release = training.torch_release
    return release is not None and release < PARTIAL_PRODUCTS


@dataclass(frozen=True, slots=True)
class Ways:
    """A case as far as a part of its step is concerned: equal to all that do the same."""

    decides: tuple[object, ...]
    """All that is read of it."""
    case: Case = field(compare=False)
    """One of them."""


def inner_ways(case: Case) -> Ways:
    """What decides the collectives inside a block, and what they run beside, on one cluster."""
    return Ways(_inside(case), case)


def block_ways(case: Case) -> Ways:
    """What decides all that a block does: with what data parallelism puts around it."""
    layout = case.layout
    is_fsdp = layout.sharding == "fsdp"
    around = layout.wrap_blocks if is_fsdp else layout.data_parallel > 1
    return Ways((case.cluster, is_fsdp, around, *_inside(case)), case)


def _inside(case: Case) -> tuple[object, ...]:
    model, training, layout = case.model, case.training, case.layout
    return (
        model,
        training,
        case.cluster.device.kind,
        layout.tp,
        layout.cp,
        layout.cp_attention,
        layout.expert_ways if model.experts else None,
        layout.micro_batch,
        layout.activation_checkpointing,
        layout.sequence_parallel,
        layout.async_tp,
        layout.compile,
        # one fp8 cast of a weight serves all of them
        layout.num_microbatches if training.fp8_recipe == "delayed" else 0,
    )


def shard_ways(case: Case) -> Ways:
    """What decides what FSDP gathers, reduces and copies."""
    layout = case.layout
    nouns = (case.model, case.cluster, case.training)
    ranks = (layout.tp, layout.cp, *layout.expert_ways, layout.dp_shard, layout.dp_replicate)
    policies = (layout.wrap_blocks, layout.reshard_after_forward, layout.offload)
    return Ways((*nouns, *ranks, *policies), case)


def memory_ways(case: Case) -> Ways:
    """What decides what a rank holds: nothing of links, rates, or how much memory there is."""
    device = case.cluster.device
    kind = (device.kind, device.vendor, device.compute_capability, device.fit)
    return Ways((case.model, case.training, case.layout, *kind), case)


LEAST_COMPRESSION = 2
"""torch's `min_compression_rate`: P and Q together are less than this part of M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Elements of a bucket, by how they are sent."""

    whole: int = 0
    """Sent as they are."""
    compressed: int = 0
    """Of matrices that are not sent."""
    p: int = 0
    q: int = 0
    matrices: int = 0
    """How many are compressed."""


def low_rank(shapes: Iterable[tuple[int, ...]], rank: int) -> LowRank:
    """What becomes of gradients of `shapes`, each seen as rows x all the rest.

    M is compressed if 2 r (n + m) < n m, with r = min(n, m, rank).
    """
    whole = compressed = p = q = matrices = 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        r = min(n, m, rank)
        if LEAST_COMPRESSION * r * (n + m) < n * m:
            compressed, p, q, matrices = compressed + n * m, p + n * r, q + m * r, matrices + 1
        else:
            whole += n * m
    return LowRank(whole=whole, compressed=compressed, p=p, q=q, matrices=matrices)


TRAFFIC_BYTES_PER_ELEMENT = 44
"""fp32: the error is added (12), the bucket copied (8), read for P, then for Q (8), written from
both (4), and what is lacking subtracted (12). What is sent as it is moves as much, near enough."""

KERNELS_PER_MATRIX = 3
"""Three batched products."""

KERNELS_PER_COLUMN = 12
"""Gram-Schmidt of P and of Q: norm and division of each column, then product, sum, product and
difference over those that are left. Above rank 2 torch takes a QR, priced the same."""
