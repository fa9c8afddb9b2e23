"""A training run: set up, step, report, save, leave."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .assemble import Assembled, assemble
from .checkpoint import Progress, latest_checkpoint, load_checkpoint, read_progress, save_checkpoint
from .config import PlanConfig, load_plan
from .data import Sequences, micro_batches, open_sequences
from .distributed import leave, require_world, start
from .errors import RankError, TrainerError, TrainingDiverged
from .metrics import MemoryMeter, Metrics, as_line, device_name, step_rates, summary
from .options import Options, parse_options
from .signals import StopRequest
from .step import (
    Recipe,
    StepOutput,
    learning_rate_at,
    make_optimizer,
    set_learning_rate,
    train_step,
)
from .support import require_runnable


@dataclass(slots=True, kw_only=True)
class Run:
    """A run under way."""

    plan: PlanConfig
    options: Options
    recipe: Recipe
    device: torch.device
    assembled: Assembled
    optimizer: torch.optim.Optimizer
    sequences: Sequences
    stop: StopRequest
    metrics: Metrics
    memory: MemoryMeter
    progress: Progress
    saved_step: int
    """Step of the newest checkpoint; where the run began if it has written none."""
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process."""
    options = parse_options(arguments)
    try:
        run_training(options)
        exit_code = 0
    except TrainerError as error:
        complain(f"error: {error}", every_rank=isinstance(error, RankError))
        exit_code = error.exit_code
    except torch.OutOfMemoryError as error:
        # Its first sentences: what was tried, how much the device has, how much is free.
        complain(
            f"error: {' '.join(str(error).split())[:400]} -- plan again with a smaller "
            "--micro-batch or more --activation-checkpointing",
            every_rank=True,
        )
        exit_code = 1
    except KeyboardInterrupt:
        exit_code = 130
    except Exception:
        # A fault of ours or of the cluster: whoever looks for it needs all ranks' tracebacks.
        traceback.print_exc()
        exit_code = 1
    leave(exit_code)


def complain(message: str, *, every_rank: bool = False) -> None:
    """Print an error once a node, or on each rank."""
    if every_rank:
        print(f"[rank {os.environ.get('RANK', '0')}] {message}", file=sys.stderr)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)


def run_training(options: Options) -> None:
    """Train to the last step, or until a signal."""
    stop = StopRequest()
    stop.listen()
    plan = load_plan(options.plan)
    require_runnable(plan)
    require_world(plan)
    run = set_up(plan, options, stop)
    announce(run)
    stop_signal = 0
    while run.progress.step < options.steps and not stop_signal:
        stop_signal = one_step(run)
        every = options.checkpoint_every
        if every and run.progress.step % every == 0:
            save(run)
    save(run)
    conclude(run, stop_signal)


def set_up(plan: PlanConfig, options: Options, stop: StopRequest) -> Run:
    """Everything up to the first step."""
    sequences = open_sequences(plan, options.data, seed=options.seed)
    device = start(plan)
    memory = MemoryMeter(device)
    recipe = Recipe(
        steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
    )
    assembled = assemble(plan, device, seed=options.seed)
    optimizer = make_optimizer(assembled.model, recipe, fused=device.type == "cuda")
    progress = begin_or_resume(plan, options, assembled.model, optimizer)
    return Run(
        plan=plan,
        options=options,
        recipe=recipe,
        device=device,
        assembled=assembled,
        optimizer=optimizer,
        sequences=sequences,
        stop=stop,
        metrics=Metrics(options.metrics, first_step=progress.step),
        memory=memory,
        progress=progress,
        saved_step=progress.step,
    )


def begin_or_resume(
    plan: PlanConfig, options: Options, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Where the run starts: the newest checkpoint, if there is one, else step 0."""
    beginning = Progress(
        step=0,
        sequences=0,
        seed=options.seed,
        seq_len=plan.training.seq_len,
        steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
    )
    folder = options.checkpoint_dir
    path = None if folder is None else latest_checkpoint(folder)
    if path is None:
        if options.resume == "required":
            raise TrainerError(f"{folder} has no checkpoint to resume from; use --resume auto")
        return beginning
    if options.resume == "never":
        raise TrainerError(f"{folder} has a checkpoint already: take another --checkpoint-dir")
    found = read_progress(path)
    if (found.seed, found.seq_len) != (options.seed, plan.training.seq_len):
        raise TrainerError(
            f"{path} was trained with --seed {found.seed} and sequences of {found.seq_len}, this "
            f"run has --seed {options.seed} and {plan.training.seq_len}: the data would not go on "
            "where it stopped; use the same, or another --checkpoint-dir"
        )
    load_checkpoint(path, model, optimizer)
    return replace(beginning, step=found.step, sequences=found.sequences)


def one_step(run: Run) -> int:
    """Train one step and report it; returns the signal that some rank got, or 0."""
    began = time.perf_counter()
    rate = learning_rate_at(run.progress.step, run.recipe)
    set_learning_rate(run.optimizer, rate)
    batches = micro_batches(
        run.sequences,
        run.plan,
        first=run.progress.sequences,
        rank=dist.get_rank(),
        device=run.device,
    )
    output = train_step(
        run.assembled, run.optimizer, batches, run.plan, clip_norm=run.recipe.clip_norm
    )
    loss, grad_norm, stop_signal = settle(output, run.stop, stages=run.plan.layout.pp)
    seconds = time.perf_counter() - began
    run.progress = replace(
        run.progress,
        step=run.progress.step + 1,
        sequences=run.progress.sequences + run.plan.training.global_batch,
    )
    run.step_seconds.append(seconds)
    run.losses.append(loss)
    report(run, loss=loss, grad_norm=grad_norm, learning_rate=rate)
    if not math.isfinite(loss):
        raise TrainingDiverged(
            f"the loss is {loss} in step {run.progress.step}: use a smaller --learning-rate or "
            "more --warmup-steps"
        )
    return stop_signal


def settle(output: StepOutput, stop: StopRequest, *, stages: int) -> tuple[float, float, int]:
    """(loss over all ranks, gradient norm, highest stop signal of any rank); waits for the device.

    One all-reduce carries both, so that all ranks leave after the same step. Of `stages` pipeline
    ranks one has the loss, the others 0.
    """
    ranks = dist.get_world_size()
    votes = torch.zeros(1 + ranks, device=output.loss.device)
    votes[0] = output.loss
    votes[1 + dist.get_rank()] = stop.number
    dist.all_reduce(votes)
    loss, *signals = votes.tolist()
    return loss * stages / ranks, float(output.grad_norm), int(max(signals))


def report(run: Run, *, loss: float, grad_norm: float, learning_rate: float) -> None:
    """One JSON line and one line for people."""
    rates = step_rates(run.plan, run.step_seconds[-1])
    memory = run.memory.peaks()
    run.metrics.emit(
        "step",
        step=run.progress.step,
        loss=loss,
        **rates,
        **memory,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
    )
    run.metrics.say(
        f"step {run.progress.step}/{run.options.steps}  loss {loss:.4f}  "
        f"{rates['step_seconds']:.3f} s  {rates['tokens_per_second']:,.0f} tokens/s  "
        f"MFU {100 * rates['mfu_fraction']:.1f} %  "
        f"memory {memory['allocated_bytes'] / 2**30:.2f} GiB  norm {grad_norm:.3f}"
    )


def announce(run: Run) -> None:
    """Say what begins."""
    layout, step = run.plan.layout, run.progress.step
    run.metrics.emit(
        "start",
        step=step,
        steps=run.options.steps,
        world=layout.world,
        model=run.plan.model.name,
        sharding=layout.sharding,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        device=device_name(run.device),
    )
    where = "from the beginning" if step == 0 else f"resumed after step {step}"
    run.metrics.say(
        f"{run.plan.model.name}: {layout.sharding}, dp_replicate {layout.dp_replicate}, dp_shard "
        f"{layout.dp_shard}, {layout.world} processes on {device_name(run.device)}; {where}"
    )
    if layout.compile and run.device.type == "cpu":
        run.metrics.say("torch.compile is off on CPU")


def save(run: Run) -> None:
    """Publish a checkpoint, unless there is nowhere to or nothing new."""
    folder = run.options.checkpoint_dir
    if folder is None or run.progress.step == run.saved_step:
        return
    began = time.perf_counter()
    path = save_checkpoint(
        folder, run.assembled.model, run.optimizer, run.progress, keep=run.options.checkpoint_keep
    )
    run.saved_step = run.progress.step
    seconds = time.perf_counter() - began
    run.metrics.emit("checkpoint", step=run.progress.step, path=str(path), seconds=seconds)
    run.metrics.say(f"saved {path} in {seconds:.2f} s")


def conclude(run: Run, stop_signal: int) -> None:
    """The summary: for people, and as JSON to the metrics file or, without one, to stdout."""
    totals = summary(run.plan, run.step_seconds, run.losses, run.memory)
    totals = {"step": run.progress.step, "stopped_by_signal": stop_signal or None, **totals}
    run.metrics.emit("summary", **totals)
    if totals["steps_measured"]:
        run.metrics.say(
            f"median of {totals['steps_measured']} steps: {totals['step_seconds']:.3f} s, "
            f"{totals['tokens_per_second']:,.0f} tokens/s, MFU {totals['mfu_fraction']:.1%}; loss "
            f"{totals['first_loss']:.4f} to {totals['last_loss']:.4f}"
        )
    if run.options.metrics is None:
        run.metrics.say(as_line("summary", totals))
