"""Stages: the pipeline of a row, and how its software gives blocks to stages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fsdpplan.cost.schedule.stages import (
    even_stage_blocks,
    nanotron_head_blocks,
    threshold_stage_blocks,
    torchtitan_stage_blocks,
)
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.layout import Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.runtime import runtime_named
from fsdpplan.validate.runs.runtimes import Software
from fsdpplan.validate.runs.skipped import NotExpressed

MAX_STAGES = 512
"""Pipeline stages up to which a simulation ends in seconds."""

SCHEDULES: dict[str, Schedule] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved-1f1b": "interleaved_1f1b",
    "interleaved_1f1b": "interleaved_1f1b",
    "looped_bfs": "looped_bfs",
    "interleaved_zero_bubble": "interleaved_zero_bubble",
    "zbv": "zbv",
    "dualpipev": "dualpipev",
}
ONE_CHUNK = ("1f1b", "gpipe")
TWO_CHUNKS = ("zbv", "dualpipev")
UNSTATED_CHUNKS = 2
"""Chunks a rank where a table says interleaved and no more: the least, and torchtitan's choice."""

FINE_TUNING = re.compile(r"\btask=SFT\b", re.I)
"""Words in the notes on runs that do not follow the recipes of training from scratch."""

EDGES_HOLD_LESS = re.compile(
    r"one fewer layer in first/last|transformer\|embed|first and last stage hold a block less", re.I
)
"""Words in the notes on pipelines in which embedding and head count as a block each."""

CHUNKS_UNSTATED = re.compile(r"interleaving not in table|virtual stages not stated", re.I)
"""Words in the notes on pipelines whose chunks the source tuned and does not tell: they may be any
that divide a rank's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The part of a layout that is about pipeline stages."""

    schedule: Schedule = "none"
    virtual_stages: int = 1
    stage_blocks: tuple[int, ...] = ()


def halved_dual_pipe(run: MeasuredRun) -> tuple[MeasuredRun, list[str]]:
    """DualPipe as DualPipeV over half the ranks and twice the replicas.

    Its rank r and its rank p - 1 - r hold the same two stages, and half of the micro-batches come
    in from either end: two DualPipeV of p / 2 ranks, folded at the middle.
    Source: DeepSeek's DualPipe, README.md ("cut-in-half").
    """
    if run.schedule != "dualpipe" or run.pp % 2:
        return run, []
    dp_shard = None if run.dp_shard is None else 2 * run.dp_shard
    halved = replace(run, schedule="dualpipev", pp=run.pp // 2, dp_shard=dp_shard)
    return halved, [f"DualPipe of {run.pp} ranks as two DualPipeV of {run.pp // 2}, folded"]


def pipelines_of(
    run: MeasuredRun, *, model: Model, software: Software, said: list[str]
) -> tuple[Pipeline, ...]:
    """The schedules and stages that `run` may mean; what it leaves open is said."""
    if run.pp == 1:
        return (Pipeline(),)
    if run.virtual_stages is None and CHUNKS_UNSTATED.search(run.notes):
        return _any_chunks(run, model, software, said)
    schedule, chunks = _schedule(run, model, software, said)
    return (_pipeline(run, schedule, chunks, model=model, software=software, said=said),)


def _any_chunks(
    run: MeasuredRun, model: Model, software: Software, said: list[str]
) -> tuple[Pipeline, ...]:
    """1F1B, unless the row says interleaved, and interleaved with each number of chunks that
    divides the blocks of a rank."""
    counted = model.layers + (2 if EDGES_HOLD_LESS.search(run.notes) else 0)
    a_rank = counted // run.pp if counted % run.pp == 0 else 1
    chunks = [number for number in range(1, a_rank + 1) if a_rank % number == 0]
    if run.schedule not in ("", *ONE_CHUNK) and len(chunks) > 1:
        chunks = chunks[1:]
    chunks = [number for number in chunks if run.pp * number <= MAX_STAGES]
    said.append(f"{' or '.join(map(str, chunks))} chunks a rank, which the source does not say")
    one, several = SCHEDULES[run.schedule or "1f1b"], SCHEDULES[run.schedule or "interleaved-1f1b"]
    return tuple(
        _pipeline(
            run,
            one if number == 1 else several,
            number,
            model=model,
            software=software,
            said=[],
        )
        for number in chunks
    )


def _pipeline(
    run: MeasuredRun,
    schedule: Schedule,
    chunks: int,
    *,
    model: Model,
    software: Software,
    said: list[str],
) -> Pipeline:
    """With as many chunks a rank."""
    stages = run.pp * chunks
    if stages > MAX_STAGES:
        raise NotExpressed("too many pipeline stages", f"{stages}, over {MAX_STAGES}")
    edges = 2 if _edges_hold_less(run, model, software, stages) else 0
    if stages > model.layers + edges and software.stage_rule != "nanotron":
        raise NotExpressed("more pipeline stages than layers", f"{stages} for {model.layers}")
    blocks = _stage_blocks(run, model, software, stages)
    if blocks and len(set(blocks)) > 1:
        said.append(f"blocks by stage {_runs_of(blocks)}")
    return Pipeline(schedule=schedule, virtual_stages=chunks, stage_blocks=blocks)


def _schedule(
    run: MeasuredRun, model: Model, software: Software, said: list[str]
) -> tuple[Schedule, int]:
    """(schedule, chunks a rank)."""
    if run.schedule and run.schedule not in SCHEDULES:
        raise NotExpressed("this pipeline schedule is not priced", run.schedule)
    schedule, chunks = SCHEDULES[run.schedule or "1f1b"], run.virtual_stages or 1
    unstated = not run.schedule and run.virtual_stages is None
    if unstated and software.chunk_blocks and not FINE_TUNING.search(run.notes):
        most = model.layers // (run.pp * software.chunk_blocks)
        if most > 1 and model.layers % (run.pp * software.chunk_blocks) == 0:
            said.append(f"{most} chunks a rank, as many as {software.words}'s recipes take")
            return "interleaved_1f1b", most
    if chunks == 1 and schedule in TWO_CHUNKS:
        chunks = 2
    elif chunks == 1 and schedule not in ONE_CHUNK:
        chunks = UNSTATED_CHUNKS
        said.append(f"{chunks} stages a rank")
    elif chunks > 1 and schedule == "1f1b":
        schedule = "interleaved_1f1b"
    if not run.schedule:
        said.append(f"schedule {schedule}")
    if chunks > 1 and schedule == "gpipe":
        raise NotExpressed("this pipeline schedule is not priced", f"gpipe with vpp {chunks}")
    return schedule, chunks


def _stage_blocks(
    run: MeasuredRun, model: Model, software: Software, stages: int
) -> tuple[int, ...]:
    """Blocks of each stage; empty: as the planner would split them."""
    if _edges_hold_less(run, model, software, stages):
        # today's torchtitan splits so, too: embedding and head count as a block each
        return torchtitan_stage_blocks(layers=model.layers, stages=stages)
    match software.stage_rule:
        case "even":
            if model.layers % stages:
                return ()
            return even_stage_blocks(layers=model.layers, stages=stages)
        case "torchtitan":
            return _torchtitan(model.layers, stages)
        case "nanotron":
            return threshold_stage_blocks(
                layers=model.layers, stages=stages, head_blocks=nanotron_head_blocks(model)
            )


def _edges_hold_less(run: MeasuredRun, model: Model, software: Software, stages: int) -> bool:
    """Whether embedding and head count as a block each: by the notes, or because Megatron Core,
    whose stages all hold as many, can split the blocks in no other way.

    Source: Megatron-LM megatron/core/transformer/transformer_config.py, account_for_embedding_in_
    pipeline_split and account_for_loss_in_pipeline_split.
    """
    if EDGES_HOLD_LESS.search(run.notes):
        return True
    is_even = runtime_named(software.runtime).family == "megatron"
    return is_even and model.layers % stages > 0 and (model.layers + 2) % stages == 0


def _torchtitan(layers: int, stages: int) -> tuple[int, ...]:
    """torchtitan of 2024: the first stage holds no extra block, those behind it one each while
    there are any.

    Source: torchtitan f6a9daa1, torchtitan/parallelisms/pipelining_utils.py,
    generate_split_points.
    """
    shared, extra = divmod(layers, stages)
    blocks = [shared] + [shared + (1 if n < extra else 0) for n in range(stages - 2)]
    return (*blocks, layers - sum(blocks))


def _runs_of(blocks: tuple[int, ...]) -> str:
    """`15, 6 x 16, 15`."""
    words: list[tuple[int, int]] = []
    for number in blocks:
        if words and words[-1][1] == number:
            words[-1] = (words[-1][0] + 1, number)
        else:
            words.append((1, number))
    return ", ".join(f"{count} x {number}" if count > 1 else str(number) for count, number in words)
