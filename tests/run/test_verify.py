"""A finished run is compared with its own plan, or refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.header import job_plan, plan_digest
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import carried_json, write_plan
from fsdpplan.run.compare import overlap, waits
from fsdpplan.run.launch import emit_script
from fsdpplan.run.verify import Limits, communication, comparison, finished_run, gates
from tests.emit.plans import make_plan

METRICS = (Path(__file__).parent / "metrics_of_a_run.jsonl").read_text()
PLAN = make_plan("cuda")
DIGEST = plan_digest(carried_json(job_plan(PLAN)))
ON_GPUS = METRICS.replace('"resident"', '"allocator"')


def a_run(folder: Path, name: str = "1", *, metrics: str | None = ON_GPUS) -> Path:
    """A run's folder as `fsdpplan run` leaves it."""
    place = folder / "fsdpplan-runs" / name
    place.mkdir(parents=True)
    (place / "job.sbatch").write_text(emit_script(PLAN, Job()))
    if metrics is not None:
        (place / "metrics.jsonl").write_text(metrics)
    return place


def told(text: str, **values: object) -> str:
    """`text` with the start event saying more."""
    first, _, rest = text.partition("\n")
    return json.dumps({**json.loads(first), **values}) + "\n" + rest


def test_the_newest_run_is_taken_and_its_plan_is_in_its_script(tmp_path: Path) -> None:
    old, new = a_run(tmp_path, "b"), a_run(tmp_path, "a")
    os.utime(old / "job.sbatch", (1, 1))
    run = finished_run(None, plan_file=None, folder=tmp_path)
    assert run.metrics == new / "metrics.jsonl"
    assert (run.plan.layout, run.plan_sha256) == (PLAN.layout, DIGEST)
    step, *_ = comparison(run)
    assert (step.predicted, step.measured, step.inside_band) == (0.2, 0.25, True)


def test_metrics_of_elsewhere_need_their_plan(tmp_path: Path) -> None:
    metrics = tmp_path / "elsewhere.jsonl"
    metrics.write_text(ON_GPUS)
    with pytest.raises(SpecError, match="--plan"):
        finished_run(metrics, plan_file=None, folder=tmp_path)
    write_plan(PLAN, tmp_path / "fsdpplan.json")
    by_default = finished_run(metrics, plan_file=None, folder=tmp_path)
    write_plan(PLAN, tmp_path / "named.json")
    named = finished_run(metrics, plan_file=tmp_path / "named.json", folder=tmp_path)
    assert by_default.plan == named.plan == PLAN
    assert named.plan_sha256 == DIGEST


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "reported no step"),
        (ON_GPUS.rpartition('{"event": "summary"')[0], "has not ended, or was killed, after 12"),
        (ON_GPUS.replace('"steps_measured": 7', '"steps_measured": 4'), "4 steps to measure"),
        (told(ON_GPUS, plan_sha256="f" * 64), "of another plan"),
        (ON_GPUS.replace('"world": 2', '"world": 4'), "4 ranks"),
    ],
    ids=["nothing", "killed", "short", "another plan", "another size"],
)
def test_what_cannot_be_compared_is_refused(
    metrics: str | None, words: str, tmp_path: Path
) -> None:
    a_run(tmp_path, metrics=metrics)
    with pytest.raises(SpecError, match=words) as caught:
        finished_run(None, plan_file=None, folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_that_names_its_plan_is_taken(tmp_path: Path) -> None:
    a_run(tmp_path, metrics=told(ON_GPUS, plan_sha256=DIGEST))
    assert finished_run(None, plan_file=None, folder=tmp_path).notes == ()


def test_without_any_run_it_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="type fsdpplan run first"):
        finished_run(None, plan_file=None, folder=tmp_path)
    with pytest.raises(SpecError, match="does not exist"):
        finished_run(tmp_path / "nowhere", plan_file=None, folder=tmp_path)


def test_a_stopped_run_is_compared_and_said_to_be_one(tmp_path: Path) -> None:
    stopped = ON_GPUS.replace('"stopped_by_signal": null', '"stopped_by_signal": 15')
    a_run(tmp_path, metrics=stopped)
    (note,) = finished_run(None, plan_file=None, folder=tmp_path).notes
    assert "signal 15" in note


def test_a_program_of_ones_own_need_not_write_a_summary(tmp_path: Path) -> None:
    steps = [line for line in ON_GPUS.splitlines() if '"event": "step"' in line]
    a_run(tmp_path, metrics="\n".join(steps))
    run = finished_run(None, plan_file=None, folder=tmp_path)
    (note,) = run.notes
    assert "no summary" in note
    assert run.measured.measured_steps == 7


@pytest.mark.parametrize(
    ("limits", "passed"),
    [
        (Limits(min_mfu_fraction=0.2), True),
        (Limits(min_mfu_fraction=0.21), False),
        (Limits(max_reserved_bytes=2000), True),
        (Limits(max_reserved_bytes=1999), False),
        (Limits(max_error_fraction=0.21), True),
        (Limits(max_error_fraction=0.19), False),
    ],
)
def test_a_limit_is_kept_or_not(limits: Limits, passed: bool, tmp_path: Path) -> None:
    a_run(tmp_path)
    run = finished_run(None, plan_file=None, folder=tmp_path)
    (gate,) = gates(run, limits)
    assert gate.passed is passed
    assert gate.words
    assert gates(run, Limits()) == ()


def test_a_run_is_not_held_to_what_it_does_not_report(tmp_path: Path) -> None:
    a_run(tmp_path, metrics=METRICS)
    run = finished_run(None, plan_file=None, folder=tmp_path)
    with pytest.raises(SpecError, match="--max-reserved"):
        gates(run, Limits(max_reserved_bytes=10**9))


def test_collectives_are_compared_axis_by_axis_where_the_profiler_saw_them(tmp_path: Path) -> None:
    lines = [
        {
            "event": "communication",
            "axis": "dp_shard",
            "collective": "all_gather",
            "seconds": seconds,
            "exposed_seconds": 0.01,
            "count": 8,
            "bytes": 10**9,
        }
        for seconds in (0.5, 0.05)
    ]
    a_run(tmp_path, metrics=ON_GPUS + "\n".join(map(json.dumps, lines)))
    run = finished_run(None, plan_file=None, folder=tmp_path)
    rows = {(row.axis, row.collective): row for row in communication(run)}
    seen = rows["dp_shard", "all_gather"].measured
    assert seen is not None
    assert (seen.seconds, seen.exposed_seconds, seen.count) == (0.05, 0.01, 8)
    planned = {(cost.axis, cost.collective) for cost in PLAN.estimate.communication}
    assert {*rows} == planned | {("dp_shard", "all_gather")}


def profiled(*calls: tuple[str, float, float | None], idle: float | None = 0.02) -> str:
    """Metrics of a run whose profile saw these calls: (axis, seconds, exposed seconds)."""
    lines: list[dict[str, object]] = [
        {
            "event": "communication",
            "axis": axis,
            "collective": "all_gather",
            "seconds": seconds,
            "exposed_seconds": exposed,
        }
        for axis, seconds, exposed in calls
    ]
    if idle is not None:
        lines.append({"event": "profiled", "idle_seconds": idle, "step_seconds": 0.25})
    return ON_GPUS + "\n".join(map(json.dumps, lines))


@pytest.mark.parametrize(
    ("limits", "passed"),
    [
        (Limits(min_overlap_fraction=0.75), True),
        (Limits(min_overlap_fraction=0.76), False),
        (Limits(max_idle_seconds=0.02), True),
        (Limits(max_idle_seconds=0.019), False),
    ],
)
def test_overlap_and_idle_are_kept_or_not(limits: Limits, passed: bool, tmp_path: Path) -> None:
    # a call of which nobody knows what hid it counts on neither side
    a_run(tmp_path, metrics=profiled(("dp_shard", 0.06, 0.01), ("tp", 0.02, 0.01), ("cp", 9, None)))
    (gate,) = gates(finished_run(None, plan_file=None, folder=tmp_path), limits)
    assert gate.passed is passed
    assert gate.words


def test_a_run_without_a_profile_is_not_held_to_what_one_says(tmp_path: Path) -> None:
    a_run(tmp_path, metrics=profiled(("dp_shard", 0.06, None), idle=None))
    run = finished_run(None, plan_file=None, folder=tmp_path)
    for limits in (Limits(min_overlap_fraction=0.5), Limits(max_idle_seconds=1.0)):
        with pytest.raises(SpecError, match="--profile 10:3"):
            gates(run, limits)


def test_overlap_and_waits_stand_beside_their_prediction(tmp_path: Path) -> None:
    a_run(tmp_path, metrics=profiled(("dp_shard", 0.06, 0.015), ("tp", 0.02, 0.005)))
    rows = communication(finished_run(None, plan_file=None, folder=tmp_path))
    found = overlap(rows)
    assert found is not None
    assert found.measured_fraction == pytest.approx(0.75)
    costs = PLAN.estimate.communication
    whole = sum(cost.seconds for cost in costs)
    if whole:
        hidden = 1 - sum(cost.exposed_seconds for cost in costs) / whole
        assert found.predicted_fraction == pytest.approx(hidden)
    by_axis = {one.axis: one for one in waits(rows)}
    assert by_axis["dp_shard"].measured_seconds == pytest.approx(0.015)
    assert by_axis["tp"].measured_seconds == pytest.approx(0.005)
    for axis in {cost.axis for cost in costs}:
        own = sum(cost.exposed_seconds for cost in costs if cost.axis == axis)
        assert by_axis[axis].predicted_seconds == pytest.approx(own)
    assert overlap(()) is None
    assert waits(()) == ()
