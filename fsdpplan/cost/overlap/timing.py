"""Timing: from a layout to the seconds that the stream simulation needs.

This module only translates: shapes to block times, groups to collective times. The simulation is
in `overlap` and `pipeline`, the sum in `step`.

Block times: what one block takes in a micro-batch, computed once for all layouts whose blocks do
the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.

Block waiting: what the collectives inside a block add to its time.

A collective that runs beside a matmul hides behind it as far as that lasts; in chunks, one a rank,
the first chunk of one of the two runs alone:

    T = max(matmul in chunks, collective) + min(matmul in chunks, collective) / n

What is hidden still slows the matmul down (`slowdown`). Where a pass waits for its host, the device
has time to spare, and a collective hides in it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.block.operator import Operator
from fsdpplan.cost.block.work import BlockWork, block_work
from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.compute import Kernel, block_kernels, block_seconds
from fsdpplan.cost.kernels.head import embedding_seconds, head_pieces_seconds, head_seconds
from fsdpplan.cost.kernels.optimizer import (
    OptimizerRecipe,
    host_bytes_per_second,
    muon_elements,
    muon_matrices,
    muon_seconds,
    optimizer_seconds,
)
from fsdpplan.cost.kernels.products import product_seconds
from fsdpplan.cost.kernels.rates import BlockSeconds, memory_bytes_per_second
from fsdpplan.cost.model.formats import (
    FP32_BYTES,
    KERNELS_PER_COLUMN,
    KERNELS_PER_MATRIX,
    TRAFFIC_BYTES_PER_ELEMENT,
    Ways,
    block_ways,
    formats,
    inner_ways,
    joins_loss,
    local_tokens,
    low_rank,
)
from fsdpplan.cost.model.params import block_tensors, kind_counts
from fsdpplan.cost.model.shards import (
    Stage,
    gradient_syncs,
    stage_elements,
    stage_shapes,
    stage_shard_elements,
)
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import BlockCall, call_seconds
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.training import DTYPE_BYTES


@lru_cache(maxsize=64)
def in_family(device: Device, family: StackFamily) -> Device:
    """`device` with the rate that softwares of that family sustain."""
    sustained = device.fit.sustained(family)
    return replace(device, fit=replace(device.fit, sustained_fraction=sustained))


def layout_head_seconds(case: Case) -> tuple[float, float]:
    """(forward, backward) seconds of head and loss for one micro-batch on one rank."""
    model, training, layout = case.model, case.training, case.layout
    traits = training.traits
    device = in_family(case.cluster.device, training.family)
    vocab = model.vocab_rows(layout.tp) // layout.tp
    if layout.loss_chunks > 1:
        is_wide = training.activation_dtype == "fp16"
        of = formats(training=training, layout=layout)
        return head_pieces_seconds(
            model=model,
            tokens=local_tokens(training=training, layout=layout),
            vocab=vocab,
            chunks=layout.loss_chunks,
            precision=training.precision,
            device=device,
            joins_loss=joins_loss(training=training, layout=layout) and layout.tp == 1,
            weight_bytes=FP32_BYTES if is_wide else of.gathered,
        )
    return head_seconds(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        vocab=vocab,
        precision=training.precision,
        device=device,
        loss_vocab=vocab if layout.loss_parallel or traits.fused_loss else vocab * layout.tp,
        joins_loss=joins_loss(training=training, layout=layout),
        pads=traits.pads_vocabulary,
    )


def layout_embedding_seconds(case: Case, *, is_tied_here: bool) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding for one micro-batch on one rank; tied: the head
    is on the same rank and has the same table."""
    model, training, layout = case.model, case.training, case.layout
    return embedding_seconds(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        # tensor parallelism makes the table's gradient whole on each rank
        rows=model.vocab_rows(layout.tp),
        element_bytes=formats(training=training, layout=layout).residual,
        tied=is_tied_here and model.tied_embeddings,
        device=case.cluster.device,
    )


def ends_seconds(case: Case, stage: Stage) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding, head and loss that a stage has."""
    forward = backward = 0.0
    if stage.has_head:
        head = layout_head_seconds(case)
        forward, backward = forward + head[0], backward + head[1]
    if stage.has_embedding:
        embedding = layout_embedding_seconds(case, is_tied_here=stage.has_head)
        forward, backward = forward + embedding[0], backward + embedding[1]
    return forward, backward


def gradient_seconds(case: Case, stage: Stage) -> float:
    """What gradients cost in a step beyond the products that make them and FSDP's copies.

    Each micro-batch after the first adds its gradients to the kept ones: both are read, one is
    written. What is kept is whole under DDP and ZeRO and without reduction until the last
    micro-batch, a shard otherwise. DDP also copies gradients, divided, into its buckets when it
    reduces. Where parameters are in half precision, so are new gradients; fp32 ones that they are
    added to take every micro-batch, unless the product itself adds (fused kernels).
    """
    training, layout = case.training, case.layout
    whole = stage_elements(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    again = layout.num_microbatches - 1
    traits = training.traits
    of = formats(training=training, layout=layout)
    if layout.sharding == "fsdp" and layout.gradient_sync == "last":
        kept_bytes = DTYPE_BYTES[training.reduce_dtype]
        made_bytes = DTYPE_BYTES[training.activation_dtype]
        if traits.gathers_fp32:
            made_bytes = DTYPE_BYTES["fp32"]
        traffic = (2 * kept_bytes + made_bytes) * again * whole
    elif layout.offload == "cpu" and layout.gradient_sync == "every":
        traffic = 0  # the host adds (`host`), and the passes wait for it
    elif layout.sharding == "fsdp":
        traffic = 3 * of.kept_gradient * again * whole // layout.shard_ranks
    elif traits.half_gradients:
        traffic = 6 * again * whole
    elif traits.half_parameters:
        traffic = 0 if traits.fused_kernels else 10 * layout.num_microbatches * whole
    else:
        is_copied = layout.dp_replicate * layout.shard_ranks > 1
        copies = gradient_syncs(layout) if is_copied else 0
        traffic = (3 * again + 2 * copies) * of.kept_gradient * whole
        if training.powersgd_rank and is_copied:
            return copies * compression_seconds(case, stage) + traffic / memory_bytes_per_second(
                case.cluster.device
            )
    return traffic / memory_bytes_per_second(case.cluster.device)


def compression_seconds(case: Case, stage: Stage) -> float:
    """PowerSGD of all gradients of a rank, beside its collectives, by bytes and by launches:

        T = 44 n / B + launches (3 matrices + 12 r matrices)

    Products with matrices of so few columns wait for memory. Assumes that launches and memory do
    not overlap, as in a hook that waits for the device after each bucket.
    """
    device, rank = case.cluster.device, case.training.powersgd_rank
    sent = low_rank(stage_shapes(case.model, stage), rank)
    launches = sent.matrices * (KERNELS_PER_MATRIX + rank * KERNELS_PER_COLUMN)
    traffic = TRAFFIC_BYTES_PER_ELEMENT * (sent.compressed + sent.whole)
    moved = traffic / memory_bytes_per_second(device)
    return moved + launches * device.fit.kernel_launch_seconds


def optimizer_elements(case: Case, stage: Stage) -> int:
    """Parameters that a rank updates."""
    model, layout = case.model, case.layout
    if layout.sharding == "ddp":
        return stage_elements(model=model, stage=stage, tp=layout.tp, ep=layout.ep)
    return stage_shard_elements(
        model=model,
        stage=stage,
        tp=layout.tp,
        shard_ranks=layout.shard_ranks,
        ep=layout.ep,
    )


def layout_optimizer_seconds(case: Case, stage: Stage) -> float:
    """Gradient norm, clipping and update on one rank, by what the runtime does with parameters.

    Of Muon without the exchange between ranks.
    """
    model, training, layout, device = case.model, case.training, case.layout, case.cluster.device
    traits = training.traits
    recipe = OptimizerRecipe(
        half_parameters=traits.half_parameters,
        half_gradients=traits.half_gradients,
        half_states=training.half_states,
        fused=not traits.foreach_optimizer,
        optimizer="adamw_8bit" if training.optimizer == "adamw_8bit" else "adamw",
        scales_loss=training.scales_loss,
    )
    by_muon, orthogonal = 0, 0.0
    if training.optimizer == "muon":
        by_muon = muon_elements(case, stage, is_whole=layout.sharding == "ddp")
        matrices = muon_matrices(case, stage)
        traffic = replace(recipe, optimizer="muon").bytes_per_parameter * by_muon
        orthogonal = muon_seconds(matrices=matrices, device=device)
        orthogonal += traffic / memory_bytes_per_second(device)
    seconds = optimizer_seconds(
        local_parameters=optimizer_elements(case, stage) - by_muon,
        device=device,
        tensors=sum(n * len(block_tensors(view)) for view, n in _counted(model)) // layout.pp,
        recipe=recipe,
        host_bytes_per_second=host_bytes_per_second(case.cluster)
        if layout.offload == "cpu"
        else None,
    )
    return seconds + orthogonal


def _counted(model: Model) -> tuple[tuple[Model, int], ...]:
    """Blocks by kind where a pattern says so; others are taken to be alike."""
    return kind_counts(model) if model.is_patterned else ((model, model.layers),)


AxisSeconds = tuple[tuple[str, float], ...]
"""Seconds by mesh axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWaiting:
    """Exposed seconds of the collectives inside one block in one micro-batch."""

    forward_by_axis: AxisSeconds = ()
    backward_by_axis: AxisSeconds = ()
    """Recomputation included."""

    @property
    def forward_seconds(self) -> float:
        """Over all axes."""
        return sum(seconds for _, seconds in self.forward_by_axis)

    @property
    def backward_seconds(self) -> float:
        """Over all axes."""
        return sum(seconds for _, seconds in self.backward_by_axis)

    @property
    def queued_seconds(self) -> tuple[float, float]:
        """(forward, backward) without what the host waits for itself."""
        return _queued_seconds(self.forward_by_axis), _queued_seconds(self.backward_by_axis)

    @property
    def by_axis(self) -> AxisSeconds:
        """Of both passes; an axis may stand twice."""
        return self.forward_by_axis + self.backward_by_axis

    def beside_host(self, *, forward_spare: float, backward_spare: float) -> BlockWaiting:
        """What is left where the device waits for its host by so many seconds anyway.

        The host only queues a collective, and starts the next kernels meanwhile. An all-to-all
        among experts it must wait for itself: their tokens' numbers decide what it starts next.
        """
        return BlockWaiting(
            forward_by_axis=_less(self.forward_by_axis, forward_spare),
            backward_by_axis=_less(self.backward_by_axis, backward_spare),
        )


def calls_waiting(
    calls: tuple[BlockCall, ...], *, work: BlockWork, cluster: Cluster
) -> BlockWaiting:
    """What `calls` add to the block that does `work`."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for call in calls:
        axes, axis = forward if call.when == "forward" else backward, call.group.axis
        axes[axis] = axes.get(axis, 0.0) + exposed_seconds(call, work=work, cluster=cluster)
    return BlockWaiting(
        forward_by_axis=tuple(forward.items()), backward_by_axis=tuple(backward.items())
    )


def _queued_seconds(by_axis: AxisSeconds) -> float:
    return sum(seconds for axis, seconds in by_axis if axis != "ep")


def _less(by_axis: AxisSeconds, spare: float) -> AxisSeconds:
    """Without `spare` seconds of those that the host does not wait for, each axis its share."""
    queued = _queued_seconds(by_axis)
    if spare <= 0 or not queued:
        return by_axis
    left = max(0.0, 1 - spare / queued)
    return tuple((axis, seconds * (1 if axis == "ep" else left)) for axis, seconds in by_axis)


def exposed_seconds(call: BlockCall, *, work: BlockWork, cluster: Cluster) -> float:
    """Seconds by which the calls prolong the block."""
    total, device = call_seconds(call, cluster), cluster.device
    if call.overlap == "none":
        return total
    if call.overlap == "scores":
        beside = call.share * _scores_seconds(call, work, device)
        return max(0.0, total - beside)
    products = [
        one
        for one in block_kernels(work, device)
        if one.operator.place == call.place and _is_split(one.operator)
    ]
    if not products:
        return total
    if call.overlap == "chunks":
        return min(total, _chunked_seconds(products, total, call.group.ranks, work, device))
    # products of backward by weight are taken to be as large as forward's
    own = sum(one.by_input if call.overlap == "inputs" else one.forward for one in products)
    return max(0.0, total - own)


def _scores_seconds(call: BlockCall, work: BlockWork, device: Device) -> float:
    if call.when == "backward":
        return attention_backward_seconds(work, device)
    return attention_forward_seconds(work, device)


def _is_split(operator: Operator) -> bool:
    """Whether it is a product behind or before a tensor-parallel collective: of a network that
    every token visits, one that is split, and reads the block's input or makes its output."""
    if not operator.product:
        return False
    weight = operator.product.weight
    return weight.split != "none" and not (weight.reads_latents or "." in operator.name)


def _chunked_seconds(
    kernels: list[Kernel], collective: float, chunks: int, work: BlockWork, device: Device
) -> float:
    """What the collective adds to matmuls that are cut with it into `chunks` chunks of rows."""
    whole = chunk = 0.0
    for kernel in kernels:
        assert kernel.operator.product
        whole += kernel.forward
        part = replace(kernel.operator.product, rows=kernel.operator.product.rows / chunks)
        chunk += product_seconds(part, dtype=part.dtype(work), device=device)
    matmul = max(whole, chunks * (chunk / device.fit.sustained(work.family)))
    return max(matmul, collective) + min(matmul, collective) / chunks - whole


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block and micro-batch on one rank."""

    seconds: BlockSeconds
    """What it computes."""
    waiting: BlockWaiting
    """What its collectives add."""
    queued_seconds: tuple[float, float]
    """(forward, backward) what its collectives would add, did the device never wait for its host;
    those apart that the host waits for itself."""
    calls: tuple[BlockCall, ...]
    """Its collectives."""
    forward_seconds: float
    """What it takes with both."""
    backward_seconds: float
    """The same, recomputation included."""

    @property
    def computed_seconds(self) -> float:
        """Of both passes, what it does not wait for."""
        return (
            self.seconds.forward_seconds
            + self.seconds.recompute_seconds
            + self.seconds.backward_seconds
        )


def block_times(case: Case) -> BlockTimes:
    """Of one block of the case; with experts, of one that has them."""
    return _block_times(block_ways(case))


@lru_cache(maxsize=16384)
def _block_times(ways: Ways) -> BlockTimes:
    case = ways.case
    seconds = block_seconds(block_work(case), case.cluster.device)
    calls, alone = _inner_waiting(case.cluster, inner_ways(case))
    waiting = alone.beside_host(
        forward_spare=seconds.forward_seconds - seconds.forward_device_seconds,
        backward_spare=seconds.recompute_seconds
        - seconds.recompute_device_seconds
        + seconds.backward_seconds
        - seconds.backward_device_seconds,
    )
    return BlockTimes(
        seconds=seconds,
        waiting=waiting,
        queued_seconds=alone.queued_seconds,
        calls=calls,
        forward_seconds=seconds.forward_seconds + waiting.forward_seconds,
        backward_seconds=seconds.recompute_seconds
        + seconds.backward_seconds
        + waiting.backward_seconds,
    )


@lru_cache(maxsize=16384)
def _inner_waiting(cluster: Cluster, ways: Ways) -> tuple[tuple[BlockCall, ...], BlockWaiting]:
    calls = block_calls(ways.case)
    return calls, calls_waiting(calls, work=block_work(ways.case), cluster=cluster)
