"""A training run: set up, step, report, save, leave."""

from __future__ import annotations

import math
import os
import socket
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
from .checkpoint import CheckpointFailed, Checkpoints, Saved
from .config import LayoutConfig, PlanConfig, load_plan, plan_sha256, plan_text
from .data import (
    Sequences,
    data_state,
    micro_batches,
    open_sequences,
    require_same_data,
)
from .distributed import leave, require_world, start
from .errors import OutOfMemory, RankError, TrainerError, TrainingDiverged
from .metrics import (
    MemoryMeter,
    Metrics,
    append_line,
    as_line,
    device_name,
    step_rates,
    summary,
)
from .oom import device_memory, is_out_of_memory, postmortem, postmortem_words, predicted_memory
from .optimizer import Recipe, make_optimizer, set_learning_rate
from .options import Options, parse_options
from .progress import Progress
from .rng import seed_generators
from .scaler import LEAST_SCALE, scaler_state
from .signals import StopRequest
from .step import StepOutput, learning_rate_at, train_step
from .support import require_runnable
from .watch import Watch

RANK_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Degrees whose product is the world, outermost first."""


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
    watch: Watch
    progress: Progress
    checkpoints: Checkpoints | None
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
    if not options.rehearse:  # which has no step to finish
        stop.listen()
    plan = load_plan(options.plan)
    require_runnable(plan)
    if options.rehearse:
        # Imported where it is needed: training needs nothing fake.
        from .rehearsal import rehearse_ranks

        rehearse_ranks(plan, options)
        return
    require_world(plan)
    attempt = Attempt()
    try:
        train(plan, options, stop, attempt)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, plan, options, attempt.run) from error
    finally:
        if attempt.run is not None:
            attempt.run.watch.stop()


@dataclass(slots=True)
class Attempt:
    """How far a run came."""

    run: Run | None = None


def train(plan: PlanConfig, options: Options, stop: StopRequest, attempt: Attempt) -> None:
    """Train to the last step, or until a signal; `attempt` knows the run once it is set up."""
    attempt.run = run = set_up(plan, options, stop)
    announce(run)
    run.watch.start(run.progress.step)
    stop_signal = 0
    while run.progress.step < options.steps and not stop_signal:
        try:
            stop_signal = one_step(run)
        except TrainingDiverged:
            # Every rank is here, and what is being saved is of a step before.
            if run.checkpoints is not None:
                told(run, run.checkpoints.wait())
            raise
        every = options.checkpoint_every
        if every and run.progress.step % every == 0:
            save(run)
    unsaved = save_the_end(run)
    conclude(run, stop_signal)
    if unsaved:
        raise CheckpointFailed(unsaved)


def set_up(plan: PlanConfig, options: Options, stop: StopRequest) -> Run:
    """Everything up to the first step."""
    sequences = open_sequences(plan, options.data, seed=options.seed, tokenizer=options.tokenizer)
    device = start(plan)
    memory = MemoryMeter(device)
    recipe = Recipe(
        steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        optimizer=plan.training.optimizer,
        adamw=options.adamw,
    )
    assembled = assemble(plan, device, seed=options.seed)
    optimizer = make_optimizer(assembled.model, recipe)
    checkpoints = open_checkpoints(plan, options)
    progress = begin_or_resume(plan, options, checkpoints, assembled.model, optimizer)
    if assembled.scaler is not None and progress.scaler_state:
        assembled.scaler.load(progress.scaler_state)
    require_same_data(progress.data_state, sequences)
    progress = replace(progress, data_state=data_state(sequences, packs=options.pack))
    metrics = Metrics(options.metrics, first_step=progress.step)
    return Run(
        plan=plan,
        options=options,
        recipe=recipe,
        device=device,
        assembled=assembled,
        optimizer=optimizer,
        sequences=sequences,
        stop=stop,
        metrics=metrics,
        memory=memory,
        watch=Watch(plan, options, device, assembled, metrics),
        progress=progress,
        checkpoints=checkpoints,
    )


def open_checkpoints(plan: PlanConfig, options: Options) -> Checkpoints | None:
    """The folder of the run's checkpoints, if it keeps any."""
    if options.checkpoint_dir is None:
        return None
    return Checkpoints(
        options.checkpoint_dir,
        plan,
        keep=options.checkpoint_keep,
        background=options.checkpoint_async,
    )


def begin_or_resume(
    plan: PlanConfig,
    options: Options,
    checkpoints: Checkpoints | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Where the run starts: the newest good checkpoint, if there is one, else step 0."""
    beginning = Progress(
        step=0,
        sequences=0,
        seed=options.seed,
        seq_len=plan.training.seq_len,
        steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
    )
    seed_generators(seed=options.seed, step=0, rank=dist.get_rank())
    if checkpoints is None:
        return beginning
    found, remarks = checkpoints.begin(model, optimizer, seed=options.seed, resume=options.resume)
    for remark in remarks:
        complain(f"checkpoint: {remark}")
    if found is None:
        return beginning
    return replace(
        beginning,
        step=found.step,
        sequences=found.sequences,
        data_state=found.data_state,
        scaler_state=found.scaler_state,
    )


def one_step(run: Run) -> int:
    """Train one step and report it; returns the signal that some rank got, or 0."""
    began = time.perf_counter()
    run.watch.before(run.progress.step + 1)
    own_seconds = run.watch.own_time.take()
    rate = learning_rate_at(run.progress.step, run.recipe)
    set_learning_rate(run.optimizer, rate)
    data_began = time.perf_counter()
    batches = micro_batches(
        run.sequences,
        run.plan,
        first=run.progress.sequences,
        rank=dist.get_rank(),
        device=run.device,
        packs=run.options.pack,
    )
    run.watch.own_time.data_seconds = time.perf_counter() - data_began
    output = train_step(
        run.assembled, run.optimizer, batches, run.plan, clip_norm=run.recipe.clip_norm
    )
    loss, grad_norm, stop_signal, all_own_seconds = settle(
        output, run.stop, stages=run.plan.layout.pp, own_seconds=own_seconds
    )
    seconds = time.perf_counter() - began
    run.progress = replace(
        run.progress,
        step=run.progress.step + 1,
        sequences=run.progress.sequences + run.plan.training.global_batch,
        scaler_state=scaler_state(run.assembled.scaler),
    )
    run.step_seconds.append(seconds)
    run.losses.append(loss)
    busiest = output.expert_imbalance
    report(
        run,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=rate,
        expert_imbalance=None if busiest is None else float(busiest),
    )
    run.watch.after(run.progress.step, seconds=seconds, own_seconds=all_own_seconds)
    if run.checkpoints is not None:
        told(run, run.checkpoints.ended())
    require_numbers(run.progress, loss=loss, grad_norm=grad_norm)
    return stop_signal


def require_numbers(progress: Progress, *, loss: float, grad_norm: float) -> None:
    """Raise before anything is saved of a run whose weights are numbers no longer."""
    scale = progress.scaler_state.get("scale")
    # with a scaler, a step whose gradients overflowed changed no weight
    values = {"loss": loss} if scale is not None else {"loss": loss, "gradient norm": grad_norm}
    for name, value in values.items():
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"the {name} is {value} in step {progress.step}: use a smaller --learning-rate or "
                "more --warmup-steps"
            )
    if scale is not None and scale < LEAST_SCALE:
        raise TrainingDiverged(
            f"fp16 gradients overflow at every loss scale up to step {progress.step}: plan "
            "again with --precision bf16, or use a smaller --learning-rate"
        )


def settle(
    output: StepOutput, stop: StopRequest, *, stages: int, own_seconds: float
) -> tuple[float, float, int, list[float]]:
    """(loss over all ranks, gradient norm, highest stop signal of any rank, what each rank gave as
    `own_seconds`); waits for the device.

    One all-reduce carries all, so that all ranks leave after the same step. Of `stages` pipeline
    ranks one has the loss, the others 0.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    votes = torch.zeros(1 + 2 * ranks, device=output.loss.device)
    votes[0] = output.loss
    votes[1 + rank] = stop.number
    votes[1 + ranks + rank] = own_seconds
    dist.all_reduce(votes)
    loss, *told_by_rank = votes.tolist()
    signals, seconds = told_by_rank[:ranks], told_by_rank[ranks:]
    return loss * stages / ranks, float(output.grad_norm), int(max(signals)), seconds


def report(
    run: Run,
    *,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    expert_imbalance: float | None,
) -> None:
    """One JSON line and one line for people."""
    rates = step_rates(run.plan, run.step_seconds[-1])
    memory = run.memory.peaks()
    values = {
        "step": run.progress.step,
        "loss": loss,
        **rates,
        "data_seconds": run.watch.own_time.data_seconds,
        **memory,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": run.progress.scaler_state.get("scale"),
        "expert_imbalance": expert_imbalance,
    }
    run.metrics.emit("step", **values)
    run.watch.reported(values)
    run.metrics.say(
        f"step {run.progress.step}/{run.options.steps}  loss {loss:.4f}  "
        f"{rates['step_seconds']:.3f} s  {rates['tokens_per_second']:,.0f} tokens/s  "
        f"MFU {100 * rates['mfu_fraction']:.1f} %  "
        f"memory {memory['allocated_bytes'] / 2**30:.2f} GiB  norm {grad_norm:.3f}"
    )


def out_of_memory(
    error: BaseException, plan: PlanConfig, options: Options, run: Run | None
) -> OutOfMemory:
    """The post-mortem of a run that has none left: an event, and words for people."""
    kind = "cuda" if plan.cluster.device.kind == "cuda" else "cpu"
    model, optimizer = (None, None) if run is None else (run.assembled.model, run.optimizer)
    memory = device_memory(error, torch.device(kind), model, optimizer)
    event = {
        "step": None if run is None else run.progress.step,
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        **postmortem(error, memory, predicted_memory(plan_text(options.plan))),
    }
    if options.metrics is not None:
        append_line(options.metrics, "oom", event)
    return OutOfMemory(
        f"{postmortem_words(event)} -- fsdpplan run --fallback tries a leaner layout; or plan "
        "again with a smaller --micro-batch or more --activation-checkpointing"
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
        plan_sha256=plan_sha256(plan_text(run.options.plan)),
        sharding=layout.sharding,
        **{axis: getattr(layout, axis) for axis in (*RANK_AXES, "ep")},
        device=device_name(run.device),
    )
    where = "from the beginning" if step == 0 else f"resumed after step {step}"
    run.metrics.say(
        f"{run.plan.model.name}: {layout_words(layout)}, {layout.world} "
        f"{'process' if layout.world == 1 else 'processes'} on {device_name(run.device)}; {where}"
    )
    if layout.compile and run.device.type == "cpu":
        passes = ", and with it async TP," if layout.async_tp else ""
        run.metrics.say(f"torch.compile{passes} is off on CPU")


def layout_words(layout: LayoutConfig) -> str:
    """`fsdp, pp 2 x dp_shard 4, ep 2`: the degrees that are not 1; ep adds no ranks, so apart."""
    ranks = [f"{axis} {getattr(layout, axis)}" for axis in RANK_AXES if getattr(layout, axis) > 1]
    experts = [f"ep {layout.ep}"] if layout.ep > 1 else []
    return ", ".join([layout.sharding, *([" x ".join(ranks)] if ranks else []), *experts])


def save(run: Run) -> None:
    """Begin to save, unless there is nowhere to or nothing new; waits for the last save."""
    if run.checkpoints is not None and run.progress.step != run.checkpoints.good_step:
        run.watch.not_a_step()
        told(run, run.checkpoints.save(run.assembled.model, run.optimizer, run.progress))


def told(run: Run, saved: Saved | None) -> None:
    """Report how a save ended, if one did."""
    if saved is None:
        return
    path, seconds = str(saved.path), saved.seconds
    if saved.problem:
        run.metrics.emit("checkpoint_failed", step=saved.step, path=path, reason=saved.problem)
        complain(
            f"checkpoint: step {saved.step} was not saved: {saved.problem}; training goes on, and "
            "the last good checkpoint stays"
        )
        return
    run.metrics.emit("checkpoint", step=saved.step, path=path, seconds=seconds)
    run.metrics.say(f"saved {path} in {seconds:.2f} s")


def save_the_end(run: Run) -> str:
    """Save the last state and wait until it is published; returns why it was not."""
    if run.checkpoints is None:
        return ""
    run.watch.not_a_step()
    told(run, run.checkpoints.wait())
    save(run)
    last = run.checkpoints.wait()
    told(run, last)
    if last is None or not last.problem:
        return ""
    return (
        f"the run's last state, after step {last.step}, is not saved: {last.problem}; the newest "
        f"checkpoint in {run.checkpoints.folder} is older"
    )


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
