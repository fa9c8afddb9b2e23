"""Rehearse a plan: its own training program at full world size, in one CPU process a rank.

The program is started as a job would start it, with the plan in a file; `--rehearse` puts a process
group of ranks that are not there and tensors that hold nothing beneath it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpplan.cost.schedule.order import microbatches_refusal
from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.run.folder import trainer_sources
from fsdpplan.run.rehearse.compare import ComparedRank, RankReport, compared_rank
from fsdpplan.run.rehearse.ranks import ChosenRank
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import torch_release

MICRO_BATCHES = 3
"""Of gradient accumulation: first, between, last."""

TIME_LIMIT_SECONDS = 1800
"""After which a rehearsal is given up; the largest plans take a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What the ranks did, beside what was predicted of them."""

    world: int
    micro_batches: int
    """Of the step that was rehearsed."""
    planned_micro_batches: int
    """Of the plan's step: later ones repeat earlier ones."""
    ranks: tuple[ComparedRank, ...]
    errors: tuple[str, ...]
    """Why ranks did not get through, in sentences: the job would not run."""
    mismatches: tuple[str, ...]
    """Where ranks would wait for each other, in sentences."""
    differences: tuple[str, ...]
    """What a rehearsal does not do as the cluster will."""
    not_seen: tuple[str, ...]
    """What of the job it says nothing about."""
    torch_version: str
    """What it was rehearsed under."""
    planned_torch: str | None
    """Release that the plan is for; None: it does not say."""
    seconds: float
    own_model: bool
    """The model is not the plan's: predictions are not compared."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not agree, in sentences."""
        said = list(self.mismatches)
        for rank in self.ranks:
            said += rank.unreached
            said += rank.overflows if self.own_model else rank.unpredicted
        return tuple(said)

    @property
    def other_torch(self) -> str | None:
        """Why this says nothing of the plan's own torch; None where it does."""
        here = str(torch_release(self.torch_version))
        if self.planned_torch in (None, here):
            return None
        return (
            f"rehearsed under torch {here}, the plan is for {self.planned_torch}: this says "
            f"nothing about it; name a Python that has torch {self.planned_torch} by --python, or "
            f"plan for this one by fsdpplan recommend --torch {here}"
        )

    @property
    def said(self) -> tuple[str, ...]:
        """All that is wrong, in sentences."""
        other = () if self.other_torch is None else (self.other_torch,)
        return self.errors + self.problems + other

    @property
    def agrees(self) -> bool:
        """All ranks got through, match each other and do what was predicted, under the plan's
        torch."""
        return not self.said


def rehearse(
    plan: Plan,
    ranks: Sequence[ChosenRank],
    *,
    build: str | None = None,
    whole_step: bool = False,
    python: str | None = None,
) -> Rehearsal:
    """Rehearse `ranks` of the plan, or of the model that `build` (FILE.py:FUNCTION) makes; with
    another `python`, under its torch."""
    began = time.perf_counter()
    short = plan if whole_step else shortened(plan)
    report = _report(short, [chosen.rank for chosen in ranks], build, python)
    found = {each["rank"]: each for each in report["ranks"]}
    taken = taken_steps(short)
    compared = tuple(
        compared_rank(taken, chosen, _rank_report(found[chosen.rank]), whole=plan)
        for chosen in ranks
        if found[chosen.rank]["error"] is None
    )
    return Rehearsal(
        world=report["world"],
        micro_batches=short.layout.num_microbatches,
        planned_micro_batches=plan.layout.num_microbatches,
        ranks=compared,
        errors=tuple(f"rank {n}: {one['error']}" for n, one in found.items() if one["error"]),
        mismatches=tuple(report["mismatches"]),
        differences=tuple(report["differences"]),
        not_seen=tuple(report["not_seen"]),
        torch_version=report["torch_version"],
        planned_torch=plan.training.torch,
        seconds=time.perf_counter() - began,
        own_model=build is not None,
    )


def taken_steps(plan: Plan) -> Plan:
    """`plan` with the steps that a CPU takes in place of those in fp8, as the trainer's rehearsal
    has them: in bf16."""
    training = plan.training
    if "fp8" not in (training.precision, training.later_precision):
        return plan
    return replace(plan, training=training.in_precision("bf16"))


def shortened(plan: Plan) -> Plan:
    """`plan` with as many micro-batches as show all that its step does, if it has more.

    Of accumulated ones the first, the last and one between them; in a pipeline one more than are
    under way at once, so that some are done before others begin.
    """
    layout = plan.layout
    least = MICRO_BATCHES if layout.pp == 1 else layout.pp * layout.virtual_stages + 1
    enough = (
        number
        for number in range(least, layout.num_microbatches)
        if not microbatches_refusal(schedule=layout.schedule, pp=layout.pp, num_microbatches=number)
    )
    layout = replace(layout, num_microbatches=next(enough, layout.num_microbatches))
    training = replace(plan.training, global_batch=layout.global_batch)
    return replace(plan, layout=layout, training=training)


def _rank_report(document: dict[str, Any]) -> RankReport:
    return RankReport(
        calls={
            (row["collective"], row["axis"], row["ranks"], row["dtype"]): (
                row["count"],
                row["bytes"],
            )
            for row in document["collectives"]
        },
        peak_bytes=document["peak_bytes"],
        peak_bytes_of=document["peak_bytes_of"],
        state_bytes=document["state_bytes"],
        parameters=document["parameters"],
        without_gradient=tuple(document["without_gradient"]),
    )


def _report(
    plan: Plan, ranks: Sequence[int], build: str | None, python: str | None
) -> dict[str, Any]:
    """What the trainer writes of `ranks`."""
    with tempfile.TemporaryDirectory(prefix="fsdpplan-rehearse-") as name:
        folder = Path(name)
        write_plan(plan, folder / "plan.json")
        words = [*_program(python, folder), "--plan", str(folder / "plan.json")]
        words += ["--rehearse", ",".join(map(str, ranks)), "--report", str(folder / "report.json")]
        words += ["--build", build] if build else []
        ended = _ended(words)
        try:
            text = (folder / "report.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LaunchError(_why(ended, python)) from None
        document: dict[str, Any] = json.loads(text)
        return document


def _program(python: str | None, folder: Path) -> list[str]:
    """The training program. Another Python runs a copy of it in `folder`, as in a job's, and finds
    nothing else of this environment."""
    if python is None:
        return [sys.executable, "-m", "fsdpplan.trainer"]
    found = shutil.which(python)
    if found is None:
        raise SpecError(f"there is no Python {python} here: name one that has torch by --python")
    for name, text in trainer_sources().items():
        copy = folder / "trainer" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    return [found, str(folder / "trainer" / "__main__.py")]


def _ended(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("FSDPPLAN_PLAN", None)
    try:
        return subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"the rehearsal took more than {TIME_LIMIT_SECONDS // 60} minutes: rehearse fewer "
            "ranks, --ranks 0"
        ) from error


def _why(ended: subprocess.CompletedProcess[str], python: str | None) -> str:
    """Why there is no report, in a sentence."""
    if "No module named 'torch'" in ended.stderr:
        return (
            "a rehearsal runs the training program, which needs PyTorch, and "
            f"{python or 'this Python'} has none: pip install torch (the CPU build does), then "
            "rehearse again"
        )
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ") if lines else f"exit code {ended.returncode}"
    return f"the training program could not be rehearsed: {last}; correct that, and rehearse again"
