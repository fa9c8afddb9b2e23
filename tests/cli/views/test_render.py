"""Text blocks stay inside the screen, and hold nothing but what a screen should print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.views.render import (
    LEAST_COLUMNS,
    MOST_COLUMNS,
    PROSE_COLUMNS,
    beside,
    blocks,
    columns,
    facts,
    listed,
    table,
    wrapped,
)
from fsdpplan.emit.safe_text import printable

WIDTHS = st.integers(LEAST_COLUMNS, MOST_COLUMNS)
TEXTS = st.text(st.characters(codec="ascii", exclude_characters="\r"), max_size=200)


def widest(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


@given(TEXTS, WIDTHS)
def test_no_line_is_wider_than_the_screen(text: str, width: int) -> None:
    assert widest(wrapped(text, width=width, first="  - ")) <= width
    assert widest(listed("Heading", [text, text], width=width)) <= width
    assert widest(facts([("name", text), ("longer", text)], width=width)) <= width


@given(st.text(max_size=100))
def test_control_characters_are_shown_not_sent(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t" for c in printable(text))
    assert "\x1b" not in wrapped(f"\x1b[2J{text}", width=80)


def test_a_table_that_is_too_wide_names_each_value() -> None:
    rows = [("gpt2", "124 M", "a" * 30), ("gpt2-xl", "1.56 B", "b" * 30)]
    headers, align = ("name", "parameters", "note"), ("left", "right", "left")
    assert "----" in table(rows, headers=headers, align=align, width=80)
    narrow = table(rows, headers=headers, align=align, width=40)
    assert "parameters 124 M" in narrow
    assert table([("gpt2", "124 M", "")], headers=headers, align=align, width=10).endswith("M")
    assert widest(narrow) <= 40


UNITS = ("%", "GiB", "GB/s", "Gb/s", "s", "ms", "us", "M", "B", "T", "days", "TFLOP/s", "GPUs")


@given(
    st.lists(st.tuples(st.integers(0, 99_999), st.sampled_from((*UNITS, "and", "of"))), min_size=1),
    WIDTHS,
)
def test_a_number_stays_with_its_unit(parts: list[tuple[int, str]], width: int) -> None:
    text = "; ".join(f"{number:,} {unit}" for number, unit in parts)
    lines = wrapped(text, width=width).splitlines()
    assert " ".join(lines) == text
    ends = [line for line in lines[:-1] if line[-1].isdigit()]
    assert all(
        after.split(";")[0] in ("and", "of")
        for after, line in zip(lines[1:], lines, strict=False)
        if line in ends
    )


def test_words_are_no_wider_than_can_be_read() -> None:
    text = " ".join(["word"] * 100)
    assert widest(wrapped(text, width=MOST_COLUMNS)) <= PROSE_COLUMNS
    rows = [("a" * 40, "b" * 40, "c" * 40, "d" * 40)]
    headers, align = ("1", "2", "3", "4"), ("left",) * 4
    assert widest(table(rows, headers=headers, align=align, width=MOST_COLUMNS)) > 160


def test_blocks_stand_beside_each_other_where_both_fit() -> None:
    assert beside("a\nb", "c", width=80) == "a   c\nb"
    assert beside("a" * 30, "c" * 30, width=60) == f"{'a' * 30}\n\n{'c' * 30}"


def test_empty_blocks_leave_no_gap() -> None:
    assert blocks("a", "", "b") == "a\n\nb"
    assert listed("Heading", [], width=80) == ""


@pytest.mark.parametrize(
    ("asked", "width"), [("300", 200), ("120", 120), ("60", 60), ("10", 40), ("0", 80)]
)
def test_a_screen_is_as_wide_as_the_terminal_up_to_what_can_be_read(
    monkeypatch: pytest.MonkeyPatch, asked: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert columns() == width
