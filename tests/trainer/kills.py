"""Kill jobs again and again and print what came of it, as JSON.

    python kills.py random KILLS FOLDER    jobs of two ranks, at random moments
    python kills.py each FOLDER            one rank, before each file operation of a save

One process imports torch and forks the ranks of every job, which is safe because it runs no torch
operation itself. Moments and victims are drawn from a seed; whatever they hit, what is asserted of
the outcome must hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from fsdpplan.trainer.checkpoint.files import (
    damage,
    read_manifest,
    resumable,
    step_of,
    whole_checkpoints,
)
from fsdpplan.trainer.checkpoint.progress import Progress
from fsdpplan.trainer.checkpoint.runs import Checkpoints
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.train import main
from tests.trainer import plans

WORLD = 2
STEPS = 24
EVERY = 2
TIME_LIMIT_SECONDS = 120
"""When one job counts as hung."""

RECIPE = {"warmup_steps": 0, "weight_decay": 0.1, "clip_norm": 1.0}

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events of what changes folders (Python library, "Audit events table")."""

PLAN = plans.plan_text(
    dp_shard=WORLD,
    model={"layers": 1, "hidden": 16, "ffn_hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8},
    training={"seq_len": 8},
)


class Job:
    """Two ranks of the trainer's command line."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.meeting = folder / f"meeting-{time.monotonic_ns()}"
        self.ranks = [self._fork(rank, folder) for rank in range(WORLD)]
        self.codes: dict[int, int] = {}

    def _fork(self, rank: int, folder: Path) -> int:
        child = os.fork()
        if child:
            return child
        try:
            log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
            train(rank, self.meeting, folder)
        finally:
            os._exit(99)

    def alive(self) -> list[int]:
        """Ranks that still run."""
        for rank in self.ranks:
            if rank not in self.codes:
                done, status = os.waitpid(rank, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in self.ranks if rank not in self.codes]

    def kill(self, victims: list[int]) -> None:
        """Kill some ranks, and soon what they leave behind, as torchrun does."""
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        deadline = time.monotonic() + 0.1
        while self.alive():
            if time.monotonic() > deadline:
                for rank in self.alive():
                    os.kill(rank, signal.SIGKILL)
            time.sleep(0.001)


def train(rank: int, meeting: Path, folder: Path) -> None:
    """One rank of a job that goes on from whatever is in `folder`."""
    os.environ["FSDPPLAN_PLAN"] = PLAN
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    checkpoints = ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", str(EVERY)]
    main(["--steps", str(STEPS), "--metrics", str(folder / "metrics.jsonl"), *checkpoints])


def wait_until(job: Job, happened: Any) -> bool:
    """Whether it happened before the job ended."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while not happened():
        if not job.alive():
            return False
        if time.monotonic() > deadline:
            job.kill(job.ranks)
            raise SystemExit(f"a job hung: {[*job.meeting.parent.glob('rank-*.log')]}")
        time.sleep(0.0005)
    return True


def never() -> bool:
    """What does not happen."""
    return False


def strike(job: Job, folder: Path, draw: random.Random) -> str:
    """Kill the job at some moment; returns what was aimed at, or that it ended before."""
    aim = draw.choice(["at once", "a step", "a save", "a save", "a publication"])
    delay = draw.random() * {"at once": 0.3, "a step": 0.1}.get(aim, 0.008)
    victims = draw.choice([job.ranks, job.ranks[:1], job.ranks[1:]])
    saved = folder / "saved"
    before = {path.name for path in whole_checkpoints(saved)}
    lines = file_bytes(folder / "metrics.jsonl")
    happened = {
        "at once": lambda: True,
        "a step": lambda: file_bytes(folder / "metrics.jsonl") > lines,
        "a save": lambda: any(saved.glob(".step-*.partial")),
        "a publication": lambda: any(p.name not in before for p in saved.glob("step-*")),
    }[aim]
    if not wait_until(job, happened):
        return "nothing"
    time.sleep(delay)
    job.kill(victims)
    return aim if any(code == -signal.SIGKILL for code in job.codes.values()) else "nothing"


def file_bytes(path: Path) -> int:
    """Length of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def losses(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses, in the order of the metrics file."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


def damaged(folder: Path) -> list[str]:
    """What is wrong with the checkpoint to resume from, and with any other that was published."""
    saved = folder / "saved"
    found = []
    for path in {*resumable(saved), *whole_checkpoints(saved)}:
        records = read_manifest(path)
        found.append(damage(records, path, rank=0, ranks=1) if records else "no manifest")
    return [problem for problem in found if problem]


def kill_jobs(kills: int, folder: Path) -> dict[str, Any]:
    """Kill until `kills` hit, over as many runs as that takes; each run is then let to its end."""
    draw = random.Random(20)
    undisturbed = folder / "undisturbed"
    wait_until(Job(undisturbed), never)
    curves, problems, aims = [], [], Counter[str]()
    run = 0
    while aims.total() < kills:
        place = folder / f"run-{run}"
        run += 1
        ended = False
        while not ended:
            job = Job(place)
            aim = strike(job, place, draw) if aims.total() < kills else "nothing"
            wait_until(job, never)
            ended = aim == "nothing"
            if ended and set(job.codes.values()) != {0}:
                log = "".join(path.read_text() for path in sorted(place.glob("rank-*.log")))
                raise SystemExit(f"a job ended by itself with {job.codes}: {log[-3000:]}")
            aims[aim] += not ended
            problems += damaged(place)
        curves.append(losses(place))
        shutil.rmtree(place)
    return {
        "undisturbed": losses(undisturbed),
        "curves": curves,
        "problems": problems,
        "aims": dict(aims),
    }


def kill_each_operation(folder: Path) -> dict[str, Any]:
    """Let a save be killed before its first file operation, its second, and so on to its end."""
    problems, steps = [], []
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        place = folder / f"operation-{len(steps)}"
        child = os.fork()
        if child == 0:
            try:
                save_twice(place, survives=len(steps))
            except BaseException:
                traceback.print_exc()
            os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        problems += damaged(place)
        steps.append(step_of(resumable(place / "saved")[0]))
    if code != 0:
        raise SystemExit(f"a save ended with {code}")
    return {"resumed_steps": steps, "problems": problems}


def save_twice(folder: Path, *, survives: int) -> None:
    """Save steps 1 and 2; the second save dies after `survives` file operations."""
    plan = parse_plan(json.dumps({**json.loads(PLAN), **one_rank()}))
    assembled = assemble(plan, torch.device("cpu"), seed=0)
    optimizer = make_optimizer(assembled.model, Recipe(steps=2, learning_rate=1e-3, **RECIPE))
    checkpoints = Checkpoints(folder / "saved", plan, keep=1, background=True)
    checkpoints.begin(assembled.model, optimizer, seed=0, resume="never")
    for step in (1, 2):
        if step == 2:
            die_after(survives, folder)
        checkpoints.save(assembled.model, optimizer, progress_at(step))
        saved = checkpoints.wait()
        assert saved is not None
        assert not saved.problem
    os._exit(0)


def one_rank() -> dict[str, Any]:
    """The parts of a plan that say its ranks."""
    alone = json.loads(plans.plan_text())
    return {"cluster": alone["cluster"], "layout": alone["layout"]}


def progress_at(step: int) -> Progress:
    """Where a run of no data stands."""
    return Progress(
        step=step, sequences=0, seed=0, seq_len=8, steps=2, learning_rate=1e-3, warmup_steps=0
    )


def die_after(operations: int, folder: Path) -> None:
    """Kill this process when it begins one more operation on files in `folder`."""
    left = operations

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and any(str(folder) in str(argument) for argument in arguments):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hear)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *others = sys.argv[1:]
    if what == "random":
        print(json.dumps(kill_jobs(int(others[0]), Path(others[1]))))
    else:
        print(json.dumps(kill_each_operation(Path(others[0]))))
