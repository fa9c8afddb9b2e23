"""`--rehearse RANKS --report FILE`: rehearse ranks side by side, and write what they did."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..checkpoint.whole_file import write_whole
from ..config import PlanConfig
from ..errors import TrainerError
from ..options import Options
from ..parallel.mesh import place
from ..precision import precisions
from ..train import what_to_train_on
from .counting import Call
from .mismatch import GroupCalls, mismatches
from .rank import RankRehearsal, Stage, rehearse_rank

Document = dict[str, Any]

MODE = "__torch_dispatch__"
"""Of what watches the program: never where it went wrong."""

MOST_PROCESSES = 2
"""Ranks that are rehearsed at once: each takes up to 1 GB of memory."""

CUDA = "tensors are CPU tensors, which keep for backward what CUDA's kernels do"
COMPILED = "blocks are not compiled, so they keep more for backward than compiled ones"
RING = "attention exchanges heads (all-to-all), where CUDA passes keys and values around a ring"
REDUCER = "DDP's C++ reducer is stood in for by its buckets and their reductions"

OUTSIDE = "workspaces of CUDA's kernels, NCCL's buffers, fragmentation, and speed"
FP8 = "steps in fp8, their casts and scales: a CPU has no such products, and steps are in bf16"
FP8_GATHERS = "gathers of weights in fp8, and the all-reduce of their scales"
UPDATE_8BIT = (
    "the update of 8-bit AdamW, which is compiled: its state is made, its arithmetic is not run"
)
HOST = "copies between device and host, and what they keep on the device meanwhile"
CHUNKS = "chunks in which async TP runs collectives beside products"


OUTSIDE_OF_STEPS = {
    "eval_data": "the evaluation on held-out data",
    "init_from": "the reading of published weights",
    "export_hf": "the export of the trained model",
    "export_peft": "the export of the trained adapters",
    "checkpoint_dir": "the writing and reading of checkpoints, beyond the state that they hold",
    "profile": "the profile",
    "memory_snapshot": "the record of allocations",
}
"""What these options of the trainer do between steps."""


class RehearsalFailed(TrainerError):
    """A rank could not go through; the job would not either."""

    exit_code = 1


def rehearse_ranks(plan: PlanConfig, options: Options) -> None:
    """Rehearse the ranks that the options name, report, raise if one failed."""
    report = _report_of_build(plan, options) if options.build else report_of_plan(plan, options)
    if options.report is None:
        print(json.dumps(report, indent=1))
    else:
        write_report(options.report, report)
    for failure in failures(report):
        raise RehearsalFailed(failure)


def _report_of_build(plan: PlanConfig, options: Options) -> Document:
    from .own_model import load_build, rehearse_model

    assert options.build is not None
    return rehearse_model(load_build(options.build), plan, ranks=options.rehearse)


def report_of_plan(plan: PlanConfig, options: Options) -> Document:
    sequences = what_to_train_on(plan, options)
    # one kernel: lists of operators, and loops, read the number of the step
    recipe = replace(options.recipe(plan), adamw="fused")

    def one(rank: int, stage: Stage) -> RankRehearsal:
        return rehearse_rank(
            plan,
            rank,
            sequences=sequences,
            recipe=recipe,
            packs=options.pack,
            on_spike=options.on_spike,
            stage=stage,
        )

    report = rehearsed(plan, options.rehearse, one)
    if options.adamw != "fused":
        report["not_seen"].append(f"what --adamw {options.adamw} needs beside one kernel")
    report["not_seen"] += [
        words for name, words in OUTSIDE_OF_STEPS.items() if getattr(options, name)
    ]
    return report


def rehearsed(
    plan: PlanConfig, ranks: Sequence[int], one: Callable[[int, Stage], RankRehearsal]
) -> Document:
    """The report of `ranks`, which `one` rehearses."""
    outside = [rank for rank in ranks if rank >= plan.layout.world]
    if outside:
        raise TrainerError(
            f"there is no rank {outside[0]}: take ranks from 0 to {plan.layout.world - 1}"
        )
    found = side_by_side(ranks, lambda rank: rank_document(plan, rank, one))
    calls_of = {each["rank"]: _group_calls(each) for each in found if each["error"] is None}
    return {
        "world": plan.layout.world,
        "torch_version": torch.__version__,
        "differences": differences(plan),
        "not_seen": not_seen(plan),
        "mismatches": mismatches(plan.layout, calls_of),
        "ranks": [_in_short(each) for each in found],
    }


def differences(plan: PlanConfig) -> list[str]:
    """What a rehearsal of `plan` does in another way than its devices will, in sentences."""
    layout = plan.layout
    on_cuda = plan.cluster.device.kind == "cuda"
    has_reducer = layout.sharding == "ddp" and layout.pp == 1 and layout.dp_replicate > 1
    said = {
        CUDA: on_cuda,
        COMPILED: on_cuda and layout.compile,
        RING: on_cuda and layout.cp > 1 and not plan.trades_heads,
        REDUCER: has_reducer,
    }
    return [sentence for sentence, holds in said.items() if holds]


def not_seen(plan: PlanConfig) -> list[str]:
    """What of a job of `plan` its rehearsal says nothing about."""
    training, layout = plan.training, plan.layout
    on_cuda = plan.cluster.device.kind == "cuda"
    has_fp8 = "fp8" in precisions(training)
    said = {
        FP8: has_fp8,
        FP8_GATHERS: has_fp8 and training.fp8_all_gather,
        UPDATE_8BIT: training.optimizer == "adamw_8bit",
        HOST: on_cuda and layout.offload == "cpu",
        CHUNKS: on_cuda and layout.async_tp,
        OUTSIDE: on_cuda,
    }
    return [words for words, holds in said.items() if holds]


def failures(report: Document) -> list[str]:
    """Why the job would not run, in sentences."""
    errors = [f"rank {each['rank']}: {each['error']}" for each in report["ranks"] if each["error"]]
    return errors + list(report["mismatches"])


def write_report(path: Path, report: Document) -> None:
    """Write JSON, whole or not at all."""
    try:
        write_whole(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise TrainerError(
            f"cannot write the report {path}: {error}; choose another --report"
        ) from error


def side_by_side(ranks: Sequence[int], one: Callable[[int], Document]) -> list[Document]:
    """`one(rank)` of all ranks, in as many processes as there are cores, up to a few.

    They are forked: torch is imported once, and has run nothing yet.
    """
    processes = min(len(ranks), MOST_PROCESSES, cores())
    if processes < 2:
        end_with_parent(os.getppid())
        return [one(rank) for rank in ranks]
    with TemporaryDirectory(prefix="fsdpplan-rehearse-") as folder:
        children = [
            _forked(ranks[first::processes], one, Path(folder)) for first in range(processes)
        ]
        end_with_parent(os.getppid())  # after the fork: a thread would not be copied
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return [_read(Path(folder), rank, codes[i % processes]) for i, rank in enumerate(ranks)]


def end_with_parent(parent: int) -> None:
    """End this process soon after `parent`, who started it, has, or had by now: nobody else waits
    for a rehearsal."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _forked(ranks: Sequence[int], one: Callable[[int], Document], folder: Path) -> int:
    """Start a process that rehearses `ranks` one after another; its number."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    code = 1
    try:
        end_with_parent(parent)
        torch.set_num_threads(1)
        for rank in ranks:
            (folder / f"{rank}.json").write_text(json.dumps(one(rank)), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _read(folder: Path, rank: int, exit_code: int) -> Document:
    try:
        document: Document = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return _unfinished(rank, f"its process ended with {how}; this host may lack memory")
    return document


def rank_document(
    plan: PlanConfig, rank: int, one: Callable[[int, Stage], RankRehearsal]
) -> Document:
    """What a rank did, or the sentence that says why it did not."""
    began, stage = time.perf_counter(), Stage()
    try:
        found = one(rank, stage)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        return _unfinished(rank, sentence(error, stage))
    rows = [
        {"collective": name, "axis": axis, "ranks": ranks, "dtype": dtype, **asdict(row)}
        for (name, axis, ranks, dtype), row in sorted(found.rows.items())
    ]
    return {
        "rank": rank,
        "error": None,
        "place": asdict(place(plan.layout, rank)),
        "collectives": rows,
        "groups": [
            {"axis": axis, "members": list(ranks), "calls": [list(call) for call in calls]}
            for (axis, ranks), calls in found.calls.items()
        ],
        "peak_bytes": found.peak_bytes,
        "peak_bytes_of": found.peak_bytes_of,
        "state_bytes": found.state_bytes,
        "parameters": found.parameters,
        "without_gradient": list(found.without_gradient),
        "seconds": round(time.perf_counter() - began, 3),
    }


def sentence(error: Exception, stage: Stage) -> str:
    """What went wrong, where in the program, and in which part of the rehearsal."""
    message = " ".join(str(error).split())[:400] or type(error).__name__
    if isinstance(error, TrainerError):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = str(Path(torch.__file__).parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((torch_folder, "<")) and frame.name != MODE
    ]
    at = f"{Path(own[-1].filename).name} line {own[-1].lineno} ({own[-1].line})" if own else "torch"
    return f"in {stage.name}, at {at}: {type(error).__name__}: {message}"


def _unfinished(rank: int, why: str) -> Document:
    return {"rank": rank, "error": why, "collectives": [], "groups": [], "without_gradient": []}


def _group_calls(document: Document) -> GroupCalls:
    return {
        (group["axis"], tuple(group["members"])): [Call(*call) for call in group["calls"]]
        for group in document["groups"]
    }


def _in_short(document: Document) -> Document:
    """The same with, of each group, its shape and a signature of its calls in order."""
    return {**document, "groups": [_group_in_short(group) for group in document["groups"]]}


def _group_in_short(group: Document) -> Document:
    members = group["members"]
    signature = hashlib.sha256(json.dumps(group["calls"]).encode()).hexdigest()
    stride = members[1] - members[0] if len(members) > 1 else 1
    regular = members == list(range(members[0], members[0] + stride * len(members), stride))
    return {
        "axis": group["axis"],
        "first": members[0],
        "ranks": len(members),
        "stride": stride if regular else None,
        "calls": len(group["calls"]),
        "signature": signature,
    }
