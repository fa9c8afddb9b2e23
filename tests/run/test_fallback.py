"""Runs that run out of memory, and what is tried after them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.emit.job import Job
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.run.fallback import Attempt, run_with_fallback
from fsdpplan.run.follow.metric_events import parse_event
from fsdpplan.run.follow.metrics import Measured, read_metrics
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.ledger import ran_out_of_memory
from fsdpplan.run.outcome import Outcome
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Plan
from fsdpplan.spec.training import Training
from tests.emit.plans import make_plan

REAL_FACTOR = 1.3
"""What layouts really need, over what is predicted of them."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A layout that keeps much."""
    model = load_model("llama-3.2-1b")
    cluster = load_cluster("dgx-h100", gpus=8).cluster
    training = Training(seq_len=4096, global_batch=32)
    layout = Layout(dp_replicate=2, dp_shard=4, reshard_after_forward="never", micro_batch=4)
    return replace(
        make_plan("cuda"),
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=estimate(Case(model=model, cluster=cluster, training=training, layout=layout)),
    )


def outcome(exit_code: int = 0, *lines: dict[str, object], log: Path | None = None) -> Outcome:
    return Outcome(
        exit_code=exit_code,
        job_id=None,
        ended=True,
        seconds=1.0,
        run_folder=Path("run"),
        measured=read_metrics("\n".join(map(json.dumps, lines))) if lines else Measured(),
        log=log,
    )


def behind_a_wall(plan: Plan, wall_bytes: float) -> Outcome:
    """How a run ends on devices of `wall_bytes`."""
    memory = plan.estimate.memory
    if memory.peak_device_bytes * REAL_FACTOR <= wall_bytes:
        return outcome(0, {"event": "step", "step": 1, "step_seconds": 0.1})
    needed = int(memory.peak_allocated_bytes * REAL_FACTOR)
    return outcome(1, {"event": "oom", "step": 0, "rank": 3, "needed_bytes": needed})


def tried(plan: Plan, wall_bytes: float, *, most: int) -> tuple[tuple[Attempt, ...], list[str]]:
    job = Job(program=Trainer(checkpoint_dir="saved"))
    launch = Launch(script=emit_script(plan, job), plan=plan, origin="a test")
    said: list[str] = []
    attempts = run_with_fallback(
        launch,
        job=job,
        most=most,
        run=lambda launch: behind_a_wall(launch.plan, wall_bytes),
        say=said.append,
    )
    return attempts, said


@pytest.mark.parametrize("share", [1.2, 0.8, 0.5])
def test_leaner_layouts_are_tried_until_one_fits(plan: Plan, share: float) -> None:
    wall = share * plan.estimate.memory.peak_device_bytes
    attempts, said = tried(plan, wall, most=40)
    *failed, last = attempts
    assert failed
    assert all(ran_out_of_memory(attempt.outcome) for attempt in failed)
    assert last.outcome.exit_code == 0
    assert len(said) == len(failed)
    layouts = [attempt.launch.plan.layout for attempt in attempts]
    assert len(set(layouts)) == len(layouts)
    assert {layout.global_batch for layout in layouts} == {32}
    needs = [attempt.launch.plan.estimate.memory.peak_device_bytes for attempt in attempts]
    assert needs == sorted(needs, reverse=True)


def test_every_attempt_goes_on_from_the_same_checkpoints(plan: Plan) -> None:
    attempts, _ = tried(plan, 0.5 * plan.estimate.memory.peak_device_bytes, most=3)
    assert len(attempts) > 1
    assert all("--checkpoint-dir=saved" in attempt.launch.script for attempt in attempts)
    scripts = {attempt.launch.script for attempt in attempts}
    assert len(scripts) == len(attempts)


def test_the_number_of_attempts_is_bounded(plan: Plan) -> None:
    attempts, _ = tried(plan, 1.0, most=1)
    assert [attempt.outcome.exit_code for attempt in attempts] == [1, 1]
    assert attempts[-1].next_layout is not None


def test_without_it_the_next_layout_is_only_named(plan: Plan) -> None:
    (attempt,), said = tried(plan, 1.0, most=0)
    assert attempt.next_layout is not None
    assert said == []


def test_a_job_that_fits_is_run_once(plan: Plan) -> None:
    (attempt,), _ = tried(plan, 1e15, most=3)
    assert attempt.next_layout is None


@pytest.mark.parametrize(
    ("log", "expected"),
    [("torch.OutOfMemoryError: CUDA out of memory.", True), ("ValueError: shapes", False)],
)
def test_another_program_says_so_in_its_log(log: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(log)
    assert ran_out_of_memory(outcome(1, log=path)) is expected
    assert not ran_out_of_memory(outcome(0, log=path))


def test_of_several_ranks_that_ran_out_that_which_needed_most_is_kept() -> None:
    lines = [
        json.dumps({"event": "oom", "rank": rank, "needed_bytes": needed})
        for rank, needed in ((0, 5), (1, 9), (2, 7))
    ]
    worst = read_metrics("\n".join(lines)).out_of_memory
    assert worst is not None
    assert worst.rank == 1


def test_an_event_with_nonsense_in_it_is_read_as_far_as_it_makes_sense() -> None:
    event = parse_event('{"event": "oom", "rank": "x", "beyond_prediction": {"a": "b", "c": 3}}')
    assert event is not None
    assert getattr(event, "rank", 0) is None
    assert getattr(event, "beyond_prediction", None) == (("c", 3),)
