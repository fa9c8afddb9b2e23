"""Every screen at four widths: no line is wider than the terminal, and none holds what would move
it; stderr in a pipe is whole lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import Commands
from fsdpplan.cli.resolve import found
from fsdpplan.cli.views.render import PROSE_COLUMNS
from tests.run.test_verify import ON_GPUS, a_run

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (60, 80, 120, 200)
QUICK = "--pp 1 --cp 1 --tp 1 --micro-batch 1 --activation-checkpointing none"
SMALL = f"--params 1.3e9 --hardware dgx-h100 --no-ledger {QUICK}"

SCREENS = (
    f"recommend --gpus 16 --no-save --goodput {SMALL}",
    f"recommend --gpus 8,16 --no-save --tokens 1T --deadline 90d --price 2 {SMALL}",
    f"estimate --gpus 16 --dp-shard 8 --dp-replicate 2 --tokens 1T {SMALL}",
    "estimate --model qwen3-30b-a3b --gpus 32 --dp-shard 32 --ep 8 --hardware dgx-h100 --no-ledger",
    f"recommend --gpus 16 --no-save {SMALL}",
    f"sweep --gpus 8:32 {SMALL}",
    "trace --out plan.trace.json",
    "bug-report",
    "explain",
    "explain --rules",
    "explain --nccl",
    "what-if --inter-bw 100Gb/s --no-ledger",
    "compare fsdpplan.json other.json --no-ledger",
    f"compare --gpus 8,16,32 --tokens 1T {SMALL}",
    f"sweep --gpus 8:32 --tokens 1T {SMALL}",
    f"sweep --gpus 8,16 --price 2,3 {SMALL} --hardware dgx-h100,dgx-b200 --scaling strong",
    "replan --gpus 32 --no-ledger --save again.json",
    "diff fsdpplan.json other.json",
    "check --list",
    "check --assert 'mfu > 0.1' --assert 'step < 1ms'",
    "verify --min-mfu 90%",
    "status",
    "learn runs.csv --ledger new.sqlite",
    "ledger --ledger runs.sqlite",
    "detect --from host.json",
    "validate runs.csv",
    "profiles",
    "profiles dgx-h100",
    "profiles h100-sxm-80g",
    "models",
    "models deepseek-v3",
)
"""Commands with something to show, in the folder of `folder`."""

NO_SCREEN = {
    "emit-launch": "a script",
    "run": "that of a job; its views are those of verify",
    "rehearse": "it takes torch: tests/cli/commands/test_rehearse.py",
    "logs": "what a job printed",
    "report": "a sentence beside a page: tests/report",
    "cancel": "a sentence a run",
    "export": "a sentence",
    "calibrate": "tests/cli/commands/test_calibrate.py",
}

UNITS = "GiB|MiB|GB|GB/s|TB/s|ms|us|s|%|days|h"
CUT = re.compile(rf"(?:^|[ (])[\d.,]*\d\n +(?:{UNITS})(?:[ ,;:).]|$)", re.M)
"""A number at the end of a line whose unit begins the next one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With plans, a finished run, a table of runs and a ledger of them."""
    place = tmp_path_factory.mktemp("screens")
    a_run(place, metrics=ON_GPUS)
    plan = f"recommend --gpus 16 {SMALL} --save {place / 'fsdpplan.json'}"
    assert exit_code_of(plan.split()) == 0
    other = f"{plan} --seq-len 8192 --save {place / 'other.json'}"
    assert exit_code_of(other.split()) == 0
    table = (ROOT / "tests/golden/bench/train_runs.csv").read_text().splitlines()
    (place / "runs.csv").write_text("\n".join(table[:7]) + "\n")
    assert (
        exit_code_of(["learn", str(place / "runs.csv"), "--ledger", str(place / "runs.sqlite")])
        == 0
    )
    machine = sorted((ROOT / "tests/recordings/machines").glob("*.json"))
    if machine:
        (place / "host.json").write_bytes(machine[0].read_bytes())
    return place


@pytest.fixture(scope="module")
def once() -> Callable[..., Any]:
    """A search that is made once for all widths."""
    real, memory = found.recommend, dict[str, Any]()

    def recommend(**of: Any) -> Any:
        key = repr([of[name] for name in ("model", "cluster", "training", "pins")])
        if key not in memory:
            memory[key] = real(**of)
        return memory[key]

    return recommend


def test_every_command_has_a_screen_here_or_a_reason() -> None:
    assert {one.split()[0] for one in SCREENS} | NO_SCREEN.keys() == {*Commands()}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("command", SCREENS)
def test_a_screen_fits_the_terminal(
    command: str,
    folder: Path,
    once: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(found, "recommend", once)
    shown = []
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        for made in ("again.json", "new.sqlite"):
            (folder / made).unlink(missing_ok=True)
        assert exit_code_of(shlex.split(command)) in (0, 3, 6)
        text, err = capsys.readouterr()
        lines = text.splitlines()
        assert [line for line in lines if len(line) > width] == []
        assert [line for line in lines if line != line.rstrip()] == []
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text + err)
        assert not CUT.search(text), CUT.search(text)
        assert text
        shown.append(lines)
    # what has room takes it: nothing is longer where the terminal is wider
    assert sorted(map(len, shown), reverse=True) == [*map(len, shown)]
    told = [line for line in shown[-1] if len(line) > PROSE_COLUMNS]
    assert all("   " in line.strip() or "--" in line or "  " in line.strip() for line in told)
