"""Completion: in real shells, of what can be typed, and put there by one command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from docs.completion_table import completion_json
from fsdpplan.cli import complete
from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import Commands, completion
from fsdpplan.files.catalogue import model_names
from fsdpplan.spec.layout import Schedule
from tests.schemas import obeys

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(complete.TABLE.read_text())
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a folder to be in."""
    place = tmp_path / "a home"
    (place / "here" / "plans").mkdir(parents=True)
    (place / "here" / "my plan.json").write_text("{}")
    (place / "here" / "runs.csv").write_text("")
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(place))
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


def test_the_table_is_what_the_program_has() -> None:
    assert complete.TABLE.read_text() == completion_json(), "type make docs"


def words_for(table: dict[str, Any], *typed: str) -> list[str]:
    return [word for word, _ in complete.offers(typed, table)]


def test_commands_and_options(table: dict[str, Any]) -> None:
    assert words_for(table, "") == [*Commands(), "help", "--help", "--version"]
    assert words_for(table, "rec") == ["recommend"]
    assert words_for(table, "help", "") == [*Commands()]
    assert words_for(table, "nothing", "") == []
    assert words_for(table, "recommend", "--mod") == ["--model"]
    assert "--tp" not in words_for(table, "recommend", "--tp", "2", "--")
    assert "--no-compile" in words_for(table, "recommend", "")
    for name, command in Commands().items():
        offered = set(words_for(table, name, "-"))
        assert offered == {
            one
            for of in command.params
            if of.param_type_name == "option"
            for one in (*of.opts, *of.secondary_opts)
        } | {"--help"}


def test_values_of_options(table: dict[str, Any]) -> None:
    assert words_for(table, "recommend", "--model", "") == model_names()
    assert words_for(table, "recommend", "--schedule", "") == [*get_args(Schedule)]
    assert words_for(table, "recommend", "--schedule=zb") == ["--schedule=zbv"]
    assert words_for(table, "recommend", "--gpus", "") == []
    assert "dgx-h100" in words_for(table, "recommend", "--hardware", "dgx-")
    assert "h100-sxm-80g" not in words_for(table, "recommend", "--hardware", "")
    assert words_for(table, "recommend", "--gpu", "h100-sxm-80") == ["h100-sxm-80g"]
    assert "h100-sxm-80g" in words_for(table, "profiles", "h100")
    assert words_for(table, "compare", "--hardware", "dgx-h100,dgx-b20") == ["dgx-h100,dgx-b200"]
    assert "tp 4 hsdp" in words_for(table, "explain", "--why", "tp 4 h")
    assert words_for(table, "recommend", "--reshard-after-forward", "n") == ["never"]
    assert words_for(table, "emit-launch", "--target", "torch") == ["torchtitan"]


def test_files(home: Path, table: dict[str, Any]) -> None:
    assert words_for(table, "explain", "") == ["my plan.json", "plans/"]
    assert words_for(table, "validate", "") == ["plans/", "runs.csv"]
    assert words_for(table, "emit-launch", "--out", "") == ["plans/"]
    assert words_for(table, "learn", "r") == ["runs.csv"]
    assert words_for(table, "explain", "nowhere/") == []
    (home / "here" / "mine.toml").write_text("")
    assert words_for(table, "recommend", "--hardware", "mine") == ["mine.toml"]
    (home / "here" / "fsdpplan-runs" / "20260101-120000").mkdir(parents=True)
    assert words_for(table, "logs", "--job", "") == ["20260101-120000"]
    assert words_for(table, "explain", "~/here/m") == ["~/here/my plan.json"]


def test_a_shell_is_answered_without_the_commands() -> None:
    """What is imported is what the time goes to: no typer, no room but files."""
    program = (
        "import sys\nfrom fsdpplan.__main__ import main\nsys.argv = sys.argv[1:]\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "fsdpplan", "recommend", "--model", "llama-3.1-70"],
        env={**os.environ, complete.ASKS: "fish", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert ended.stdout == "llama-3.1-70b\t\n"
    loaded = ended.stderr.split()
    assert not {"typer", "torch", "click", "pydantic", "fsdpplan.cli.app"} & {*loaded}


BASH = """
source "$HOME/.bashrc"
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fsdpplan; printf '%s\\n' "${COMPREPLY[@]}"; echo --
}
complete -p fsdpplan
ask fsdpplan reco
ask fsdpplan recommend --model llama-3.1-7
ask fsdpplan recommend --schedule = zb
ask fsdpplan explain my
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
    assert exit_code_of(["completion", "bash", "--install"]) == 0
    answers = run(bash, "--norc", "-c", BASH).split("\n--\n")
    first, *rest = [answer.strip().splitlines() for answer in answers]
    assert first[0] == "complete -F _fsdpplan fsdpplan"
    assert first[1:] == ["recommend"]
    assert rest[0] == ["llama-3.1-70b"]
    assert rest[1] == ["zbv"]
    assert rest[2] == ["my\\ plan.json"]
    assert rest[3] == ["tp 4 hsdp"]


def test_fish(program: Path) -> None:
    fish = shell_of("fish")
    assert exit_code_of(["completion", "fish", "--install"]) == 0

    def ask(line: str) -> list[str]:
        return [one.split("\t")[0] for one in run(fish, "-c", f"complete -C '{line}'").splitlines()]

    assert ask("fsdpplan reco") == ["recommend"]
    assert ask("fsdpplan recommend --model llama-3.1-7") == ["llama-3.1-70b"]
    assert ask("fsdpplan explain m") == ["my plan.json"] or ask("fsdpplan explain m") == [
        "my\\ plan.json"
    ]


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
zpty -w shell "PS1='> '; TERM=dumb; source ~/.zshrc; print re''ady"
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
    assert exit_code_of(["completion", "zsh", "--install"]) == 0
    said = run(zsh, "-f", "-c", ZSH)
    assert said.count("found ") == 3, said


@pytest.mark.parametrize("shell", SHELLS)
def test_it_is_installed_once_and_can_be_taken_back(
    shell: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = home / {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/none"}[shell]
    start.parent.mkdir(exist_ok=True)
    start.write_text("alias ours=theirs\n")
    assert exit_code_of(["completion", shell, "--install"]) == 0
    said = capsys.readouterr().err
    first = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    script = next(path for path in first if path.read_text() == completion.SCRIPTS[shell])  # type: ignore[index]
    assert f"wrote {script}" in said
    assert (shell == "fish") == (start.read_text() == "alias ours=theirs\n")
    with start.open("a") as file:
        file.write("alias later=too\n")
    again = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert exit_code_of(["completion", shell, "--install"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert again == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert exit_code_of(["completion", shell, "--uninstall"]) == 0
    assert start.read_text() == "alias ours=theirs\nalias later=too\n"
    assert not script.exists()
    assert exit_code_of(["completion", shell, "--uninstall", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("completion", document)
    assert "nothing to do" in document["done"][0]


def test_a_start_file_behind_a_link_stays_a_link(home: Path) -> None:
    dotfiles = home / "dotfiles"
    dotfiles.write_text("# mine")
    (home / ".bashrc").symlink_to(dotfiles)
    assert exit_code_of(["completion", "bash", "--install"]) == 0
    assert (home / ".bashrc").is_symlink()
    assert dotfiles.read_text().startswith("# mine\n# >>>")
    assert exit_code_of(["completion", "bash", "--uninstall"]) == 0
    assert dotfiles.read_text() == "# mine\n"


def test_what_cannot_be_done_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["completion", "fsh"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert exit_code_of(["completion", "bash", "--install", "--uninstall"]) == 2
    monkeypatch.setattr(completion, "_parent", lambda: "")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert exit_code_of(["completion"]) == 4
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert exit_code_of(["completion"]) == 0
    assert capsys.readouterr().out == completion.FISH
    assert exit_code_of(["completion", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("completion", document)
    assert document["script"] == completion.FISH
    (home / ".local").write_text("")
    assert exit_code_of(["completion", "bash", "--install"]) == 2
    assert "type fsdpplan completion" in capsys.readouterr().err
