"""What a run says of itself: what begins, each step, each save, the end, and why it ran out."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint.progress import Progress
from .checkpoint.runs import Checkpoints, Saved
from .config import LayoutConfig, PlanConfig, plan_sha256, plan_text
from .errors import OutOfMemory
from .evaluation import HeldOut
from .huggingface.export import Exported
from .huggingface.peft import Beside
from .optimizer import Recipe
from .options import Options
from .pace import GarbageSchedule, Readings, StepClock, StepRead, Votes
from .parallel.assemble import Assembled
from .parallel.mesh import MESH_AXES
from .signals import StopRequest, note_stop
from .spikes import SpikeGuard
from .text.chats import ChatSequences
from .text.data import Mixture, epoch_sequences
from .text.feed import AheadFeed, Feed, Rate, step_tokens
from .watch.metrics import (
    MemoryMeter,
    Metrics,
    append_line,
    as_line,
    device_name,
    predicted_step_seconds,
    step_rates,
    summary,
)
from .watch.oom import device_memory, postmortem, postmortem_words, predicted_memory
from .watch.watch import Watch

OWN_SHARE = 0.05
"""Of a step, which its own thread may spend on its data."""

MOST_RULES = 3
"""Broken rules that are said when a run begins."""

LOST_WEIGHT = 2**9
"""A bf16 weight of so many updates does not move: half its last place is at least a 512th of it."""


LEAST_EPOCH_STEPS = 10
"""Of a fine-tuning: with fewer, its epochs are a handful of updates; chosen here."""


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """A run under way."""

    plan: PlanConfig
    options: Options
    recipe: Recipe
    device: torch.device
    assembled: Assembled
    optimizer: torch.optim.Optimizer
    feed: Feed | AheadFeed
    stop: StopRequest
    metrics: Metrics
    memory: MemoryMeter
    watch: Watch
    progress: Progress
    checkpoints: Checkpoints | None
    publication: Exported | None = None
    peft: Beside | None = None
    """What the end of the run writes for others."""
    readings: Readings
    votes: Votes
    clock: StepClock
    garbage: GarbageSchedule
    guard: SpikeGuard | None = None
    """None where spikes are not looked for."""
    held_out: HeldOut | None = None
    """What it is judged by."""
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds_of: dict[int, float] = field(default_factory=dict)
    """Steps that the device has done and no line tells of yet."""
    unsaid: list[StepRead] = field(default_factory=list)
    """Steps whose numbers have arrived and no line tells of yet."""
    spike: StepRead | None = None
    """What the run is to go back from."""
    spikes: dict[str, int] = field(default_factory=dict)
    """What was done -> how often."""
    skipped_in_a_row: int = 0
    tries: dict[int, int] = field(default_factory=dict)
    """Step of a checkpoint -> times that the run went back to it."""


def announce(run: TrainingRun) -> None:
    """Say what begins."""
    layout, step = run.plan.layout, run.progress.step
    rate = None if step >= run.options.steps else data_rate(run)
    needed = data_need(run)
    run.metrics.emit(
        "start",
        step=step,
        steps=run.options.steps,
        world=layout.world,
        model=run.plan.model.name,
        plan_sha256=plan_sha256(plan_text(run.options.plan)),
        sharding=layout.sharding,
        **{axis: getattr(layout, axis) for axis in (*MESH_AXES, "ep")},
        device=device_name(run.device),
        data_workers=None if rate is None else rate.workers,
        data_prefetch=None if rate is None else rate.ahead,
        data_tokens_per_second=None if rate is None else rate.tokens_per_second,
        data_tokens_per_second_needed=needed,
        rules=[rule.rule for rule in run.plan.rules],
    )
    where = "from the beginning" if step == 0 else f"resumed after step {step}"
    run.metrics.say(
        f"{run.plan.model.name}: {layout_words(layout)}, {layout.world} "
        f"{'process' if layout.world == 1 else 'processes'} on {device_name(run.device)}; {where}"
    )
    for line in rules_words(run.plan):
        run.metrics.say(line)
    for chats in run.feed.data.sources if isinstance(run.feed.data, Mixture) else (run.feed.data,):
        if isinstance(chats, ChatSequences):
            run.metrics.say(chats.words)
    if run.held_out is not None:
        run.metrics.say(run.held_out.words(run.plan))
    if run.options.data:
        run.metrics.say(epoch_words(run))
    run.metrics.say(schedule_words(run))
    training = run.plan.training
    if training.param_dtype == "bf16" and training.optimizer != "adamw_8bit":
        run.metrics.say(
            "parameters are kept in bf16: an update below 2^-9 of its weight is rounded away, as "
            f"of weights above {LOST_WEIGHT * run.recipe.learning_rate:.2g} at this learning rate"
        )
    if run.options.gc_every:
        run.metrics.say(f"Python's garbage is collected every {run.options.gc_every} steps")
    if layout.compile and run.device.type == "cpu":
        passes = ", and with it async TP," if layout.async_tp else ""
        run.metrics.say(f"torch.compile{passes} is off on CPU")
    if rate is not None and run.options.data:
        run.metrics.say(data_words(rate, needed))


def epoch_words(run: TrainingRun) -> str:
    """How many steps a pass over the data is, and how many passes are trained."""
    batch, steps = run.plan.training.global_batch, run.options.steps
    sequences = epoch_sequences(run.feed.data)
    epochs = run.options.epochs
    said = f"an epoch is {_number(sequences / batch)} steps of {batch:,} sequences"
    if epochs is None:
        said += f"; {steps:,} steps are {_number(steps * batch / sequences)} epochs"
    else:
        said += f"; {epochs:g} are {steps:,} steps"
    if run.options.is_fine_tuning and sequences < LEAST_EPOCH_STEPS * batch:
        smaller = 1 << max(1, sequences // (2 * LEAST_EPOCH_STEPS)).bit_length() - 1
        said += (
            ": too few updates to learn from; plan again with a smaller --global-batch, such as "
            f"{smaller}"
        )
    return said


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def schedule_words(run: TrainingRun) -> str:
    """The learning rate from the first step to the last."""
    schedule = run.recipe.schedule
    parts = [f"learning rate {schedule.learning_rate:g}"]
    if schedule.warmup_steps:
        parts.append(f"warm-up of {schedule.warmup_steps:,} steps")
    decays = "" if schedule.kind != "wsd" else f" in the last {schedule.decay_steps:,} steps"
    ends = "" if schedule.kind == "constant" else f" to {schedule.min_lr:g}{decays}"
    return ", ".join([*parts, f"{schedule.kind}{ends}"])


def rules_words(plan: PlanConfig) -> list[str]:
    """The dearest rules of the field that the plan breaks, in a sentence each, and how to see all;
    of several with one remedy the first."""
    first = {rule.change or rule.rule: rule for rule in reversed(plan.rules)}
    shown = [rule for rule in plan.rules if rule in first.values()][:MOST_RULES]
    lines = [f"the plan breaks {rule.rule}: {rule.says}; {rule.advice}" for rule in shown]
    more = len(plan.rules) - len(shown)
    return [*lines, f"{more} more: fsdpplan explain --rules"] if more else lines


def data_rate(run: TrainingRun) -> Rate:
    """How fast the data of the slowest rank is made; all ranks call this."""
    rate = run.feed.rate(run.progress.sequences)
    slowest = torch.tensor(rate.tokens_per_second, device=run.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return replace(rate, tokens_per_second=float(slowest))


def data_need(run: TrainingRun) -> float | None:
    """Tokens a second that a rank's step takes, as the plan predicts it; None where the plan does
    not say."""
    seconds = predicted_step_seconds(plan_text(run.options.plan))
    return None if seconds is None else step_tokens(run.plan) / seconds


def data_words(rate: Rate, needed: float | None) -> str:
    """Whether the data keeps up."""
    by = {0: "in a thread of its own" if rate.ahead else "in the step's thread", 1: "by a worker"}
    how = by.get(rate.workers, f"by {rate.workers} workers")
    said = f"data: a rank reads {rate.tokens_per_second:,.0f} tokens/s {how}"
    if needed is None:
        return said
    share = rate.tokens_per_second / needed
    said += f", the planned step needs {needed:,.0f}"
    # what the step's own thread reads comes on top of the step, not beside it
    if share >= 1 and (rate.ahead or share >= 1 / OWN_SHARE):
        return f"{said}: {share:,.1f} times as fast"
    if not rate.ahead:
        return (
            f"{said}: each step is {1 / share:.0%} longer by it; leave --data-workers 0 out, or "
            "write a token file by `python -m fsdpplan.trainer.tokenize`"
        )
    more = f" (--data-workers {math.ceil(rate.workers / share)})" if rate.workers else ""
    return (
        f"{said}: that is too slow, steps will wait for their data; give it more processes{more}, "
        "or write a token file by `python -m fsdpplan.trainer.tokenize`"
    )


def layout_words(layout: LayoutConfig) -> str:
    """`fsdp, pp 2 x dp_shard 4, ep 2`: the degrees that are not 1; ep adds no ranks, so apart."""
    ranks = [f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1]
    experts = [f"ep {layout.ep}"] if layout.ep > 1 else []
    return ", ".join([layout.sharding, *([" x ".join(ranks)] if ranks else []), *experts])


def report(run: TrainingRun, read: StepRead) -> None:
    """One JSON line and one line for people of a step whose numbers have arrived; times are those
    of a step on average since the line before."""
    told_of = [each.step for each in run.unsaid if each.step in run.seconds_of]
    seconds = [run.seconds_of.pop(step) for step in told_of]
    rates = step_rates(run.plan, sum(seconds) / len(seconds))
    behind = (run.progress.step - read.step) * run.plan.training.global_batch
    epochs = run.feed.data.epochs(run.progress.sequences - behind)
    memory = run.memory.peaks()
    values: dict[str, Any] = {
        "step": read.step,
        "loss": read.loss,
        **rates,
        "data_seconds": sum(each.data_seconds for each in run.unsaid) / len(run.unsaid),
        **memory,
        "grad_norm": read.grad_norm,
        "learning_rate": read.learning_rate,
        "precision": run.plan.training.precision,
        "loss_scale": read.scaler_state.get("scale"),
        "expert_imbalance": read.expert_imbalance,
        "router_aux_loss": read.router_aux_loss,
        "steps_averaged": len(seconds),
        "epoch": max(epochs.values(), default=None),
    }
    if len(epochs) > 1:
        values["epochs"] = epochs
    run.unsaid.clear()
    run.metrics.emit("step", **values)
    run.watch.reported(values)
    run.metrics.say(
        f"step {read.step}/{run.options.steps}  loss {read.loss:.4f}  "
        f"{rates['step_seconds']:.3f} s  {rates['tokens_per_second']:,.0f} tokens/s  "
        f"MFU {100 * rates['mfu_fraction']:.1f} %  "
        f"memory {memory['allocated_bytes'] / 2**30:.2f} GiB  norm {read.grad_norm:.3f}"
    )


def report_spike(run: TrainingRun, read: StepRead, act: str) -> None:
    """A loss spike, and what is done about it: skip, rollback or keep."""
    run.spikes[act] = run.spikes.get(act, 0) + 1
    values = {
        "step": read.step,
        "action": act,
        "loss": read.loss,
        "grad_norm": read.grad_norm,
        "usual_loss": read.usual_loss,
        "usual_grad_norm": read.usual_grad_norm,
    }
    run.metrics.emit("spike", **values)
    what = {
        "skip": "its update was left out",
        "rollback": "the run goes back to its last checkpoint",
        "keep": "the run goes on: there is no checkpoint to go back to that was not tried",
    }[act]
    usual = "" if read.usual_loss is None else f" ({read.usual_loss:.4f} before)"
    run.metrics.say(
        f"spike in step {read.step}: loss {read.loss:.4f}{usual}, norm {read.grad_norm:.3f}; {what}"
    )


def told(run: TrainingRun, saved: Saved | None) -> None:
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
    run.metrics.emit(
        "checkpoint",
        step=saved.step,
        path=path,
        seconds=seconds,
        blocking_seconds=saved.blocking_seconds,
    )
    run.metrics.say(f"saved {path} in {seconds:.2f} s")


def conclude(run: TrainingRun, stop_signal: int) -> None:
    """The summary: for people, and as JSON to the metrics file or, without one, to stdout."""
    totals = summary(run.plan, run.step_seconds, run.losses, run.memory)
    totals = {
        "step": run.progress.step,
        "precision": run.plan.training.precision,
        "stopped_by_signal": stop_signal or None,
        **totals,
        **({} if run.guard is None else {"spikes": run.spikes}),
    }
    run.metrics.emit("summary", **totals)
    if totals["steps_measured"]:
        run.metrics.say(
            f"median of {totals['steps_measured']} steps: {totals['step_seconds']:.3f} s, "
            f"{totals['tokens_per_second']:,.0f} tokens/s, MFU {totals['mfu_fraction']:.1%}; loss "
            f"{totals['first_loss']:.4f} to {totals['last_loss']:.4f}"
        )
    if run.options.metrics is None:
        run.metrics.say(as_line("summary", totals))
    if stop_signal and run.progress.step < run.options.steps:
        note_stop(stop_signal)


def out_of_memory(
    error: BaseException, plan: PlanConfig, options: Options, run: TrainingRun | None
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


def complain(message: str, *, every_rank: bool = False) -> None:
    """Print an error once a node, or on each rank."""
    if every_rank:
        print(f"[rank {os.environ.get('RANK', '0')}] {message}", file=sys.stderr)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)
