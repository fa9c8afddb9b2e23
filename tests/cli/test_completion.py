"""Completion: in real shells, of what can be typed; Typer answers, with values of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from fsdpplan.cli.app import COMPLETES, app
from fsdpplan.cli.commands import SUMMARIES, Commands
from fsdpplan.cli.options import offered
from fsdpplan.files.catalogue import model_names
from fsdpplan.spec.layout import Schedule

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a folder to be in."""
    place = tmp_path / "home"
    (place / "here").mkdir(parents=True)
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.chdir(place / "here")
    return place


@pytest.fixture
def program(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`fsdpplan` of this checkout, as a shell finds it."""
    file = home / "bin" / "fsdpplan"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m fsdpplan "$@"\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    return file


def words_for(*typed: str) -> list[str]:
    """What is offered in the place of the last word."""
    *before, last = typed
    with get_command(app).make_context("fsdpplan", before, resilient_parsing=True) as context:
        group: Any = context.command
        if not before:
            return [item.value for item in group.shell_complete(context, last)]
    command = Commands()[before[0]]
    with command.make_context(before[0], before[1:], resilient_parsing=True) as context:
        asked = next((one for one in command.get_params(context) if before[-1] in one.opts), None)
        one = asked or (command if last.startswith("-") else command.params[0])
        return [item.value for item in one.shell_complete(context, last)]


def test_commands_and_options() -> None:
    assert words_for("") == [*SUMMARIES]
    assert words_for("rec") == ["recommend"]
    assert "--install-completion" in words_for("--")
    assert words_for("recommend", "--mod") == ["--model"]
    assert "--tp" not in words_for("recommend", "--tp", "2", "--")
    assert "--no-compile" in words_for("recommend", "--no")


def test_values_of_options() -> None:
    assert words_for("recommend", "--model", "") == model_names()
    assert words_for("recommend", "--schedule", "") == [*get_args(Schedule)]
    assert words_for("recommend", "--gpus", "") == []
    assert "dgx-h100" in words_for("recommend", "--hardware", "dgx-")
    assert "h100-sxm-80g" not in words_for("recommend", "--hardware", "")
    assert words_for("recommend", "--gpu", "h100-sxm-80") == ["h100-sxm-80g"]
    assert "h100-sxm-80g" in words_for("profiles", "h100")
    assert words_for("compare", "--hardware", "dgx-h100,dgx-b20") == ["dgx-h100,dgx-b200"]
    assert "tp 4 hsdp" in words_for("explain", "--why", "tp 4 h")
    assert words_for("recommend", "--reshard-after-forward", "n") == ["never"]
    assert words_for("emit-launch", "--target", "torch") == ["torchtitan"]
    assert "lambda" in words_for("recommend", "--provider", "la")
    assert words_for("profiles", "--kind", "no") == ["node"]


def test_runs_are_those_of_this_folder(home: Path) -> None:
    assert offered.runs("") == []
    (home / "here" / "fsdpplan-runs" / "20260101-120000").mkdir(parents=True)
    assert words_for("logs", "--job", "") == ["20260101-120000"]


def test_a_shell_is_answered_without_torch_and_for_names_without_the_commands() -> None:
    program = (
        "import sys\nfrom fsdpplan.__main__ import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )

    def ask(words: str) -> tuple[str, set[str]]:
        of_fish = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **of_fish, COMPLETES: "complete_fish", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        return ended.stdout, {*ended.stderr.split()}

    said, loaded = ask("fsdpplan recommend --model llama-3.1-70")
    assert said == "llama-3.1-70b\n"
    assert not {"torch", "pydantic"} & loaded
    said, loaded = ask("fsdpplan reco")
    assert said.startswith("recommend\t")
    assert "fsdpplan.cli.commands.recommend" not in loaded


BASH = """
source "$HOME/.bashrc"
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fsdpplan_completion "$1"
    printf '%s\\n' "${COMPREPLY[@]}"; echo --
}
complete -p fsdpplan
ask fsdpplan reco
ask fsdpplan recommend --model llama-3.1-7
ask fsdpplan explain --why '"tp 4 hs'
"""


def shell_of(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


def run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_bash(program: Path) -> None:
    bash = shell_of("bash")
    assert "installed" in run(str(program), "--install-completion", "bash")
    answers = run(bash, "--norc", "-c", BASH).split("\n--\n")
    first, *rest = [answer.strip().splitlines() for answer in answers]
    assert first[0] == "complete -o default -F _fsdpplan_completion fsdpplan"
    assert first[1:] == ["recommend"]
    assert rest[0] == ["llama-3.1-70b"]
    assert rest[1] == ["tp 4 hsdp"]


def test_fish(program: Path) -> None:
    fish = shell_of("fish")
    assert "installed" in run(str(program), "--install-completion", "fish")

    def ask(line: str) -> list[str]:
        return [one.split("\t")[0] for one in run(fish, "-c", f"complete -C '{line}'").splitlines()]

    assert ask("fsdpplan reco") == ["recommend"]
    assert ask("fsdpplan recommend --model llama-3.1-7") == ["llama-3.1-70b"]


# Typer's script, which zsh loads with the first Tab, answers from the second on: it is loaded here.
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
ask() {
    zpty -w -n shell "$1"$'\t'
    local text='' part
    for turn in {1..1200}; do
        while zpty -rt shell part 2>/dev/null; do text+="${part//$'\a'/}"; done
        [[ "$text" == *"$2"* ]] && break
        sleep 0.05
    done
    [[ "$text" == *"$2"* ]] && print "found $2" || print -r -- "lost $2 in ${(qqqq)text}"
    zpty -w -n shell $'\x15'
}
zpty -w shell "PS1='> '; TERM=dumb; source ~/.zshrc; _fsdpplan; print re''ady"
for turn in {1..1200}; do
    zpty -rt shell part 2>/dev/null && [[ "$part" == *ready* ]] && break
    sleep 0.05
done
ask 'fsdpplan recommend --model llama-3.1-7' 'llama-3.1-70b'
ask 'fsdpplan recommend --sched' '--schedule'
ask 'fsdpplan reco' 'fsdpplan recommend'
zpty -d shell
"""


def test_zsh(program: Path) -> None:
    zsh = shell_of("zsh")
    assert "installed" in run(str(program), "--install-completion", "zsh")
    said = run(zsh, "-f", "-c", ZSH)
    assert said.count("found ") == 3, said


@pytest.mark.parametrize("metavar", ["always|never|N", "NAME", None, "aws|azure|lambda|..."])
def test_words_of_a_metavar_are_those_that_can_be_typed(metavar: str | None) -> None:
    words = offered.literals(metavar)
    assert all(word.islower() and word in (metavar or "") for word in words)
    assert len(words) == {"always|never|N": 2, "aws|azure|lambda|...": 3}.get(metavar or "", 0)
