"""No message shows a secret, whichever mistake was made with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import plan_json
from tests.emit.plans import make_plan

TOKEN = "hf_" + "Kx9" * 12
PASSWORD = "correct-horse-battery"


@pytest.fixture(autouse=True)
def _with_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdpplan.json").write_text(plan_json(make_plan("cpu", nodes=2)))


@pytest.mark.parametrize(
    "words",
    [
        ("--env", TOKEN),
        ("--env", PASSWORD),
        ("--env", f"MY NAME={PASSWORD}"),
        ("--env", f"NAME={PASSWORD}\a"),
        ("--env", f"DB_PASSWORD={PASSWORD}"),
        ("--env", f"NAME={TOKEN}"),
        ("--env-setup", f"export DB_PASSWORD={PASSWORD}"),
        ("--env-setup", f"export DB_PASSWORD={PASSWORD}\a"),
        ("--job-name", f"{TOKEN}\a"),
        ("--sbatch", f"comment={TOKEN}"),
        ("--script", "t.py", "--args", f"--db-password={PASSWORD}"),
        ("--script", "t.py", "--args", f"--db-password={PASSWORD} 'x"),
        ("--metrics", f"s3://me:{PASSWORD}@host/m"),
        ("plan.json", f"DB_PASSWORD={PASSWORD}"),
        ("--steps", f"DB_PASSWORD={PASSWORD}"),
    ],
)
def test_a_mistake_with_a_secret(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["emit-launch", *words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    for text in (out, err):
        assert TOKEN not in text
        assert PASSWORD not in text


def test_what_another_program_says_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    says = 'echo "sbatch: error: $DB_PASSWORD is wrong" >&2; exit 1'
    sbatch.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{says}\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)
    assert exit_code_of(["run", "--target", "slurm"]) == 5
    out, err = capsys.readouterr()
    assert "*** is wrong" in err
    assert PASSWORD not in out + err
