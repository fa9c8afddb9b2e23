"""A command that takes long says so on stderr: on a terminal one line that goes away again."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli import working
from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import AT_WORK, Commands
from fsdpplan.emit.safe_text import may_move
from fsdpplan.run.calibrate.measure import measuring_display
from fsdpplan.run.follow.show import LiveDisplay, PlainDisplay, display_for
from fsdpplan.search import recommend as search

SMALL = "--params 125e6 --gpus 2 --hardware dgx-h100 --seq-len 512 --no-ledger"

SEARCHES = {
    "recommend": f"recommend {SMALL}",
    "compare": f"compare {SMALL} --gpus 1,2",
    "replan": "replan --gpus 1 --no-ledger",
    "the fewest": "recommend --params 1e6 --hardware dgx-h100 --min-gpus --no-save --no-ledger",
    "validate": "validate",
}
"""Commands that search, or that other work keeps for more than a second."""

ONLY_READ = {"diff", "logs", "ledger", "profiles", "models"}
"""Commands that nothing is said of."""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plan")
    words = f"recommend {SMALL} --micro-batch 1 --save {place / 'fsdpplan.json'}".split()
    assert exit_code_of(words) == 0
    return place


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each command had taken longer than may be quiet."""
    monkeypatch.setattr(working, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(working, "LINES_SECONDS", 0.0)


@pytest.mark.parametrize("name", [*SEARCHES])
def test_whoever_searches_says_so(
    name: str,
    folder: Path,
    at_once: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    # what it says, not what it predicts
    monkeypatch.setattr("fsdpplan.cli.commands.validate.read_runs", lambda _: [])
    exit_code_of(SEARCHES[name].split())
    said = capsys.readouterr()
    begins = ("fsdpplan: searching", "fsdpplan: predicting")
    assert [line for line in said.err.splitlines() if line.startswith(begins)]
    assert "fsdpplan: searching" not in said.out


def test_every_command_is_watched_and_has_words_for_its_work() -> None:
    assert {*AT_WORK} == {*Commands()} - ONLY_READ
    for command in Commands().values():
        assert command.callback.__wrapped__.__wrapped__, command.name  # Typer's, ours, expanded's


def test_a_search_is_watched_while_it_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = search.recommend

    def recommend(*of: Any, **named: Any) -> Any:
        seen.append(working._now is not None)
        return real(*of, **named)

    monkeypatch.setattr("fsdpplan.cli.resolve.found.recommend", recommend)
    monkeypatch.chdir(folder)
    assert exit_code_of(SEARCHES["recommend"].split()) == 0
    assert seen == [True]
    assert working._now is None


def test_nothing_is_said_of_what_is_quick(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(working, "QUIET_SECONDS", 3600.0)
    assert exit_code_of(["explain", "--rules"]) == 0
    assert exit_code_of(["models"]) == 0
    assert capsys.readouterr().err == ""


def test_in_a_pipe_it_is_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(working, "QUIET_SECONDS", 0.0)
    with working.watched("searching"):
        for number in range(1000):
            working.say(f"searching: {number} \x1b[2J")
    said = capsys.readouterr().err
    assert 1 <= said.count("\n") <= 3
    assert "\r" not in said
    assert "\x1b" not in said


def test_a_terminal_is_left_as_it_was(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working.watched("searching"):
        for number in range(12, 0, -1):
            working.say("layouts, many of them; " * number)
        working.hide()
        print("fsdpplan: a warning", file=terminal)
        working.say("again")
    text = terminal.getvalue()
    assert "\x1b" not in text
    rows = [screen_row(line) for line in text.split("\n")]
    assert rows == ["fsdpplan: a warning", ""]
    assert max(len(part) for part in text.replace("\n", "\r").split("\r")) < 80


def screen_row(text: str) -> str:
    """What is left of a line whose beginning is written over."""
    row: list[str] = []
    for part in text.split("\r"):
        row[: len(part)] = part
    return "".join(row).rstrip()


@pytest.mark.parametrize(
    ("is_terminal", "environment", "moves"),
    [
        (True, {}, True),
        (True, {"TERM": "xterm-256color", "NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (False, {}, False),
    ],
)
def test_lines_are_written_over_on_terminals_that_can(
    is_terminal: bool, environment: dict[str, str], moves: bool
) -> None:
    assert may_move(is_terminal, environment) is moves


def test_a_job_is_followed_without_bars_where_nothing_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    assert isinstance(display_for(Terminal()), LiveDisplay)
    assert isinstance(measuring_display(Terminal()), LiveDisplay)
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(variable, value)
        assert isinstance(display_for(Terminal()), PlainDisplay)
        assert isinstance(measuring_display(Terminal()), PlainDisplay)
        monkeypatch.delenv(variable)


def test_the_answer_takes_the_moving_line_away(tmp_path: Path) -> None:
    """Both streams are one terminal: of what was searched nothing is left before the answer."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    program = (
        "from fsdpplan.cli import working\nworking.QUIET_SECONDS = 0.0\n"
        "import sys; sys.argv = ['fsdpplan', 'models', 'gpt2']\n"
        "from fsdpplan.files import catalogue\nreal = catalogue.model_names\n"
        "catalogue.model_names = lambda: (working.say('reading'), real())[1]\n"
        "from fsdpplan.__main__ import main\nmain()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=theirs,
            stderr=theirs,
            cwd=tmp_path,
            env={**environment, "TERM": "xterm"},
            check=False,
            timeout=120,
        )
        os.close(theirs)
        text = terminal.read(65536).decode().replace("\r\n", "\n")
    assert ended.returncode == 0
    assert "\rfsdpplan: reading (0 s)" in text
    rows = [screen_row(line) for line in text.split("\n")]
    assert rows[0].split()[0] == "name"
    assert not any("reading" in row for row in rows)
