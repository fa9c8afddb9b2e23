"""Traffic: which collectives one rank calls in a step, how often, and with how many bytes.

`bytes` is always the full unsharded buffer: the output of an all-gather, the input of a
reduce-scatter, the buffer of an all-reduce. Counts and bytes of FSDP2 and HSDP equal those of real
`fully_shard` steps under a fake process group exactly, padding included (tests/ground_truth);
so do those of tensor with sequence parallelism. DDP's counts are those of real gloo jobs
(tests/trainer).

Left out: the few scalars a step of the loss and of agreement between ranks, and the few numbers for
each expert by which mixtures are balanced (int64 and float64, in which nothing else is sent).

Tied tables: what the two ends of a pipeline exchange so that their copies stay equal.

Priced for runtime fsdp2, whose trainer is ours; what others do of it is in what was fitted to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fsdpplan.cost.kernels.optimizer import deal_rounds, muon_matrices
from fsdpplan.cost.memory.ledger import holds_gradients
from fsdpplan.cost.model.formats import FP32_BYTES, local_tokens, sums_in_reduce_dtype
from fsdpplan.cost.model.params import (
    ParameterTensor,
    block_tensors,
    embedding_tensors,
    head_tensors,
    trained_tensors,
    trains_ends,
)
from fsdpplan.cost.model.shards import (
    Stage,
    block_cases,
    block_kinds,
    gradient_syncs,
    stage_root_size,
    unit_size,
)
from fsdpplan.cost.network.placement import pp_group, shard_group, tp_group
from fsdpplan.cost.traffic.block_calls import block_calls, gathered_activation_dtype
from fsdpplan.cost.traffic.calls import Calls, activation_bytes, group_seconds
from fsdpplan.cost.traffic.fsdp import fsdp_calls
from fsdpplan.cost.traffic.replica import replica_calls
from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES, Training


def exchanges_tables(case: Case) -> bool:
    """Embedding and head share a table and lie on different ranks, of our trainer's."""
    layout = case.layout
    is_distant = layout.pp > 1 and layout.schedule not in V_SCHEDULES
    return case.model.tied_embeddings and is_distant and case.training.runtime == "fsdp2"


def table_gradient_bytes(
    *, model: Model, layout: Layout, param_dtype: str = "fp32", rank: int = 0
) -> int:
    """Reduced gradient of one rank's part of the table, in the dtype of the parameters.

        e * ceil(V / (tp n)) * h

    with n the ranks of a shard group: 1 where each rank keeps whole gradients. The last ranks of
    the group have less where n does not divide the rows.
    """
    ranks = layout.shard_ranks if layout.sharding in ("fsdp", "zero2") else 1
    table = unit_size(embedding_tensors(model)[:1], tp=layout.tp, shard_ranks=ranks)
    most = table.padded_elements // ranks
    before = (rank // layout.tp) % ranks * most
    return DTYPE_BYTES[param_dtype] * max(0, min(most, table.elements - before))


def table_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """The gradient that an end of the pipeline sends to the other, once a step.

    Each adds what it receives to its own. Source: `fsdpplan.trainer.parallel.tied_tables`;
    Megatron-LM all-reduces over the two in the same place.
    """
    layout, dtype = case.layout, case.training.param_dtype
    one_end = stage.has_embedding != stage.has_head
    if one_end and exchanges_tables(case):
        yield Calls(
            collective="send_recv",
            group=pp_group(layout),
            dtype=dtype,
            count=1,
            call_bytes=table_gradient_bytes(model=case.model, layout=layout, param_dtype=dtype),
        )


def table_seconds(case: Case) -> float:
    """Time of the exchange, between the last backward pass and the gradient norm: all wait."""
    layout = case.layout
    if not exchanges_tables(case):
        return 0.0
    size = table_gradient_bytes(
        model=case.model, layout=layout, param_dtype=case.training.param_dtype
    )
    return group_seconds(case.cluster, pp_group(layout), "send_recv", size)


def muon_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Two all-to-alls a round: each rank sends its parts of all matrices once, and results back; in
    bf16 on GPUs, elsewhere in the fp32 of the parameters."""
    dtype = "bf16" if case.on_cuda else "fp32"
    matrices = muon_matrices(case, stage)
    for group, rounds in deal_rounds(matrices).items():
        elements = sum(one.local_elements for one in matrices if one.sharers == group)
        call_bytes, more = divmod(elements * DTYPE_BYTES[dtype], rounds)
        for count, size in ((rounds - more, call_bytes), (more, call_bytes + 1)):
            if count:
                yield Calls(
                    collective="all_to_all",
                    group=group,
                    dtype=dtype,
                    count=2 * count,
                    call_bytes=size,
                )


def inner_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Collectives inside the blocks, of all blocks and micro-batches."""
    for own, blocks in block_cases(case, stage):
        for call in block_calls(own):
            yield Calls(
                collective=call.collective,
                group=call.group,
                dtype=call.dtype,
                count=case.layout.num_microbatches * blocks * call.count,
                call_bytes=call.call_bytes,
                leaving_share=call.leaving_share,
            )


def tp_end_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Tensor parallelism around the blocks: embedding, head, loss, norms.

    With sequence parallelism the embedding scatters and the head gathers once in forward, and the
    other way round in backward; without, each all-reduces once.
    """
    yield from tp_pass_calls(case, stage)
    yield from tp_gradient_calls(case, stage)


def tp_pass_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Of those, what every micro-batch does on its way."""
    training, layout = case.training, case.layout
    if layout.tp == 1:
        return
    elements = local_tokens(training=training, layout=layout) * case.model.hidden
    ends: Counter[str] = Counter({training.activation_dtype: int(stage.has_head)})
    # a frozen embedding scatters in forward alone, and the first block's input has no gradient
    trains = trains_ends(case.model)
    ends[_embedded_dtype(training, layout)] += int(stage.has_embedding and trains)
    split = layout.sequence_parallel
    for collective in ("all_gather", "reduce_scatter") if split else ("all_reduce",):
        for dtype, number in ends.items():
            yield Calls(
                collective=collective,
                group=tp_group(layout),
                dtype=dtype,
                count=layout.num_microbatches * number,
                call_bytes=elements * DTYPE_BYTES[dtype],
            )
    if stage.has_head:
        yield from _loss_calls(case)
    yield from _scale_calls(case, stage)


def _embedded_dtype(training: Training, layout: Layout) -> str:
    """What the embedding gives: rows of an fp32 table where autocast makes the precision, which
    does not touch lookups."""
    is_fp32 = _is_whole(training, layout) and training.adapters is None
    return training.param_dtype if is_fp32 else training.activation_dtype


def _is_whole(training: Training, layout: Layout) -> bool:
    """The trainer's DDP: parameters as they are kept, which autocast casts in each forward where
    they are in fp32."""
    return training.runtime == "fsdp2" and layout.sharding == "ddp"


def tp_gradient_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Sequence parallelism: each rank has its tokens' part of the gradients of norms, and of a
    learned position table, of which it looks up its own positions.

    DDP is given whole gradients, so each backward sums them, in the dtype of the parameters.
    """
    layout = case.layout
    if layout.tp == 1 or not layout.sequence_parallel:
        return
    numbers: Counter[tuple[int, str]] = Counter()
    for piece in stage.pieces:
        dtype = _summed_dtype(case, piece)
        for tensor, number in _partial_tensors(case.model, piece):
            numbers[tensor.elements, dtype] += number
    sums_often = _is_whole(case.training, layout) and layout.pp == 1
    for (length, dtype), number in numbers.items():
        yield Calls(
            collective="all_reduce",
            group=tp_group(layout),
            dtype=dtype,
            count=number * (layout.num_microbatches if sums_often else gradient_syncs(layout)),
            call_bytes=length * DTYPE_BYTES[dtype],
        )


def _summed_dtype(case: Case, piece: Stage) -> str:
    """Of the gradients that tensor-parallel ranks sum: as they are when they are reduced."""
    training, layout = case.training, case.layout
    if _is_whole(training, layout):
        return training.stored_dtype
    holds = holds_gradients(layout) and piece.adds_gradients
    holds = holds or sums_in_reduce_dtype(training)
    return training.reduce_dtype if holds else training.activation_dtype


def _partial_tensors(model: Model, piece: Stage) -> Iterator[tuple[ParameterTensor, int]]:
    """(tensor, how many) of those of a virtual stage that ranks have partial gradients of."""
    for kind, blocks in block_kinds(model=model, stage=piece):
        for tensor in block_tensors(kind):
            if _has_partial_gradients(tensor):
                yield tensor, blocks
    if not trains_ends(model):
        return
    if piece.has_head:
        yield from ((tensor, 1) for tensor in head_tensors(model) if len(tensor.shape) == 1)
    if piece.has_embedding:
        yield from ((tensor, 1) for tensor in embedding_tensors(model) if tensor.split == "none")


def _has_partial_gradients(tensor: ParameterTensor) -> bool:
    """Whether tensor-parallel ranks all have the tensor, and each its tokens' or its heads' part of
    the gradient: norms, the narrow projections of latent attention, and of an adapter the matrix
    that is not split."""
    if tensor.split != "none" or not tensor.is_trained:
        return False
    return "norm" in tensor.name or tensor.role == "latent" or bool(tensor.adapts)


def _loss_calls(case: Case) -> Iterator[Calls]:
    """The logits, gathered; or, of a vocabulary-parallel loss, three fp32 numbers a token (the
    highest logit, the sum of exponentials, the target's logit)."""
    training, layout = case.training, case.layout
    tokens = local_tokens(training=training, layout=layout)
    if layout.loss_parallel:
        smaller, larger = divmod(tokens, layout.loss_chunks)
        for pieces, size in ((larger, smaller + 1), (layout.loss_chunks - larger, smaller)):
            yield Calls(
                collective="all_reduce",
                group=tp_group(layout),
                dtype="fp32",
                count=3 * pieces * layout.num_microbatches,
                call_bytes=FP32_BYTES * size,
            )
        return
    columns = case.model.vocab_rows(layout.tp)
    yield Calls(
        collective="all_gather",
        group=tp_group(layout),
        dtype=training.activation_dtype,
        count=layout.num_microbatches,
        call_bytes=tokens * columns * DTYPE_BYTES[training.activation_dtype],
    )


def _scale_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Before ranks gather what they cast to fp8 with one scale computed on the spot, they agree on
    the largest element: for each of a block's two inputs and of its two outputs' gradients."""
    training, layout = case.training, case.layout
    if gathered_activation_dtype(training) != "fp8" or training.fp8_recipe != "tensorwise":
        return
    yield Calls(
        collective="all_reduce",
        group=tp_group(layout),
        dtype="fp32",
        count=4 * layout.num_microbatches * stage.blocks,
        call_bytes=FP32_BYTES,
    )


def pp_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Messages between pipeline stages: activations forward, their gradients back.

    A rank sends once a micro-batch and virtual stage in each direction, but the first and last
    stage of the whole pipeline only in one, and not to a stage of its own.
    """
    layout = case.layout
    if layout.pp == 1:
        return
    per_micro_batch = 2 * layout.virtual_stages
    per_micro_batch -= int(stage.has_embedding) + int(stage.has_head)
    per_micro_batch -= 2 * stage.inner_boundaries
    yield Calls(
        collective="send_recv",
        group=pp_group(layout),
        dtype=case.training.activation_dtype,
        count=layout.num_microbatches * per_micro_batch,
        call_bytes=message_bytes(case),
    )


def message_bytes(case: Case) -> int:
    """What one pipeline stage hands to the next for one micro-batch."""
    size = activation_bytes(case)
    return size // case.layout.tp if case.layout.sequence_parallel else size


def norm_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """The gradient norm: one fp32 number a parameter, all-reduced over the shards, then over the
    tensor-parallel ranks; their sum over the pipeline's.

    The trainer adds up squares axis by axis; replicas have equal gradients by then.
    """
    model, layout = case.model, case.layout
    root = stage_root_size(model=model, stage=stage, tp=1, shard_ranks=1)
    tensors = root.tensors + sum(
        number * trained_tensors(kind) for kind, number in block_kinds(model=model, stage=stage)
    )
    sums = ((shard_group(layout), tensors), (tp_group(layout), tensors), (pp_group(layout), 1))
    for group, numbers in sums:
        yield Calls(
            collective="all_reduce",
            group=group,
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * numbers,
        )


def optimizer_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """What an optimizer exchanges that needs more than each rank's own shards."""
    if case.training.optimizer == "muon":
        yield from muon_calls(case, stage)


def step_calls(case: Case, stage: Stage) -> list[Calls]:
    """Every collective of one rank's step."""
    sharding = case.layout.sharding
    calls: list[Calls] = []
    calls += fsdp_calls(case, stage) if sharding == "fsdp" else replica_calls(case, stage)
    if sharding in ("fsdp", "ddp"):
        calls += norm_calls(case, stage)
    calls += inner_calls(case, stage)
    calls += tp_end_calls(case, stage)
    calls += pp_calls(case, stage)
    calls += table_calls(case, stage)
    calls += optimizer_calls(case, stage)
    return [call for call in calls if call.count and call.group.ranks > 1]
