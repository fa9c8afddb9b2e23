"""Start the trainer's command line on forked gloo ranks, and read what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import pytest
import torch.distributed as dist

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.distributed import leave
from fsdpplan.trainer.torch_versions import lacking
from tests.trainer import forks, plans

TIMEOUT_SECONDS = 180

ASKED = "FSDPPLAN_TESTS_ASKED"
"""Names of the cases that ranks are to measure, as JSON; all where it is not set."""

Case = TypeVar("Case")
Measure = TypeVar("Measure", bound=Callable[..., Any])


class Found(dict[str, Any]):
    """What ranks measured; whoever looks into what this torch lacks is skipped, with the trainer's
    own refusal."""

    def __missing__(self, key: str) -> Any:
        if "refused" in self:
            pytest.skip(self["refused"])
        raise KeyError(key)


def refusable(measure: Measure) -> Measure:
    """`measure` of a plan's text, or that this torch lacks what the plan asks for."""

    @wraps(measure)
    def told(text: str, *args: Any, **kwargs: Any) -> Any:
        refused = "; ".join(lacking(parse_plan(text)))
        return {"refused": refused} if refused else measure(text, *args, **kwargs)

    return cast(Measure, told)


def forked(
    world: int, function: str, out: Path, *, timeout_seconds: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`MODULE:FUNCTION`, called with `out` on `world` forked ranks."""
    process = forks.start(str(world), function, str(out), **environment)
    out_text, err_text = process.communicate(timeout=timeout_seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out_text, err_text)


def leave_with(results: dict[str, Any], out: Path, *, writer: int = 0) -> NoReturn:
    """End of a function on forked ranks: one writes what `measured` reads, all leave."""
    if dist.get_rank() == writer:
        out.write_text(json.dumps(results), encoding="utf-8")
    leave(0)


def is_asked(name: str) -> bool:
    """Whether a case is to be measured on these ranks."""
    return ASKED not in os.environ or name in json.loads(os.environ[ASKED])


def asked_of(cases: dict[str, Case]) -> dict[str, Case]:
    """Those that are to be measured on these ranks."""
    return {name: case for name, case in cases.items() if is_asked(name)}


def measured(
    world: int, function: str, out: Path, *, asked: Iterable[str] | None = None, **environment: str
) -> dict[str, Any]:
    """The JSON that a function on forked ranks writes into `out`, of the cases `asked` for."""
    if asked is not None:
        environment[ASKED] = json.dumps(sorted(asked))
    finished = forked(world, function, out, timeout_seconds=300, **environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"), object_hook=Found)
    return found


def start(folder: Path, world: int, *arguments: str, **plan: Any) -> subprocess.Popen[str]:
    """The trainer on `world` ranks; its metrics go to `folder/metrics.jsonl`."""
    folder.mkdir(exist_ok=True)
    plan_path = folder / "plan.json"
    plan_path.write_text(plans.plan_text(**plan), encoding="utf-8")
    metrics = folder / "metrics.jsonl"
    options = ["--plan", str(plan_path), "--metrics", str(metrics), "--learning-rate", "3e-3"]
    return forks.start(str(world), *options, *arguments)


def start_function(world: int, function: str, folder: Path) -> subprocess.Popen[str]:
    """`function`, as `module:name`, on each of `world` ranks."""
    return forks.start(str(world), function, str(folder))


def finish(process: subprocess.Popen[str], *, exit_code: int = 0) -> str:
    """Wait for the end and return the two outputs together."""
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == exit_code, (
        f"exit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    )
    return out + err


def train(folder: Path, world: int, *arguments: str, exit_code: int = 0, **plan: Any) -> str:
    """Run the trainer to its end."""
    return finish(start(folder, world, *arguments, **plan), exit_code=exit_code)


def rank_pids(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, which come first on stdout."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()[1:]]


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    """The metrics lines of one kind."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    whole = [json.loads(line) for line in text.splitlines()]
    return [line for line in whole if line["event"] == event]


def losses(folder: Path) -> dict[int, float]:
    """Step to loss; no step comes twice."""
    pairs = [(line["step"], line["loss"]) for line in lines(folder, "step")]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until the metrics file has a line of `step`."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and f'"event": "step", "step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {finish(process)}")
