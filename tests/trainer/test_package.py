"""The folder works as `fsdpplan.trainer`, and copied beside a job under its own name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.run.folder import trainer_sources
from tests.trainer import plans

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This one, without what would let a copy find the original."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1", "FSDPPLAN_PLAN": plans.plan_text(), **variables}


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A job folder with the trainer's source in it."""
    for name, text in trainer_sources().items():
        file = tmp_path / "trainer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_help_is_for_people_and_imports_nothing_else_of_ours() -> None:
    code = (
        "import gc, sys, fsdpplan.trainer.train; assert gc.isenabled(); "
        "print(sorted(m for m in sys.modules if m.startswith('fsdpplan.') "
        "and not m.startswith('fsdpplan.trainer'))); "
        "fsdpplan.trainer.train.main(['--help'])"
    )
    finished = run("-c", code, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
    ours, _, said = finished.stdout.partition("\n")
    assert ours == "['fsdpplan.spec', 'fsdpplan.spec.conventions', 'fsdpplan.spec.trainer_options']"
    for option in ("--plan", "--data", "--checkpoint-dir", "--metrics", "--resume"):
        assert option in said


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("command", [["-m", "trainer"], ["trainer/__main__.py"], ["trainer"]])
def test_a_copied_folder_trains(copy: Path, command: list[str]) -> None:
    finished = run(*command, "--steps", "1", cwd=copy)
    assert finished.returncode == 0, finished.stderr
    assert "step 1/1" in finished.stdout


@pytest.mark.gloo
def test_torchrun_starts_a_copied_folder(copy: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    plan = plans.plan_text(dp_shard=2)
    finished = run(*command, "trainer/__main__.py", "--steps", "1", cwd=copy, FSDPPLAN_PLAN=plan)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("step 1/1") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--clip-norm", "0"], "--clip-norm"),
        (["--checkpoint-every", "5"], "--checkpoint-dir"),
        (["--warmup-steps", "1.5"], "--warmup-steps"),
    ],
)
def test_a_mistaken_option_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdpplan.trainer.options import parse_options

    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_without_a_plan_the_next_thing_to_type_is_said(tmp_path: Path) -> None:
    finished = run("-m", "fsdpplan.trainer", cwd=ROOT, FSDPPLAN_PLAN="")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: there is no plan: give --plan FILE")
    assert len(finished.stderr.splitlines()) == 1
