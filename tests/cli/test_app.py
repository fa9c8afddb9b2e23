"""The program as a process: exit codes, streams, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan import __version__
from fsdpplan.cli.app import exit_code_of

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "rich", "tabulate")


def fsdpplan(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fsdpplan", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_fits_the_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        "recommend",
        "estimate",
        "explain",
        "what-if",
        "compare",
        "sweep",
        "check",
        "replan",
        "diff",
        "report",
        "detect",
        "calibrate",
        "emit-launch",
        "rehearse",
        "run",
        "status",
        "logs",
        "cancel",
        "export",
        "validate",
        "bug-report",
        "profiles",
        "models",
    )
    assert exit_code_of(["--help"]) == 0
    top = capsys.readouterr().out
    for command in commands:
        assert f"  {command} " in top
        assert exit_code_of([command, "--help"]) == 0
        page = capsys.readouterr().out
        assert max(map(len, page.splitlines())) <= 80, command
    assert "..." not in top.partition("COMMAND [ARGS]...")[2], "a short help is whole"


def test_no_arguments_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of([]) == 0
    assert "\nPlan:\n" in capsys.readouterr().out


def test_version_is_said_by_the_process() -> None:
    result = fsdpplan("--version")
    assert (result.returncode, result.stdout) == (0, f"fsdpplan {__version__}\n")


def test_bad_input_as_a_process() -> None:
    result = fsdpplan("recommend", "--params", "70GB", "--gpus", "64")
    assert result.returncode == 2
    assert result.stdout == ""
    # on a busy machine behind what it was at
    assert result.stderr.splitlines()[-1].startswith("fsdpplan: --params")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_it_quietly(tmp_path: Path, unbuffered: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m fsdpplan models --json | head -n 1"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.stderr == ""
    assert result.returncode == 141, "it prints more than a pipe takes"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    command = f"{sys.executable} -m fsdpplan models > /dev/full"
    result = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "No space left on device; send it elsewhere" in result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_a_closed_stream_is_an_empty_one(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m fsdpplan models {closed}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert bool(result.stdout) == (">&-" not in closed.split())


def test_a_file_that_the_system_refuses_is_named_whatever_was_done_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/a/b")

    monkeypatch.setattr("fsdpplan.files.catalogue.model_names", refuse)
    assert exit_code_of(["models"]) == 2
    refused = "/a/b cannot be used: Permission denied; check the path and its permissions"
    assert capsys.readouterr().err == f"fsdpplan: {refused}\n"


def _raises_once(function: str, module: str, name: str) -> str:
    """Code after which the signal comes as the function is called for the first time."""
    return (
        f"import {module} as module\nreal, calls = module.{function}, []\n"
        f"def first(*of):\n    calls.append(of)\n    if len(calls) == 1:\n"
        f"        signal.raise_signal(signal.{name})\n    return real(*of)\n"
        f"module.{function} = first"
    )


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize(
    "moment",
    [
        *("while it imports", "while it begins", "while it works"),
        "while it ends",
        "when all is done",
    ],
)
def test_a_signal_ends_it_without_a_traceback(name: str, code: int, moment: str) -> None:
    at = {
        "while it imports": f"sys.meta_path.insert(0, type('Finder', (), {{'find_spec': "
        f"staticmethod(lambda name, *_: signal.raise_signal(signal.{name}) "
        "if name == 'fsdpplan.cli.app' else None)}))",
        # before anything is under way that would take the signal back, and after it
        "while it begins": _raises_once("exit_code_of", "fsdpplan.cli.app", name),
        "while it ends": _raises_once("be_deaf", "fsdpplan.cli.process", name),
        "while it works": "import fsdpplan.files.catalogue as catalogue; "
        f"catalogue.model_names = lambda: signal.raise_signal(signal.{name})",
        "when all is done": f"import atexit; atexit.register(signal.raise_signal, signal.{name})",
    }[moment]
    program = (
        f"import sys, signal\n{at}\nsys.argv = ['fsdpplan', 'models']\n"
        "from fsdpplan.__main__ import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in result.stderr
    if moment == "when all is done":
        assert (result.returncode, result.stderr) == (0, "")
    elif moment in ("while it begins", "while it ends"):
        assert (result.returncode, result.stderr) == (code, "")
    else:
        said = "interrupted\n" if name == "SIGINT" else "terminated\n"
        assert (result.returncode, result.stderr) == (code, said)


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdpplan.files.catalogue.model_names", interrupt)
    assert exit_code_of(["models"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (
            ("--help",),
            (
                *HEAVY,
                "pydantic",
                "fsdpplan.cost",
                "fsdpplan.files",
                "fsdpplan.cli.commands.recommend",
            ),
        ),
        (
            ("recommend", "--help"),
            (*HEAVY, "pydantic", "numpy", "fsdpplan.cli.commands.run"),
        ),
        (
            ("recommend", "--params", "1e9", "--gpus", "4", "--hardware", "dgx-h100"),
            (*HEAVY, "pydantic", "numpy", "pynvml", "fsdpplan.cli.commands.run"),
        ),
    ],
    ids=" ".join,
)
def test_a_command_imports_only_what_it_needs(
    words: tuple[str, ...], unwanted: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys, json, contextlib, io\n"
        "from fsdpplan.cli.app import exit_code_of\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    code = exit_code_of({list(words)!r})\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    code, modules = json.loads(result.stdout)
    assert code == 0, result.stderr
    assert not [name for name in modules if name in unwanted]
