"""Weight gradients: what a backward pass that is split into halves keeps between them.

The half by inputs hands its gradient on; the half by weights comes later and needs the gradient of
each layer's output beside the layer's input, so both stay until then. The first stage has no input
to differentiate by: its first half does nothing, and its second one is a whole backward pass.

Source: torch 2.13 torch/distributed/pipelining/_backward.py and stage.py (`backward_one_chunk`,
`backward_weight_one_chunk`); checked against its schedules under a fake process group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.block.branch import weight_gradient_bytes
from fsdpplan.cost.block.operators import block_operators, on_device
from fsdpplan.cost.block.sizes import block_sizes, latent_sizes
from fsdpplan.cost.block.work import BlockWork, block_work
from fsdpplan.cost.kernels.head import head_sizes
from fsdpplan.cost.model.formats import FP32_BYTES, formats, has_lean_pipelines, local_tokens
from fsdpplan.cost.model.params import kind_views
from fsdpplan.cost.model.shards import Stage, stage_elements
from fsdpplan.cost.schedule.moments import Moment
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Schedule
from fsdpplan.spec.plan import Case

ALL_SPLIT_SCHEDULES: tuple[Schedule, ...] = ("interleaved_zero_bubble", "zbv")
"""Every backward pass is split; DualPipeV splits only the first and last ones of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """What a pipeline rank holds more than its activations under split backward passes."""

    waiting_block_bytes: int = 0
    """Outputs' gradients of a block, of a micro-batch that waits for the weights' half."""
    input_bytes: int = 0
    """Gradient of a stage's input, of a micro-batch."""
    fresh_block_bytes: int = 0
    """A block's weights' gradients in the compute dtype, which the weights' half leaves beside the
    ones that FSDP2 accumulates, until the stage's next backward pass."""
    summed_matrix_bytes: int = 0
    """The last matrix of them, still there beside its first sum in the reduce dtype."""
    fresh_head_bytes: int = 0
    """The same of the head's weight."""
    waiting_head_bytes: int = 0
    """Gradient of the logits, of a micro-batch that waits for the weights' half; of a loss in
    pieces what it has made."""
    loss_bytes: int = 0
    """Logits and log-probabilities, which a split backward pass lets go of when it is through."""
    adds_in_place: bool = False
    """Gradients are added up in the compute dtype, or let go of when they have been added: only the
    first ones are beside."""

    def bytes_at(self, moment: Moment) -> int:
        """Of all blocks and inputs together."""
        fresh, head = moment.fresh, moment.fresh_head
        if self.adds_in_place:
            fresh, head = moment.first, moment.first_head
        return (
            moment.waiting * self.waiting_block_bytes
            + moment.inputs * self.input_bytes
            + fresh * self.fresh_block_bytes
            + head * self.fresh_head_bytes
            + moment.waiting_head * self.waiting_head_bytes
            + moment.loss * self.loss_bytes
        )


NOT_SPLIT = SplitBackward()


def split_backward(case: Case, stage: Stage, *, remade_bytes: int) -> SplitBackward:
    """What splitting costs the rank that holds `stage`; nothing under most schedules.

    `remade_bytes` are what a block that recomputes has made again for the inputs' half, and keeps
    for the weights'.
    """
    model, training, layout = case.model, case.training, case.layout
    is_split = layout.schedule in SPLIT_BACKWARD_SCHEDULES
    # beside what DualPipeV has in flight, but where it recomputes, its few halves are lost
    if layout.schedule not in ALL_SPLIT_SCHEDULES and not (is_split and remade_bytes):
        return NOT_SPLIT
    of = formats(training=training, layout=layout)
    # of no more micro-batches than stages all were seen to stay
    is_steady = layout.num_microbatches > layout.pp * layout.virtual_stages
    lets_go = has_lean_pipelines(training) and is_steady
    tokens = local_tokens(training=training, layout=layout)
    residual_tokens = -(-tokens // layout.tp) if layout.sequence_parallel else tokens
    largest = kind_views(model)[-1]
    output = output_gradient_bytes(on_device(block_work(case.of_blocks(largest))))
    blocks = replace(stage, has_embedding=False, has_head=False, parts=())
    elements = stage_elements(model=model, stage=blocks, tp=layout.tp) // max(1, stage.blocks)
    made = weight_gradient_bytes(
        model=largest, tp=layout.tp, element_bytes=of.computed, ep=layout.ep
    )
    sizes = head_sizes(case, stage)
    local_vocab = int(stage.has_head) * (model.vocab_rows(layout.tp) // layout.tp)
    waiting_head = tokens * local_vocab * of.computed
    loss = sizes.logits_elements * (FP32_BYTES + of.computed)
    sums_as_made = layout.sharding != "fsdp" or of.reduced == of.gathered
    if sizes.pieces is not None:
        waiting_head, loss = sizes.pieces.hidden + sizes.pieces.weight_gradient, 0
    return SplitBackward(
        waiting_head_bytes=waiting_head,
        loss_bytes=loss,
        waiting_block_bytes=output + remade_bytes,
        input_bytes=residual_tokens * model.hidden * of.residual,
        fresh_block_bytes=elements * of.gathered,
        summed_matrix_bytes=0 if sums_as_made else made.get("up") or made.get("down", 0),
        fresh_head_bytes=local_vocab * model.hidden * of.gathered,
        adds_in_place=sums_as_made or lets_go,
    )


def split_backward_bytes(case: Case, stage: Stage, *, remade_bytes: int) -> int:
    """The most that it comes to, where nobody asks when."""
    layout = case.layout
    later = [piece.blocks for piece in stage.pieces if not piece.has_embedding]
    most = Moment(
        "half",
        alive=0,
        graded=0,
        waiting=stage.waiting_blocks,
        inputs=len(later) * layout.num_microbatches,
        fresh=sum(later) if layout.schedule == "zbv" else max(later, default=0),
        fresh_head=int(stage.has_head),
    )
    return split_backward(case, stage, remade_bytes=remade_bytes).bytes_at(most)


@lru_cache(maxsize=4096)
def output_gradient_bytes(work: BlockWork) -> int:
    """The gradients of all layers' outputs in one block: of matrices and of norms, which return the
    residual stream before and behind a branch, and else all tokens' heads or latents."""
    operators, heads = block_operators(work), block_sizes(work).heads
    products = [each.product for each in operators if each.product]
    elements = sum(round(product.rows) * product.n for product in products)
    norms = sum(each.name.endswith("_norm") for each in operators)
    elements += norms * work.residual_tokens * work.model.hidden
    latents = latent_sizes(work, heads)
    of_heads = heads.query + heads.key if work.model.qk_norm else 0
    if work.model.mixer in "DM":
        of_heads = heads.value
    return elements * work.element_bytes + of_heads + latents.query + latents.key_value_normed
