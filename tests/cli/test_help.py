"""The help: each command with examples that can be typed, in lines that fit the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import SECTIONS, SUMMARIES, Commands
from fsdpplan.cli.options.everyday import EVERYDAY
from fsdpplan.cli.options.examples import EXAMPLES, example_lines
from fsdpplan.cli.options.expand import GroupedCommand, expanded
from fsdpplan.cli.views.render import PROSE_COLUMNS

ALL = [(command, typed) for command, several in EXAMPLES.items() for typed, _ in several]
WIDTHS = (60, 80, 120, 200)

QUICK = (
    "explain plan.json --nccl",
    "diff a.json b.json",
    "check --list",
    "status",
    "profiles dgx-h100",
    "models llama-3.1-70b --json",
)
"""Examples that are run here, the others are read as the command reads them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the plans that examples name."""
    place = tmp_path_factory.mktemp("plans")
    plan = place / "fsdpplan.json"
    command = f"recommend --params 125e6 --gpus 2 --hardware dgx-h100 --no-ledger --save {plan}"
    assert exit_code_of([*command.split(), "--micro-batch", "1"]) == 0
    for name in ("plan", "a", "b"):
        (place / f"{name}.json").write_bytes(plan.read_bytes())
    return place


def words_of(typed: str) -> list[str]:
    """What the program is given, without what the shell does with its output."""
    words = shlex.split(typed)
    return words[: words.index(">")] if ">" in words else words


def reads(name: str) -> Callable[[list[str]], dict[str, Any]]:
    """What a command makes of its words: the values that its function would get."""
    word = name.replace("-", "_")
    function = getattr(import_module(f"fsdpplan.cli.commands.{word}"), word)
    found: dict[str, Any] = {}

    @wraps(function)
    def taken(**values: Any) -> None:
        found.update(values)

    alone = typer.Typer(add_completion=False)
    alone.command(cls=GroupedCommand)(expanded(taken))

    def read(words: list[str]) -> dict[str, Any]:
        with get_command(alone).make_context(name, words) as context:
            context.command.invoke(context)
        return found

    return read


def test_every_command_has_two_examples_and_a_section() -> None:
    assert EXAMPLES.keys() == {"", *Commands()}
    for command, several in EXAMPLES.items():
        assert len(several) >= 2, command
        assert all(typed.split()[0] == command for typed, _ in several if command)
    assert next(iter(SUMMARIES)) in SECTIONS
    assert SECTIONS.keys() <= SUMMARIES.keys()


@pytest.mark.parametrize(("command", "typed"), ALL)
def test_an_example_is_one_that_the_command_takes(command: str, typed: str) -> None:
    name, *words = words_of(typed)
    if command:
        assert reads(name)(words)
    else:
        assert name == "help" or name in Commands()


@pytest.mark.parametrize("typed", QUICK)
def test_an_example_runs(
    typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed in [one for _, one in ALL]
    monkeypatch.chdir(folder)
    assert exit_code_of(words_of(typed)) == 0
    assert capsys.readouterr().out


@pytest.mark.sampled(12)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["", *Commands()])
def test_help_fits_the_terminal(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert exit_code_of([*name.split(), "--help"]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert max(map(len, lines)) <= min(width, PROSE_COLUMNS)
    assert not [line for line in lines if line != line.rstrip()]
    assert "\x1b" not in page
    examples = page.partition("\nExamples:\n")[2]
    pasted = examples.replace("\\\n", "")
    for typed, _ in EXAMPLES[name]:
        assert " ".join(["fsdpplan", *shlex.split(typed)]) in [
            " ".join(shlex.split(line)) for line in pasted.splitlines() if "fsdpplan " in line
        ]


def test_help_of_many_options_shows_those_that_most_people_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def page(*words: str) -> str:
        assert exit_code_of(words) == 0
        return capsys.readouterr().out

    for name in ("recommend", "estimate", "emit-launch", "run"):
        short, whole = page(name, "--help"), page(name, "--help-all")
        assert f"more options: fsdpplan {name} --help-all" in short
        assert "--help-all" not in whole
        flags = [line.split()[0] for line in short.splitlines() if line.startswith("  --")]
        assert flags == [flag for flag in flags if f"  {flag}" in whole]
        assert len(flags) < whole.count("\n  --") / 2
    # what has few shows all
    assert page("status", "--help") == page("status", "--help-all")


def test_what_most_people_need_is_there() -> None:
    known = {
        flag
        for command in Commands().values()
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    assert EVERYDAY - {"--help"} <= known


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_broken_example_is_the_same_command(width: int) -> None:
    for command, several in EXAMPLES.items():
        lines = example_lines(command, width=width).replace("\\\n", "").splitlines()
        typed = [shlex.split(line) for line in lines if line.startswith("  fsdpplan ")]
        assert typed == [["fsdpplan", *shlex.split(one)] for one, _ in several]


def test_help_of_a_command_is_the_same_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["help", "check"]) == exit_code_of(["check", "--help"]) == 0
    one, other = capsys.readouterr().out.split("Usage:")[1:]
    assert one == other
    assert exit_code_of(["help"]) == exit_code_of(["--help"]) == 0
    one, other = capsys.readouterr().out.split("Usage:")[1:]
    assert one == other
    assert exit_code_of(["help", "chek"]) == 2
    assert "did you mean check?" in capsys.readouterr().err
