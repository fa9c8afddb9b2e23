"""Pipeline rules: which schedules take how many stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.schedule.order import microbatches_refusal, stages_refusal
from fsdpplan.cost.schedule.stages import layout_rank_stages, most_stages
from fsdpplan.search.enumerate import LOOPED_SCHEDULES
from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model


def pipeline_problems(*, model: Model, layout: Layout) -> Iterator[Problem]:
    """What is wrong with the pipeline."""
    yield from _stages(layout, model)
    if layout.pp > 1:
        yield from _micro_batches(layout)
        yield from _reduction(layout)
        yield from _split_backward(layout)


def _stages(layout: Layout, model: Model) -> Iterator[Problem]:
    schedule, virtual_stages = layout.schedule, layout.virtual_stages
    refusal = stages_refusal(schedule=schedule, virtual_stages=virtual_stages)
    is_single = virtual_stages == 1 if schedule in LOOPED_SCHEDULES else virtual_stages > 1
    if refusal or (is_single and schedule in (*LOOPED_SCHEDULES, "none")):
        yield Problem(
            reason="stages a rank that the schedule does not take",
            sentence=refusal
            or f"schedule {schedule} does not go with virtual_stages {virtual_stages}: use "
            f"--virtual-stages of at least 2 with {', '.join(LOOPED_SCHEDULES)}, and 1 with others",
        )
    if layout.pp * virtual_stages > most_stages(model.layers) and layout.pp > 1:
        yield Problem(
            reason="more pipeline stages than blocks",
            sentence=f"{layout.pp * virtual_stages} pipeline stages for {model.layers} blocks, the "
            "embedding and the head; use a smaller --pp",
        )
    if layout.stage_blocks and sum(layout.stage_blocks) != model.layers:
        yield Problem(
            reason="stages do not hold all blocks",
            sentence=f"stage_blocks add up to {sum(layout.stage_blocks)}, but {model.name} has "
            f"{model.layers} blocks; use --stage-blocks that add up to it, or leave it out",
        )
    elif layout.stage_blocks and not refusal and _has_idle_rank(layout):
        yield Problem(
            reason="a pipeline rank without parameters",
            sentence=f"stage_blocks {list(layout.stage_blocks)} leave a rank without a block, the "
            "embedding or the head; give each rank a block",
        )


def _has_idle_rank(layout: Layout) -> bool:
    last = len(layout.stage_blocks) - 1
    filled = {0, last} | {index for index, blocks in enumerate(layout.stage_blocks) if blocks}
    return any(filled.isdisjoint(held) for held in layout_rank_stages(layout))


def _micro_batches(layout: Layout) -> Iterator[Problem]:
    number = layout.num_microbatches
    refusal = microbatches_refusal(schedule=layout.schedule, pp=layout.pp, num_microbatches=number)
    if refusal:
        yield Problem(
            reason="micro-batches that the schedule does not take",
            sentence=f"{refusal}; use another --micro-batch, --global-batch or --schedule",
        )


def _split_backward(layout: Layout) -> Iterator[Problem]:
    """What torch 2.13 cannot split into halves (tests/ground_truth/test_split_backward.py, and
    `_check_torch_compile_compatibility` in torch/distributed/pipelining/schedules.py)."""
    if layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    if layout.activation_checkpointing == "op":
        yield Problem(
            reason="split-backward schedules with recomputation of operations",
            sentence=f"schedule {layout.schedule} splits backward, which PyTorch 2.13 refuses for "
            "blocks that recompute some operations; use --activation-checkpointing full or none",
        )
    if layout.compile:
        yield Problem(
            reason="split-backward schedules with torch.compile",
            sentence=f"schedule {layout.schedule} splits backward, which PyTorch 2.13 refuses for "
            "compiled blocks; use --no-compile",
        )


def _reduction(layout: Layout) -> Iterator[Problem]:
    if layout.gradient_sync != "last":
        yield Problem(
            reason="a pipeline reduces after its last micro-batch",
            sentence=f"gradient_sync {layout.gradient_sync} with pp {layout.pp}: PyTorch's "
            "pipeline schedules reduce gradients after the last micro-batch; use "
            "--gradient-sync last",
        )
    if layout.sharding != "fsdp" or layout.reshard_after_forward == "never":
        return
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield Problem(
            reason="split-backward schedules with resharding",
            sentence=f"schedule {layout.schedule} splits backward: with reshard after forward "
            "PyTorch 2.13 trains silently wrong with it; use --reshard-after-forward never",
        )
    yield Problem(
        reason="FSDP inside a pipeline without reshard never",
        sentence="PyTorch's schedules drive fsdp inside a pipeline without resharding, and only "
        "that is priced; use --reshard-after-forward never",
    )
