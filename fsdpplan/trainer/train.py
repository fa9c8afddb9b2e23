"""A training run: set up, step, save, leave."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint.base import base_fingerprint
from .checkpoint.progress import Progress, recorded
from .checkpoint.runs import CheckpointFailed, Checkpoints
from .config import PlanConfig, load_plan
from .errors import RankError, TrainerError, TrainingDiverged
from .evaluation import evaluate, held_out, said
from .huggingface.export import export, require_new, require_no_bias_lost, what_to_publish
from .huggingface.load import load_published, require_loadable
from .huggingface.peft import export_peft, peft_to_publish
from .model.weights import initialise_adapters
from .optimizer import Recipe, make_optimizer, set_learning_rate
from .options import Options, parse_options
from .pace import GarbageSchedule, Readings, StepClock, StepRead, Votes
from .parallel.assemble import assemble
from .parallel.distributed import leave, local_ranks, require_world, start
from .parallel.mesh import Meshes
from .parallel.support import require_runnable
from .parallel.tied_tables import copied_parameters
from .precision import precisions
from .preflight.program import preflight
from .report import (
    TrainingRun,
    announce,
    complain,
    conclude,
    out_of_memory,
    report,
    report_spike,
    told,
)
from .rng import seed_generators
from .scaler import LEAST_SCALE
from .schedule import learning_rate_at
from .signals import StopRequest
from .spikes import MOST_IN_A_ROW, MOST_TRIES, SpikeGuard
from .step import train_step
from .switch import change_precision, in_precision, is_due_to_change, require_every_precision
from .text.chats import open_all_chats
from .text.data import Data, data_state, epoch_sequences, open_data, require_same_data
from .text.feed import Feed, open_feed
from .torch_versions import quiet, require_torch, say_remark
from .watch.dashboards import open_dashboards, require_libraries
from .watch.metrics import (
    MemoryMeter,
    Metrics,
)
from .watch.oom import is_out_of_memory
from .watch.watch import Watch


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process."""
    options = parse_options(arguments)
    gc.freeze()  # what was imported stays: no collection looks through it
    quiet()
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


def run_training(options: Options) -> None:
    """Train to the last step, or until a signal."""
    stop = StopRequest()
    if not options.rehearse:  # which has no step to finish
        stop.listen()
    plan = load_plan(options.plan)
    if options.pack or plan.training.packed:  # one of both says it
        plan = replace(plan, training=replace(plan.training, packed=True))
        options = replace(options, pack=True)
    require_torch(plan)
    require_runnable(plan)
    if options.rehearse:
        # Imported where it is needed: training needs nothing fake.
        from .rehearse.rehearsal import rehearse_ranks

        rehearse_ranks(plan, options)
        return
    require_world(plan)
    if os.environ.get("RANK", "0") == "0":
        require_libraries(options)
    say_remark(plan)
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
            attempt.run.feed.close()
            attempt.run.garbage.stop()
            attempt.run.metrics.close()


@dataclass(slots=True)
class Attempt:
    """How far a run came."""

    run: TrainingRun | None = None


def train(plan: PlanConfig, options: Options, stop: StopRequest, attempt: Attempt) -> None:
    """Train to the last step, or until a signal; `attempt` knows the run once it is set up."""
    attempt.run = run = set_up(plan, options, stop)
    options = run.options  # which know by now how many steps their epochs are
    run.watch.start(run.progress.step)
    announce(run)
    stop_signal = 0
    try:
        while run.progress.step < options.steps and not stop_signal:
            if is_due_to_change(run):
                settle(run, is_last=True)
                if run.spike is not None:
                    go_back(run, run.spike)
                    continue
                if run.checkpoints is not None:  # what is being saved holds the model
                    told(run, run.checkpoints.wait())
                change_precision(run)
            stop_signal = one_step(run)
            every = options.checkpoint_every
            if every and run.progress.step % every == 0:
                settle(run)
                if run.spike is None:
                    save(run)
            if run.progress.step == options.steps or stop_signal:
                settle(run, is_last=True)
            if run.spike is None and is_due_to_judge(run) and not stop_signal:
                settle(run)  # whoever sent a signal will not wait
                if run.spike is None:
                    judge(run)
            if run.spike is not None:
                go_back(run, run.spike)
        stop_signal = max(stop_signal, run.votes.last())
    except TrainingDiverged:
        # Every rank is here, and what is being saved is of a step before.
        if run.checkpoints is not None:
            told(run, run.checkpoints.wait())
        raise
    unsaved = save_the_end(run)
    if run.checkpoints is not None:
        run.checkpoints.leave()
    publish(run)
    conclude(run, stop_signal)
    if unsaved:
        raise CheckpointFailed(unsaved)


def set_up(plan: PlanConfig, options: Options, stop: StopRequest) -> TrainingRun:
    """Everything up to the first step."""
    recipe = options.recipe(plan)
    meshes = try_cluster(plan, options)
    require_new(options.export_hf, "--export-hf")
    require_new(options.export_peft, "--export-peft")
    peft = peft_to_publish(plan, options)
    publication = what_to_publish(plan, options, recipe)
    device = start(plan)
    require_every_precision(plan, device)
    # behind the start, since one rank makes an index while the others wait
    reads = options.data or options.eval_data
    with stop.ends("the index of the text was made") if reads else nullcontext():
        data = what_to_train_on(plan, options)
        if options.epochs is not None:
            sequences = epoch_sequences(data)
            options = options.over(sequences=sequences, batch=plan.training.global_batch)
            recipe = options.recipe(plan)
        held = held_out(plan, options)
    feed = open_feed(
        Feed(data=data, plan=plan, rank=dist.get_rank(), device=device, packs=options.pack),
        workers=options.data_workers,
        prefetch=options.prefetch,
        ranks=local_ranks(plan),
    )
    memory = MemoryMeter(device)
    checkpoints = open_checkpoints(plan, options)
    fill = first_weights(plan, options, checkpoints)
    assembled = assemble(plan, device, seed=options.seed, meshes=meshes, fill=fill)
    optimizer = make_optimizer(assembled.model, recipe, copied_parameters(plan))
    progress = begin_or_resume(plan, options, recipe, checkpoints, assembled.model, optimizer)
    if publication is not None:
        require_no_bias_lost(assembled.model, publication, plan.model)
    if assembled.scaler is not None and progress.scaler_state:
        assembled.scaler.load(progress.scaler_state)
    require_same_data(progress.data_state, data)
    progress = replace(progress, data_state=data_state(data, packs=options.pack))
    dashboards = None
    if dist.get_rank() == 0:
        dashboards = open_dashboards(plan, options, first_step=progress.step)
    metrics = Metrics(options.metrics, first_step=progress.step, dashboards=dashboards)
    guard = None
    if options.on_spike != "none":
        scales_loss = assembled.scaler is not None
        guard = SpikeGuard(device, stages=plan.layout.pp, scales_loss=scales_loss)
    return TrainingRun(
        plan=plan,
        options=options,
        recipe=recipe,
        device=device,
        assembled=assembled,
        optimizer=optimizer,
        feed=feed,
        stop=stop,
        metrics=metrics,
        memory=memory,
        watch=Watch(plan, options, device, assembled, metrics),
        progress=progress,
        checkpoints=checkpoints,
        publication=publication,
        peft=peft,
        held_out=held,
        readings=Readings(stages=plan.layout.pp),
        votes=Votes(),
        clock=StepClock(device),
        garbage=GarbageSchedule(options.gc_every),
        guard=guard,
    )


def what_to_train_on(plan: PlanConfig, options: Options) -> Data:
    """Chats, text, tokens, or made-up ones."""
    if options.sft:
        return open_all_chats(plan, options, options.data, seed=options.seed)
    return open_data(plan, options.data, seed=options.seed, tokenizer=options.tokenizer)


def first_weights(
    plan: PlanConfig, options: Options, checkpoints: Checkpoints | None
) -> Callable[[nn.Module], None] | None:
    """What fills the model with published weights; None: it is drawn, or a checkpoint is resumed,
    which has all of it but for the base of adapters. Raises TrainerError where the weights are not
    the plan's model's. All ranks call this, since a file system may not show a checkpoint to each
    of them."""
    folder, adapters = options.init_from, plan.training.adapters
    resumes = checkpoints is not None and checkpoints.has_any()
    if folder is None or (resumes and adapters is None):
        return None
    require_loadable(plan, folder)

    def fill(model: nn.Module) -> None:
        load_published(model, plan, folder)
        initialise_adapters(model, seed=options.seed)

    return fill


def publish(run: TrainingRun) -> None:
    """Write the trained model for others, unless the run was stopped before its end."""
    if run.progress.step < run.options.steps:
        return
    folder, what = run.options.export_hf, run.publication
    if folder is not None and what is not None:
        run.watch.not_a_step()
        export(run.assembled.model, run.plan, folder, what)
    folder, peft = run.options.export_peft, run.peft
    if folder is not None and peft is not None:
        run.watch.not_a_step()
        export_peft(run.assembled.model, run.plan, folder, peft)


def try_cluster(plan: PlanConfig, options: Options) -> Meshes | None:
    """The preflight, as far as it is asked for, and the meshes that it made; of what the precision
    changes to, its numbers."""
    meshes = preflight(
        plan,
        folder=options.run_folder,
        seconds=options.preflight_seconds,
        cluster=options.preflight,
        numbers=options.numbers,
        adamw=options.adamw,
    )
    for later in precisions(plan.training)[1:]:
        preflight(
            in_precision(plan, later),
            folder=None,
            seconds=options.preflight_seconds,
            cluster=False,
            numbers=options.numbers,
            adamw=options.adamw,
        )
    return meshes


def open_checkpoints(plan: PlanConfig, options: Options) -> Checkpoints | None:
    """The folder of the run's checkpoints, if it keeps any."""
    if options.checkpoint_dir is None:
        return None
    return Checkpoints(
        options.checkpoint_dir,
        plan,
        keep=options.checkpoint_keep,
        background=options.checkpoint_async,
        run_folder=options.run_folder,
    )


def begin_or_resume(
    plan: PlanConfig,
    options: Options,
    recipe: Recipe,
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
        learning_rate=recipe.learning_rate,
        warmup_steps=options.warmup_steps,
        recipe=recorded(recipe),
        base=_base_of(plan, checkpoints, model),
    )
    seed_generators(seed=options.seed, step=0, rank=dist.get_rank())
    if checkpoints is None:
        return beginning
    found, remarks = checkpoints.begin(
        model,
        optimizer,
        seed=options.seed,
        resume=options.resume,
        recipe=recipe,
        allow_changes=options.allow_changes,
        base=beginning.base,
    )
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


def _base_of(plan: PlanConfig, checkpoints: Checkpoints | None, model: nn.Module) -> str:
    """The fingerprint of what is frozen, which checkpoints have in its place; empty where there is
    nothing of both."""
    if plan.training.adapters is None or checkpoints is None:
        return ""
    return base_fingerprint(model, copied_parameters(plan), group=checkpoints.group)


def one_step(run: TrainingRun) -> int:
    """Ask the device for one more step, and report what has arrived of those before; returns the
    signal that some rank got before it asked for the step before, or 0."""
    step = run.progress.step + 1
    if run.watch.has_edge_before(step):
        settle(run)
        if run.spike is not None:
            return 0
    run.watch.before(step)
    run.clock.begin(apart=run.watch.take_apart())
    rate = learning_rate_at(run.progress.step, run.recipe.schedule)
    set_learning_rate(run.optimizer, rate)
    data_began = time.perf_counter()
    batches = run.feed.take(run.progress.sequences)
    data_seconds = time.perf_counter() - data_began
    output = train_step(
        run.assembled,
        run.optimizer,
        batches,
        run.plan,
        clip_norm=run.recipe.clip_norm,
        balance=run.recipe.balance,
        guard=run.guard,
        skips_spikes=run.options.on_spike == "skip",
    )
    run.clock.end(step)
    run.watch.own_time.end_step(data_seconds)
    run.progress = replace(
        run.progress,
        step=step,
        sequences=run.progress.sequences + run.plan.training.global_batch,
    )
    run.readings.keep(
        step, output, run.assembled.scaler, learning_rate=rate, data_seconds=data_seconds
    )
    is_logged = step % run.options.log_every == 0
    if is_logged:
        run.readings.ask()
    hear(run, run.readings.answered(but=int(is_logged)))
    stop_signal, own_seconds = run.votes.tell(run.stop.number, run.watch.own_time.take())
    run.watch.after(step, own_seconds=own_seconds)
    run.garbage.after(step)
    if run.checkpoints is not None:
        told(run, run.checkpoints.ended())
    return stop_signal


def is_due_to_judge(run: TrainingRun) -> bool:
    """Whether the loss on held-out data is to be told: every so many steps, and at the end."""
    step, every = run.progress.step, run.options.eval_every
    is_due = step == run.options.steps or (every > 0 and step % every == 0)
    return run.held_out is not None and is_due


def judge(run: TrainingRun) -> None:
    """Tell the loss on held-out data."""
    assert run.held_out is not None
    with run.watch.own_time.apart():
        found = evaluate(
            run.assembled,
            run.plan,
            run.held_out,
            device=run.device,
            packs=run.options.pack,
            beat=run.watch.not_a_step,
        )
    event, line = said(run.progress.step, found)
    run.metrics.emit("eval", **event)
    run.metrics.say(line)
    run.watch.evaluated(event)


def settle(run: TrainingRun, *, is_last: bool = False) -> None:
    """Hear of all steps that were asked for; waits for the device. All ranks call this. The last
    step of a run gets its line whichever it is.

    Raises TrainingDiverged, so before anything is saved of weights that are numbers no longer.
    """
    run.readings.ask()
    hear(run, run.readings.answered())
    if is_last and run.unsaid and run.spike is None:
        report(run, run.unsaid[-1])


def hear(run: TrainingRun, steps: Sequence[StepRead]) -> None:
    """Report steps whose numbers have arrived."""
    for step, seconds in run.clock.done().items():
        run.step_seconds.append(seconds)
        run.seconds_of[step] = seconds
        run.watch.took(step, seconds)
    for read in steps:
        if run.spike is not None:
            return  # steps behind one that is not to have been
        run.unsaid.append(read)
        run.losses.append(read.loss)
        run.progress = replace(run.progress, scaler_state=read.scaler_state)
        act = what_to_do(run, read)
        if act:
            report_spike(run, read, act)
        if read.step % run.options.log_every == 0 or not numbers_are_sound(read):
            report(run, read)
        if act == "rollback":
            run.spike = read
        elif act != "skip":
            require_numbers(read)


def what_to_do(run: TrainingRun, read: StepRead) -> str:
    """What is made of a step that may be a spike: "skip" and "rollback" as asked for, "keep" where
    that may not go on; nothing of one that is none."""
    if not read.is_spike:
        run.skipped_in_a_row = 0
        return ""
    if run.options.on_spike == "skip":
        run.skipped_in_a_row += 1
        # those that are numbers are taken in by then, so that these are not
        return "skip" if run.skipped_in_a_row <= MOST_IN_A_ROW else "keep"
    good = 0
    if run.checkpoints is not None:
        # a save ends on each rank when it does: all wait for it, to go back or to keep alike
        told(run, run.checkpoints.wait())
        good = run.checkpoints.good_step
    if not good or run.tries.get(good, 0) >= MOST_TRIES:
        return "keep"
    return "rollback"


def go_back(run: TrainingRun, spike: StepRead) -> None:
    """Go on from the last good checkpoint, with the data behind all that was seen until now."""
    checkpoints = run.checkpoints
    assert checkpoints is not None
    run.watch.not_a_step()
    run.readings.ask()
    run.readings.answered()  # of steps that are not to have been
    told(run, checkpoints.wait())
    found, remarks = checkpoints.go_back(run.assembled.model, run.optimizer)
    for remark in remarks:
        complain(f"checkpoint: {remark}")
    if run.assembled.scaler is not None and found.scaler_state:
        run.assembled.scaler.load(found.scaler_state)
    skipped = run.progress.sequences - found.sequences
    run.progress = replace(run.progress, step=found.step, scaler_state=found.scaler_state)
    run.tries[found.step] = run.tries.get(found.step, 0) + 1
    run.unsaid.clear()
    run.seconds_of.clear()
    run.spike = None
    run.metrics.forget_after(found.step)
    run.metrics.emit(
        "rollback",
        step=found.step,
        spike_step=spike.step,
        loss=spike.loss,
        grad_norm=spike.grad_norm,
        usual_loss=spike.usual_loss,
        usual_grad_norm=spike.usual_grad_norm,
        sequences_skipped=skipped,
        tries=run.tries[found.step],
    )
    run.metrics.say(
        f"spike in step {spike.step}: went back to step {found.step}, and on behind "
        f"{skipped:,} sequences seen since"
    )


def numbers_are_sound(read: StepRead) -> bool:
    """Whether a run may go on behind a step."""
    try:
        require_numbers(read)
    except TrainingDiverged:
        return False
    return True


def require_numbers(read: StepRead) -> None:
    """Raise before anything is saved of a run whose weights are numbers no longer."""
    scale = read.scaler_state.get("scale")
    # with a scaler, a step whose gradients overflowed changed no weight
    values = {"loss": read.loss}
    if scale is None:
        values["gradient norm"] = read.grad_norm
    for name, value in values.items():
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"the {name} is {value} in step {read.step}: use a smaller --learning-rate or "
                "more --warmup-steps"
            )
    if scale is not None and scale < LEAST_SCALE:
        raise TrainingDiverged(
            f"fp16 gradients overflow at every loss scale up to step {read.step}: plan "
            "again with --precision bf16, or use a smaller --learning-rate"
        )


def save(run: TrainingRun) -> None:
    """Begin to save, unless there is nowhere to or nothing new; waits for the last save."""
    if run.checkpoints is not None and run.progress.step != run.checkpoints.good_step:
        run.watch.not_a_step()
        told(run, run.checkpoints.save(run.assembled.model, run.optimizer, run.progress))


def save_the_end(run: TrainingRun) -> str:
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
        f"checkpoint in {run.checkpoints.folder} is older; see to its disk, and start again with "
        "--resume auto"
    )
