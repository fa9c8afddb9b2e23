"""A change of precision in mid-run: the same weights and moments, in a model that is built anew.

torchao converts layers before they are sharded, so the model cannot change where it stands. Its
states wait in CPU memory, as those of a checkpoint in the background do, until the other one is
there: same layout, same shards, so nothing is sent. What a run does then is what one does that
resumes from a checkpoint of that step.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch

from .checkpoint.state import Staging, equalise_copies, fill_optimizer, flat, named_tensors, tree
from .config import PlanConfig
from .optimizer import make_optimizer
from .parallel.assemble import assemble
from .parallel.float8 import require_float8
from .parallel.support import require_runnable
from .parallel.tied_tables import copied_parameters
from .precision import precision_of_step, precisions
from .report import TrainingRun
from .rng import generator_states, restore_generators


def in_precision(plan: PlanConfig, precision: str) -> PlanConfig:
    """The plan as steps in `precision` are trained."""
    if plan.training.precision == precision:
        return plan
    return replace(plan, training=replace(plan.training, precision=precision))


def require_every_precision(plan: PlanConfig, device: torch.device) -> None:
    """Raise TrainerError at the start for what would only be missed at the change."""
    if plan.training.precision_switch == "none":
        return
    for precision in precisions(plan.training):
        each = in_precision(plan, precision)
        require_runnable(each)
        _ = each.peak_flops_per_second  # of which MFU is a share
    require_float8(plan, device)


def is_due_to_change(run: TrainingRun) -> bool:
    """Whether the next step is to be in another precision than the model."""
    training = run.plan.training
    return precision_of_step(training, run.progress.step, run.options.steps) != training.precision


def change_precision(run: TrainingRun) -> None:
    """Build the model anew for the next step; all that was asked of the device has been heard."""
    began, old = time.perf_counter(), run.plan
    run.watch.not_a_step()
    plan = in_precision(old, precision_of_step(old.training, run.progress.step, run.options.steps))
    if run.checkpoints is not None:
        run.checkpoints.plan = plan
    meshes, generators = run.assembled.meshes, generator_states()
    kept = Staging().take(
        tree(named_tensors(run.assembled.model, run.optimizer, copied_parameters(old)))
    )
    is_filled = bool(run.optimizer.state)
    # of two models at once there may be no room
    del run.assembled, run.optimizer
    run.watch.leave_blocks()
    _forget()
    run.plan = plan
    run.assembled = assemble(plan, run.device, seed=run.options.seed, meshes=meshes)
    run.optimizer = make_optimizer(run.assembled.model, run.recipe, copied_parameters(plan))
    if is_filled:
        fill_optimizer(run.optimizer)
    named = named_tensors(run.assembled.model, run.optimizer, copied_parameters(plan))
    with torch.no_grad():
        for name, tensor in flat(tree(named)):
            own = getattr(tensor, "_local_tensor", tensor)
            own.copy_(kept[name])
        equalise_copies(named)
    restore_generators(generators)
    run.watch.take_blocks(run.assembled)
    # medians and peaks of one precision say nothing of the other
    run.step_seconds.clear()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    _say(run, old, time.perf_counter() - began)


def _forget() -> None:
    """Give back what the model held, and what was compiled for it."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(run: TrainingRun, old: PlanConfig, seconds: float) -> None:
    before, now = old.training.precision, run.plan.training.precision
    run.metrics.emit("precision", step=run.progress.step, before=before, now=now, seconds=seconds)
    run.metrics.say(
        f"behind step {run.progress.step}: precision {now} in place of {before}, changed in "
        f"{seconds:.1f} s"
    )
