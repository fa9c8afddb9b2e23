"""Pipelines that ranks run: every schedule, and what meets it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdpplan.trainer import train
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel import pipeline
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.rehearse.counting import CollectiveCounter, layout_axes
from fsdpplan.trainer.step import model_inputs, train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.text.packing import MicroBatch, pack
from tests.trainer import jobs, losses, plans

Layouts = dict[str, dict[str, Any]]

STEPS = 2
"""One update between them."""

PIPED: dict[str, Any] = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 4,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
TWO = {"virtual_stages": 2}
WHOLE = {"sharding": "ddp", "reshard_after_forward": "always"}
SCHEDULES: Layouts = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": TWO,
    "looped_bfs": TWO,
    "interleaved_zero_bubble": TWO,
    "zbv": TWO,
    "dualpipev": TWO,
}
SHARDED = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
COPIED = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")
SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}

MODELS: Layouts = {
    "plain": {"vocab": 64},
    "gpt2": {**plans.GPT2_STYLE, "vocab": 64},
    "tied": {"vocab": 64, "tied_embeddings": True},
}


def piped(schedule: str, **others: Any) -> dict[str, Any]:
    """A pipeline of 2 ranks under `schedule`."""
    return {**PIPED, **SCHEDULES[schedule], "schedule": schedule, **others}


FP32: dict[int, dict[str, Layouts]] = {
    2: {
        "plain": {
            **{f"whole_{name}": piped(name, **WHOLE) for name in SCHEDULES},
            "gpipe_one_micro_batch": piped("gpipe", num_microbatches=1),
            "zero_bubble_one_stage": piped("interleaved_zero_bubble", virtual_stages=1),
            "uneven": piped("1f1b", stage_blocks=[3, 1]),
            "head_alone": piped("1f1b", stage_blocks=[4, 0]),
            "embedding_alone": piped("zbv", stage_blocks=[0, 2, 2, 0]),
            "ends_alone": piped("interleaved_1f1b", stage_blocks=[0, 2, 2, 0]),
            "ends_alone_looped": piped("looped_bfs", stage_blocks=[0, 1, 3, 0]),
            "wrapped": piped("interleaved_1f1b", wrap_blocks=2, stage_blocks=[1, 1, 1, 1]),
            **{
                f"uneven_{name}": piped(name, stage_blocks=[1, 2, 1, 0])
                for name, options in SCHEDULES.items()
                if options
            },
            "checkpoint_full_first": piped(
                "interleaved_1f1b",
                activation_checkpointing="full",
                checkpoint_blocks=1,
                stage_blocks=[2, 0, 1, 1],
            ),
            "checkpoint_op_first": piped(
                "1f1b", activation_checkpointing="op", checkpoint_blocks=1
            ),
            "checkpoint_full": piped("interleaved_1f1b", activation_checkpointing="full"),
            **{
                f"checkpoint_full_{name}": piped(name, activation_checkpointing="full")
                for name in ("interleaved_zero_bubble", "zbv", "dualpipev")
            },
            "checkpoint_full_first_zbv": piped(
                "zbv", activation_checkpointing="full", checkpoint_blocks=1, **WHOLE
            ),
            "checkpoint_op": piped("1f1b", activation_checkpointing="op"),
            "checkpoint_attention": piped("zbv", activation_checkpointing="attention"),
            "offload": piped("1f1b", offload="cpu"),
            "loss_chunks": piped("zbv", loss_chunks=3),
        },
        "gpt2": {
            "gpt2": piped("1f1b"),
            "gpt2_zbv": piped("zbv"),
            "gpt2_whole": piped("interleaved_1f1b", **WHOLE),
        },
    },
    3: {
        "plain": {
            "three": piped("1f1b", pp=3),
            "three_ends_alone": piped("1f1b", pp=3, stage_blocks=[0, 4, 0]),
            "three_with_gaps": piped("zbv", pp=3, stage_blocks=[0, 2, 1, 0, 0, 1]),
        },
        "tied": {
            "three_tied": piped("1f1b", pp=3),
            "three_tied_ends_alone": piped("1f1b", pp=3, stage_blocks=[0, 4, 0]),
        },
    },
    4: {
        "plain": {
            **{f"sharded_{name}": piped(name, dp_shard=2) for name in SHARDED},
            **{f"copied_{name}": piped(name, dp_replicate=2, **WHOLE) for name in COPIED},
            "copied_in_small_buckets": piped(
                "1f1b", dp_replicate=2, ddp_bucket_bytes=20_000, **WHOLE
            ),
            "hsdp": piped("zbv", dp_replicate=2),
            "four": piped("1f1b", pp=4),
            "split_loss_chunks": piped("interleaved_1f1b", loss_chunks=2, **SPLIT),
            "ring": piped("interleaved_zero_bubble", cp=2),
            "split_checkpoint_full_zbv": piped("zbv", activation_checkpointing="full", **SPLIT),
        },
        "tied": {
            "tied_sharded": piped("1f1b", dp_shard=2),
            "tied_sharded_zbv": piped("zbv", dp_shard=2),
            "tied_split_whole": piped("zbv", **SPLIT, **WHOLE),
            "tied_copied": piped("interleaved_zero_bubble", dp_replicate=2, **WHOLE),
        },
    },
}
"""World -> model -> layouts that must lose as one process, in fp32."""

HALF: Layouts = {
    "bf16": piped("zbv", dp_shard=2),
    "bf16_whole": piped("interleaved_zero_bubble", dp_replicate=2, **WHOLE),
    "bf16_whole_checkpoint_full": piped(
        "zbv", dp_replicate=2, activation_checkpointing="full", **WHOLE
    ),
    "bf16_whole_reduce_bf16": piped("1f1b", dp_replicate=2, **WHOLE),
    "fp16": piped("1f1b", dp_shard=2),
}
"""Layouts in 16 bits; the name says in which, and in what gradients are reduced."""

DOCUMENTS: Layouts = {"four": piped("1f1b", pp=4), "split_zbv": piped("zbv", **SPLIT)}
"""Layouts that are given positions and documents."""

MESSAGES: Layouts = {
    **{name: piped(name, dp_shard=2) for name in ("interleaved_zero_bubble", "zbv")},
    "four": piped("1f1b", pp=4),
    "tied": piped("1f1b", dp_shard=2),
    "tied_split": piped("1f1b", **SPLIT),
    "tied_zbv": piped("zbv", dp_shard=2),
    "copied": piped("1f1b", dp_replicate=2, ddp_bucket_bytes=20_000, **WHOLE),
    "copied_zbv": piped("zbv", dp_replicate=2, ddp_bucket_bytes=20_000, **WHOLE),
}
"""Layouts whose collectives are counted."""


def counted_model(name: str) -> dict[str, Any]:
    """The model that a layout of MESSAGES is counted for."""
    return MODELS["tied" if "tied" in name else "plain"]


def half_text(name: str) -> str:
    """The plan of a layout of HALF."""
    reduce_dtype = "bf16" if "reduce_bf16" in name else "fp32"
    training = {"precision": name.split("_")[0], "reduce_dtype": reduce_dtype}
    return plans.plan_text(model=MODELS["plain"], training=training, **HALF[name])


def counted(text: str) -> list[dict[str, list[int]]]:
    """For each rank, (count, bytes) of the second step's collectives by "name axis dtype"."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    counter = CollectiveCounter(layout_axes(assembled.meshes, plan.layout))
    batches = micro_batches(sequences, plan, first=0, rank=dist.get_rank(), device=losses.CPU)
    with counter:
        for _ in range(2):
            counter.forget()
            train_step(assembled, optimizer, batches, plan, clip_norm=1.0)
    mine = {
        f"{collective} {axis} {dtype}": [row.count, row.bytes]
        for (collective, axis, _, dtype), row in counter.rows.items()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def documents(text: str) -> tuple[float, float]:
    """Loss and gradient norm of sequences that hold two documents each."""
    plan = parse_plan(text)
    batch = two_documents(plan)
    parts = [part for part in batch if part is not None]
    cut = zip(*(part.chunk(plan.layout.num_microbatches) for part in parts), strict=True)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    output = train_step(
        assembled, optimizer, [MicroBatch(*part) for part in cut], plan, clip_norm=math.inf
    )
    loss = output.loss.clone()
    dist.all_reduce(loss)
    loss *= plan.layout.pp / dist.get_world_size()
    return loss.item(), output.grad_norm.item()


def documents_reference(text: str) -> tuple[float, float]:
    """The same in one process."""
    plan = parse_plan(text)
    batch = two_documents(plan)
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    logits = decoder(batch.tokens, **model_inputs(batch))
    loss = next_token_loss(logits, batch.targets)
    loss.backward()
    return loss.item(), torch.nn.utils.clip_grad_norm_(decoder.parameters(), math.inf).item()


def two_documents(plan: PlanConfig) -> MicroBatch:
    """A step's sequences, each cut at another place, and once more in every second one."""
    sequences = open_sequences(plan, None, seed=0)
    rows = torch.stack([sequences(number) for number in range(plan.training.global_batch)])
    starts = torch.zeros(rows.shape, dtype=torch.bool)
    for row in range(len(rows)):
        starts[row, 5 + row] = True
        starts[row, 3] = row % 2 > 0
    return pack(rows, starts)._replace(targets=rows[:, 1:].contiguous())


def fail_on_the_last_stage(out: Path) -> None:
    """A job of which one rank raises in the middle of a step."""

    def raise_error(*_: Any) -> torch.Tensor:
        raise ArithmeticError("the last stage fails")

    pipeline.Pipeline._loss = raise_error  # type: ignore[method-assign]
    out.write_text(plans.plan_text(**piped("1f1b")), encoding="utf-8")
    train.main(["--plan", str(out), "--steps", "1"])


def others() -> dict[str, Any]:
    """What else 4 ranks measure."""
    results: dict[str, Any] = {}
    for name in filter(jobs.is_asked, HALF):
        results[name] = losses.measure(half_text(name))
    for name, layout in jobs.asked_of(MESSAGES).items():
        text = plans.plan_text(model=counted_model(name), **layout)
        results[f"counted_{name}"] = counted(text)
    for name, layout in jobs.asked_of(DOCUMENTS).items():
        text = plans.plan_text(model=MODELS["plain"], **layout)
        results[f"documents_{name}"] = documents(text), documents_reference(text)
    return results


def measure_layouts(out: Path) -> None:
    """Every fp32 layout of this world, and what 4 ranks measure besides; rank 0 writes."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for model, layouts in FP32[dist.get_world_size()].items():
        results[f"reference_{model}"] = losses.reference(MODELS[model])
        for name, layout in jobs.asked_of(layouts).items():
            text = plans.plan_text(model=MODELS[model], **layout)
            results[name] = losses.measure(text, steps=STEPS)
    if dist.get_world_size() == 4:
        results |= others()
    jobs.leave_with(results, out)
