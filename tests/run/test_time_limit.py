"""How early a job is told to save before its time limit."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.job import STEPS_TO_LEAVE, Job, UserProgram
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.run.launch import launch_text
from fsdpplan.run.time_limit import time_to_save, with_grace, with_time_to_save
from fsdpplan.spec.plan import Failures, Interval, Plan
from fsdpplan.validate.learn.saves import MeasuredSaves
from tests.emit.plans import make_plan

SAVING = Job(program=Trainer(steps=5000, data="d.bin", checkpoint_dir="saved"))


def with_step(seconds: float, *, spread: float = 1.2) -> Plan:
    plan = make_plan("cuda", nodes=8, per_node=8)
    step = Interval(lower=seconds / spread, expected=seconds, upper=seconds * spread)
    return replace(plan, estimate=replace(plan.estimate, step_seconds=step))


@given(
    seconds=st.floats(0.01, 600),
    minutes=st.integers(2, 3000),
    storage=st.floats(1e5, 1e11),
    steps=st.integers(1, 100_000),
)
def test_a_job_is_told_early_enough_or_refused(
    seconds: float, minutes: int, storage: float, steps: int
) -> None:
    plan = replace(with_step(seconds), failures=Failures(storage_bytes_per_second=storage))
    job = replace(SAVING, time=str(minutes), program=replace(SAVING.program, steps=steps))
    needed = time_to_save(plan, job)
    step = plan.estimate.step_seconds
    try:
        told, words = with_time_to_save(job, plan)
    except SpecError as error:
        again = re.search(r"--time (\d+)", str(error).rpartition("give")[2])
        assert again is not None
        longer, _ = with_time_to_save(replace(job, time=again[1]), plan)
        assert longer.signal_seconds is not None
        return
    assert told.signal_seconds is not None
    limit = 60 * minutes
    ends_before = needed.start_seconds + steps * step.upper + needed.upper_save_seconds
    enough = needed.expected_seconds if "would be safe" in words else needed.upper_seconds
    assert told.signal_seconds >= min(enough, 65535) or ends_before <= limit - told.signal_seconds
    assert told.signal_seconds + step.expected < limit or not words


def test_the_word_comes_behind_a_step_and_a_save_at_their_upper_ends() -> None:
    plan = with_step(196.0)
    told, words = with_time_to_save(replace(SAVING, time="24:00:00"), plan)
    assert told.signal_seconds is not None
    assert (
        told.signal_seconds
        > STEPS_TO_LEAVE * 196.0 * 1.2 + time_to_save(plan, told).upper_save_seconds
    )
    assert "5,000 steps are about 12 jobs of 24.0 h" in words
    script = launch_text("slurm", plan=plan, job=replace(SAVING, time="24:00:00"))
    assert f"#SBATCH --signal=B:USR1@{told.signal_seconds}\n" in script
    assert "# Time limit: 5,000 steps are about 12 jobs of 24.0 h, told to save" in script
    assert f"save_seconds={told.save_seconds}" in script


def test_longer_steps_and_slower_saves_are_told_earlier() -> None:
    limit = replace(SAVING, time="7-0")

    def signal(seconds: float, storage: float) -> int:
        plan = replace(with_step(seconds), failures=Failures(storage_bytes_per_second=storage))
        return with_time_to_save(limit, plan)[0].signal_seconds or 0

    assert signal(10, 1e9) < signal(20, 1e9) < signal(20, 1e6)


def test_own_runs_say_how_fast_the_storage_is() -> None:
    plan, job = with_step(20.0), replace(SAVING, time="24:00:00")
    slow = MeasuredSaves(runs=3, write_bytes_per_second=1e6, save_seconds=30.0)
    told, words = with_time_to_save(job, plan, measured=lambda _: slow)
    assert "by own runs" in words
    assert (told.signal_seconds or 0) > (with_time_to_save(job, plan)[0].signal_seconds or inf)


def test_what_was_said_holds_and_is_warned_about() -> None:
    job = replace(SAVING, time="24:00:00", signal_seconds=120)
    told, words = with_time_to_save(job, with_step(196.0))
    assert told.signal_seconds == 120
    assert "may be too late" in words
    fine = replace(job, signal_seconds=20_000)
    assert with_time_to_save(fine, with_step(196.0))[1] == ""


@pytest.mark.parametrize(
    "job",
    [
        Job(time="24:00:00"),
        SAVING,
        replace(SAVING, time="infinite"),
        Job(time="24:00:00", program=UserProgram(script="t.py")),
    ],
)
def test_nobody_is_told_who_cannot_save_or_has_no_limit(job: Job) -> None:
    assert with_time_to_save(job, with_step(20.0)) == (job, "")


def test_a_limit_for_less_than_a_step_is_refused_with_one_that_is_enough() -> None:
    with pytest.raises(SpecError, match=r"too short for a single step .* give --time \d+"):
        with_time_to_save(replace(SAVING, time="5"), with_step(196.0))


def test_a_job_that_fits_is_told_behind_its_last_step() -> None:
    short = replace(SAVING, time="3", program=replace(SAVING.program, steps=10))
    told, words = with_time_to_save(short, with_step(1.0))
    assert words == ""
    assert 0 < (told.signal_seconds or 0) < 180 - 10 * 1.2


def test_slurm_takes_no_longer_signal() -> None:
    told, _ = with_time_to_save(replace(SAVING, time="30-0"), with_step(40_000.0))
    assert told.signal_seconds == 65535
    with pytest.raises(SpecError, match="65535"):
        Job(time="30-0", signal_seconds=65536)


def test_a_pod_that_goes_has_the_same_time() -> None:
    plan = with_step(196.0)
    asked = with_grace(Pods(), plan, SAVING)
    assert asked.grace_seconds == time_to_save(plan, SAVING).upper_seconds
    assert with_grace(Pods(grace_seconds=30), plan, SAVING).grace_seconds == 30
    assert with_grace(Pods(), plan, Job()).grace_seconds is None
    job = replace(SAVING, program=replace(SAVING.program, checkpoint_dir="/c/saved", data="/c/d"))
    pods = Pods(image="fsdpplan:1", volumes=("c:/c",))
    for target in ("kubernetes", "pytorchjob", "jobset", "volcano"):
        text = launch_text(target, plan=plan, job=job, pods=pods)
        assert f"terminationGracePeriodSeconds: {asked.grace_seconds}\n" in text
