"""Gradient sizes: in which form gradients live from their making to the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.memory.backward_steps import WeightGradientsOf
from fsdpplan.cost.memory.ledger import makes_gradients, sums_fp32_gradients
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.formats import formats, sums_in_reduce_dtype
from fsdpplan.cost.model.shards import Stage, shares_table
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training


def holds_gradients(layout: Layout) -> bool:
    """Gradients stay unsharded from micro-batch to micro-batch until the last one reduces them; in
    a pipeline also those of a single one, until the schedule is through."""
    return layout.gradient_sync == "last" and (layout.num_microbatches > 1 or layout.pp > 1)


def weight_gradients_of(*, training: Training, layout: Layout) -> WeightGradientsOf:
    """What becomes of a weight's gradient when backward has made it.

    FSDP2 adds it at once where it holds gradients of the same dtype from earlier micro-batches.
    """
    of = formats(training=training, layout=layout)
    if layout.sharding != "fsdp":
        adds = not grows_in_backward(training=training, layout=layout)
    else:
        in_place = of.reduced == of.gathered or sums_in_reduce_dtype(training)
        adds = holds_gradients(layout) and in_place
    if of.autocasts:
        return "cast_and_added" if adds else "cast"
    return "added" if adds else "kept"


def grows_in_backward(*, training: Training, layout: Layout) -> bool:
    """Gradients gather until backward has ended: those in the compute dtype beside their fp32 sums,
    or all where they are not there before."""
    traits = training.traits
    return makes_gradients(training=training, layout=layout) or (
        layout.sharding != "fsdp"
        and traits.half_parameters
        and traits.half_gradients_beside_fp32 == "backward"
    )


def keeps_head_gradient(case: Case, stage: Stage) -> bool:
    """The head's gradient stays until its unit's reduction, or, of a tied table, until the
    embedding's joins it."""
    if shares_table(model=case.model, stage=stage):
        return True
    return weight_gradients_of(training=case.training, layout=case.layout) in ("kept", "cast")


def whole_table_gradient_bytes(case: Case, stage: Stage) -> int:
    """What a pipeline of whole copies holds of it beside its own rows: no FSDP ever splits it, and
    the sum over tensor-parallel ranks waits for the last micro-batch."""
    layout = case.layout
    if layout.sharding != "ddp" or layout.pp == 1 or case.training.traits.half_parameters:
        return 0
    return FP32_BYTES * unsplit_table_elements(case, stage)


def unsplit_table_elements(case: Case, stage: Stage) -> int:
    """Elements of other ranks' rows in gradients that are kept from earlier micro-batches: the
    token table's is made whole, and split over tensor-parallel ranks when it is reduced, or when
    the gradient of a tied head, which is split, is added to it."""
    model = case.model
    is_whole = stage.has_embedding and not shares_table(model=model, stage=stage)
    rows, tp = model.vocab_rows(case.layout.tp), case.layout.tp
    unsplit_rows = rows - rows // tp if is_whole else 0
    return unsplit_rows * model.hidden


def embedding_gradient_bytes(case: Case, stage: Stage) -> int:
    """DTensor makes the token table's gradient whole on each rank and copies its rows out, in a
    pipeline when it is reduced; other softwares look up, and make gradients of, their own rows
    alone. With a tied head, autograd adds
    the head's gradient to the token table's out of place."""
    model, training, layout = case.model, case.training, case.layout
    if not stage.has_embedding:
        return 0
    of = formats(training=training, layout=layout)
    adds_up = layout.pp == 1 and holds_gradients(layout) and sums_in_reduce_dtype(training)
    element_bytes = of.reduced if adds_up and layout.sharding == "fsdp" else of.gathered
    local_vocab = model.vocab_rows(layout.tp) // layout.tp
    rows = local_vocab
    if layout.tp > 1 and not training.traits.half_parameters:
        rows = local_vocab * layout.tp + (rows if layout.pp == 1 else 0)
    if shares_table(model=model, stage=stage):
        rows += local_vocab
    if model.positions == "learned":
        rows += model.max_positions
    return rows * model.hidden * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGradientBytes:
    """Bytes of one element of a gradient shard in the last micro-batch of a step."""

    earlier: int
    """Before this micro-batch reduces it."""
    later: int
    """After it, with what HSDP keeps of its all-reduce."""
    reduced: int
    """Of one element of a gradient shard while it is reduced: the output, and its fp32 copy."""


def shard_gradient_bytes(*, training: Training, layout: Layout) -> ShardGradientBytes:
    """HSDP refers to each all-reduced buffer until the unit's next reduction or the end of the last
    backward; in fp32 the first micro-batch's buffers are the gradients.

    With offload they go to the host, but for those two.

    Source: torch 2.13 `FSDPParamGroup._all_reduce_state` and `_partial_reduce_output`.
    """
    if layout.sharding != "fsdp":  # they stay, as part of the ledger
        return ShardGradientBytes(earlier=0, later=0, reduced=0)
    of = formats(training=training, layout=layout)
    kept = FP32_BYTES if sums_fp32_gradients(training) else of.computed
    is_hsdp = layout.dp_replicate > 1
    copy = kept if of.reduced < kept else 0
    output = of.reduced + copy
    if layout.offload == "cpu":
        kept = of.reduced if is_hsdp else 0
        has_earlier = layout.num_microbatches > 1 and not holds_gradients(layout)
        return ShardGradientBytes(earlier=kept if has_earlier else 0, later=kept, reduced=output)
    first_input = of.reduced if is_hsdp and copy else 0
    if layout.num_microbatches == 1 or holds_gradients(layout):
        return ShardGradientBytes(earlier=0, later=kept + first_input, reduced=output)
    if not is_hsdp:
        return ShardGradientBytes(earlier=kept, later=kept, reduced=output)
    if layout.gradient_sync == "reduce_scatter_only":
        return ShardGradientBytes(earlier=of.reduced, later=kept + first_input, reduced=output)
    later = kept + of.reduced
    earlier = kept + first_input if layout.num_microbatches == 2 else later
    return ShardGradientBytes(earlier=earlier, later=later, reduced=output - (earlier - kept))
