"""Pipeline rules: what torch's schedules cannot run, in words.

Read in torch 2.13's torch/distributed/pipelining/schedules.py and tried (see the tests).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import LayoutConfig, PlanConfig
from .pipeline_stages import SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, rank_shares

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
ROUND_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Micro-batches go through them in equal rounds of about pp."""

SCHEDULES = (*ONE_STAGE_SCHEDULES, *ROUND_SCHEDULES, "looped_bfs", *V_SCHEDULES)


def pipeline_problems(plan: PlanConfig) -> list[str]:
    """What of the plan's pipeline cannot run."""
    layout = plan.layout
    if layout.pp == 1:
        if layout.schedule == "none" and layout.virtual_stages == 1 and not layout.stage_blocks:
            return []
        return [
            f"schedule {layout.schedule} with {layout.virtual_stages} virtual stages and pp 1 "
            "(without a pipeline: none, 1 and no stage_blocks)"
        ]
    if layout.schedule not in SCHEDULES:
        works = ", ".join(SCHEDULES)
        return [f"schedule {layout.schedule} with pp {layout.pp} ({works} work)"]
    return [
        *_stage_problems(plan),
        *_micro_batch_problems(layout),
        *_policy_problems(layout),
    ]


def _stage_problems(plan: PlanConfig) -> Iterator[str]:
    layout, layers = plan.layout, plan.model.layers
    virtual, stages = layout.virtual_stages, layout.pp * layout.virtual_stages
    needed = 1 if layout.schedule in ONE_STAGE_SCHEDULES else 2
    if needed != virtual and layout.schedule in (*ONE_STAGE_SCHEDULES, *V_SCHEDULES):
        yield f"schedule {layout.schedule} with virtual_stages {virtual} ({needed} works)"
        return
    blocks = layout.stage_blocks
    if not blocks:
        yield (
            f"pp {layout.pp} of a plan that does not name the blocks of its {stages} stages, as "
            "older plans do not (what fsdpplan emit-launch writes of them names them)"
        )
    elif len(blocks) != stages or sum(blocks) != layers:
        yield (
            f"stage_blocks {list(blocks)} for {stages} stages and {layers} blocks (one number a "
            "stage, which add up to all blocks)"
        )
    elif not all(_has_parameters(plan, rank) for rank in range(layout.pp)):
        yield f"stage_blocks {list(blocks)} (each rank needs a block, the embedding or the head)"


def _has_parameters(plan: PlanConfig, pp_rank: int) -> bool:
    shares = rank_shares(plan, pp_rank=pp_rank)
    return any(share.blocks or share.is_first or share.is_last for share in shares)


def _micro_batch_problems(layout: LayoutConfig) -> Iterator[str]:
    number, pp = layout.num_microbatches, layout.pp
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(layout.schedule, 1)
    if number < least:
        yield f"schedule {layout.schedule} with {number} micro-batches (at least {least} work)"
    rounds = max(1, number // pp)
    if layout.schedule in ROUND_SCHEDULES and number % rounds:
        yield (
            f"schedule {layout.schedule} with {number} micro-batches (they go in {rounds} rounds: "
            f"a multiple of {rounds} works)"
        )


def _policy_problems(layout: LayoutConfig) -> Iterator[str]:
    if layout.gradient_sync != "last":
        yield (
            f"gradient_sync {layout.gradient_sync} with pp {layout.pp} (last works: schedules "
            "reduce after the last micro-batch)"
        )
    if layout.sharding == "fsdp" and layout.reshard_after_forward != "never":
        reshard = layout.reshard_after_forward
        yield f"reshard_after_forward {reshard} with pp {layout.pp} (never works)"
    if layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    if layout.activation_checkpointing == "op":
        yield (
            f"activation_checkpointing op with schedule {layout.schedule}, which splits backward "
            "(none, attention and full work)"
        )
    if layout.compile:
        yield f"compile with schedule {layout.schedule}, which splits backward (--no-compile works)"
