"""Folders of runs to report on: one of real processes over gloo that an earlier fsdpplan left, and
one on GPUs that was started again, with what NCCL said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.run.test_recorded import RECORDED
from tests.run.test_verify import ON_GPUS, PLAN, a_run

NCCL = Path(__file__).parents[1] / "recordings" / "nccl" / "2.18-infiniband-nvls.log"

ATTEMPTS = (
    {"event": "attempt", "attempt": 1, "most": 4, "nodes": ["n1", "n2"]},
    {
        "event": "attempt_ended",
        "attempt": 1,
        "exit_code": 1,
        "next": "retry",
        "reason": "node n2 failed",
    },
    {"event": "attempt", "attempt": 2, "most": 4, "nodes": ["n1", "n3"]},
    {"event": "attempt_ended", "attempt": 2, "exit_code": 0, "next": "end", "reason": ""},
)

PROFILED = (
    {
        "event": "communication",
        "axis": "dp_shard",
        "collective": "all_gather",
        "seconds": 0.05,
        "exposed_seconds": 0.01,
    },
    {"event": "profiled", "idle_seconds": 0.02, "step_seconds": 0.25},
)


def gloo_run(folder: Path) -> Path:
    """The recorded run, which has its plan beside it."""
    shutil.copytree(RECORDED / "folder", folder, dirs_exist_ok=True)
    (run,) = (folder / "fsdpplan-runs").iterdir()
    return run


def steps(numbers: range, **values: float) -> list[dict[str, object]]:
    """Events of steps."""
    each = {"tokens_per_second": 1024.0, "mfu_fraction": 0.2, "allocated_bytes": 1000}
    return [
        {
            "event": "step",
            "step": number,
            "loss": 5.0 - number / 1000,
            "step_seconds": 0.25,
            "reserved_bytes": 2000,
            **each,
            **values,
        }
        for number in numbers
    ]


def gpu_run(folder: Path) -> Path:
    """A run that was killed behind step 1,500 and went on from 1,000 on another node to 3,000, with
    one slow step on the way."""
    run = a_run(folder)
    summary = json.loads(ON_GPUS.splitlines()[-1])
    begin: dict[str, object] = {"event": "start", "steps": 3000, "world": 2}
    events = [
        {**begin, "step": 0},
        *steps(range(1, 1501)),
        {**begin, "step": 1000},
        *steps(range(1001, 3001)),
        {**summary, "steps_measured": 1995},
        *PROFILED,
    ]
    events[2000] = {**events[2000], "step_seconds": 7.5}
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (run / "metrics.jsonl").write_text(lines)
    (run / "attempts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ATTEMPTS))
    (run / "bad-nodes").write_text("n2\tits link was down\n")
    shutil.copy(NCCL, run / "nccl.n1.1.log")
    assert PLAN.case.on_cuda
    return run
