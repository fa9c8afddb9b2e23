"""A dataclass of flags becomes the options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from fsdpplan.cli.options.expand import Flag, GroupedCommand, expanded
from fsdpplan.cli.options.parse import line, whole
from fsdpplan.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours:
    """Two flags and a switch."""

    HEADING: ClassVar[str] = "Colours"

    num_red: Annotated[int | None, Flag(metavar="N", parse=whole(example=3), help="Reds.")] = None
    names: Annotated[
        tuple[str, ...], Flag(metavar="NAME", parse=line, many=True, help="Names.")
    ] = ()
    dark: Annotated[bool | None, Flag(name="--dark/--light", help="Dark.")] = None


seen: list[tuple[Colours, bool]] = []


def paint(*, colours: Colours, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Paint."""
    seen.append((colours, loud))


def app() -> typer.Typer:
    program = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command(cls=GroupedCommand)(expanded(paint))
    return program


@pytest.mark.parametrize(
    ("words", "colours", "loud"),
    [
        ([], Colours(), False),
        (["--num-red", "3", "--loud"], Colours(num_red=3), True),
        (["--names", "a", "--names", "b"], Colours(names=("a", "b")), False),
        (["--dark"], Colours(dark=True), False),
        (["--light"], Colours(dark=False), False),
    ],
)
def test_flags_fill_the_group(words: list[str], colours: Colours, loud: bool) -> None:
    result = CliRunner().invoke(app(), words)
    assert result.exit_code == 0, result.output
    assert seen.pop() == (colours, loud)


def test_a_bad_value_names_its_flag() -> None:
    result: Any = CliRunner().invoke(app(), ["--num-red", "-3"])
    assert isinstance(result.exception, SpecError)
    assert str(result.exception).startswith("--num-red: '-3'")


def test_help_has_a_heading_a_group() -> None:
    text = CliRunner().invoke(app(), ["--help"]).output
    assert "Colours:\n  --num-red N" in text
    assert text.index("Colours:") < text.index("Options:")
