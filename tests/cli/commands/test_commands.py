"""The commands are imported when asked for, and the first page knows them without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import SUMMARIES, Commands


@pytest.mark.parametrize("name", Commands())
def test_the_first_page_has_the_first_sentence_of_a_command(name: str) -> None:
    command = Commands()[name]
    assert command.name == name
    assert SUMMARIES[name] == command.get_short_help_str(80)


def test_the_first_page_names_all_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["--help"]) == 0
    page = capsys.readouterr().out.partition("\nExamples:\n")[0]
    listed = page.partition("\nPlan:\n")[2].splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ")]
    assert names == list(Commands())


def test_the_readme_has_a_line_for_each() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page, re.M)
    named = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(named) == sorted(Commands())


def test_a_name_that_is_none_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Commands().get("recomend") is None
    assert exit_code_of(["recomend", "--gpus", "8"]) == 2
    said = capsys.readouterr().err
    assert "there is no command recomend (did you mean recommend?)" in said
    assert "type `fsdpplan --help`" in said
