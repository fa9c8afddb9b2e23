"""How long before its end a job is told to save and leave: a time limit, or a pod's grace.

The trainer leaves behind a step, and all ranks behind the same one. A signal is heard between hosts
a step late, and the host is a step ahead of its device: so steps pass until it leaves, then the
save that is under way ends, and the last one is written. In the worst case of the plan's bands,

    steps * upper end + save + max(0, save - lower end) + margin

since a save that is under way began a step before the last one ended, or earlier. A job that runs
counts again, from what it has measured (`emit/bash/limit.sh`), and leaves earlier if need be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from fsdpplan.cost.goodput import Reliability, interruptions, read_bytes
from fsdpplan.emit.job import (
    MARGIN_SECONDS,
    MOST_SIGNAL_SECONDS,
    START_SECONDS,
    STEPS_TO_LEAVE,
    Job,
    limit_words,
    saves_to,
    time_limit_seconds,
)
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.trainer_program import Trainer, planned_steps
from fsdpplan.errors import SpecError
from fsdpplan.run.known import known_saving, no_runs
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import Interval, Plan
from fsdpplan.units import format_seconds

if TYPE_CHECKING:
    from fsdpplan.validate.learn.saves import MeasuredSaves  # most of validate


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToSave:
    """What passes from the word to leave until the last step is saved."""

    step_seconds: Interval
    expected_save_seconds: float
    """From the end of a step until it is published."""
    upper_save_seconds: float
    """The same, on storage at the slow end of its band."""
    start_seconds: float
    """From the start of a job until its first step: assumed, and the checkpoint read."""
    is_measured: bool
    """Whether own runs say how fast saves are, in place of published figures."""

    @property
    def upper_seconds(self) -> int:
        """With slow steps and slow saves."""
        return ceil(_total(self.step_seconds.upper, self.upper_save_seconds, self.step_seconds))

    @property
    def expected_seconds(self) -> int:
        """The same, as steps and saves are expected."""
        step = self.step_seconds.expected
        return ceil(_total(step, self.expected_save_seconds, self.step_seconds))

    @property
    def words(self) -> str:
        """The parts of `upper_seconds`."""
        source = "own runs" if self.is_measured else "published rates of storage"
        return (
            f"{STEPS_TO_LEAVE} steps of up to {format_seconds(self.step_seconds.upper)}, saves of "
            f"up to {format_seconds(self.upper_save_seconds)} (by {source}), and "
            f"{MARGIN_SECONDS} s; the job counts again from what it measures"
        )


def _total(step: float, save: float, steps: Interval) -> float:
    return STEPS_TO_LEAVE * step + save + max(0.0, save - steps.lower) + MARGIN_SECONDS


def time_to_save(
    plan: Plan, job: Job, *, measured: Callable[[Cluster], MeasuredSaves | None] = no_runs
) -> TimeToSave:
    """How long the trainer takes to leave, by the plan and what is known of its storage."""
    found = measured(plan.cluster)
    known = known_saving(
        plan.cluster,
        plan.failures,
        in_background=not isinstance(job.program, Trainer)
        or job.program.checkpoint_async is not False,
        measured=found,
    ).value
    rate, held = known.write_bytes_per_second, known.save_seconds
    slow = replace(
        known,
        write_bytes_per_second=rate / known.storage_factor,
        save_seconds=held * known.save_factor,
    )
    return TimeToSave(
        step_seconds=plan.estimate.step_seconds,
        expected_save_seconds=_save_seconds(plan, known),
        upper_save_seconds=_save_seconds(plan, slow),
        start_seconds=START_SECONDS + read_bytes(plan.case) / known.read_bytes_per_second,
        is_measured=found is not None,
    )


def _save_seconds(plan: Plan, reliability: Reliability) -> float:
    run = interruptions(plan.case, reliability)
    return run.blocking_seconds + run.writing_seconds


def with_time_to_save(
    job: Job, plan: Plan, *, measured: Callable[[Cluster], MeasuredSaves | None] = no_runs
) -> tuple[Job, str]:
    """(`job`, told early enough before its time limit; how early and why, in a sentence). The
    sentence is empty where nothing follows: without a limit or checkpoints, or where all steps fit
    into the limit. Raises SpecError where not even one step would be saved within it."""
    limit = None if job.time is None else time_limit_seconds(job.time)
    if limit is None or saves_to(job) is None:
        return job, ""
    needed = time_to_save(plan, job, measured=measured)
    job = replace(job, save_seconds=ceil(needed.upper_save_seconds))
    if job.signal_seconds is not None:
        if job.signal_seconds >= needed.expected_seconds:
            return job, ""
        return job, (
            f"--signal-seconds {job.signal_seconds} may be too late to save: leave it out for "
            f"{needed.upper_seconds:,}, which is {needed.words}"
        )
    step = needed.step_seconds
    assert isinstance(job.program, Trainer)
    steps = planned_steps(job.program, plan.training)
    whole = ceil(needed.start_seconds + steps * step.upper + needed.upper_save_seconds)
    latest = limit - ceil(needed.start_seconds + step.upper)
    if needed.upper_seconds > latest and whole < limit:
        # by then all steps are done, unless they are slower than they can be
        return replace(job, signal_seconds=limit - whole), ""
    seconds = min(needed.upper_seconds, max(latest, needed.expected_seconds), MOST_SIGNAL_SECONDS)
    if seconds + step.expected >= limit:
        least = ceil((needed.upper_seconds + needed.start_seconds + step.upper) / 60)
        raise SpecError(
            f"--time {job.time} is too short for a single step to be saved: a step takes "
            f"{format_seconds(step.expected)}, and the job is told to save {seconds:,} s before "
            f"its end ({needed.words}): give --time {least} (minutes) or more"
        )
    told = replace(job, signal_seconds=seconds)
    short = f", where {needed.upper_seconds:,} s would be safe: give more --time"
    return told, (
        f"{limit_words(told, plan)}{short if seconds < needed.upper_seconds else ''} "
        f"({needed.words}; --signal-seconds says otherwise)"
    )


def with_grace(
    pods: Pods,
    plan: Plan,
    job: Job,
    *,
    measured: Callable[[Cluster], MeasuredSaves | None] = no_runs,
) -> Pods:
    """`pods` with time to save between the word to go and the end, where nobody said how long."""
    if pods.grace_seconds is not None or saves_to(job) is None:
        return pods
    return replace(pods, grace_seconds=time_to_save(plan, job, measured=measured).upper_seconds)
