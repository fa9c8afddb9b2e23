"""Charts of text: as wide as they may be, in proportion, and plain where they have to be."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.views.charts import Axis, Band, Bar, Mark, bands, bars, changes, marks

WIDTHS = (40, 60, 80, 120, 200)
NAMES = ("matmuls", "exposed dp_replicate", "reduce_scatter dp_shard*cp (infiniband)")

X = Axis(words="a step", label=lambda value: f"{value:.2f} s")
Y = Axis(words="GiB", label=lambda value: f"{value:,.1f}")


class Screen(io.StringIO):
    """A terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class OldScreen(Screen):
    """One that knows no block characters."""

    encoding = "latin-1"


numbers = st.floats(min_value=0, max_value=1e15, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from(NAMES), numbers, numbers), min_size=1, max_size=8))
def test_no_line_is_wider_than_it_may_be_and_longer_bars_are_not_shorter(
    found: list[tuple[str, float, float]],
) -> None:
    rows = [
        Bar(name=name, value=value, rest=rest, words=f"{value:.3g} s")
        for name, value, rest in found
    ]
    for width in WIDTHS:
        text = bars(rows, width=width)
        assert all(len(line) <= width for line in text.splitlines())
        assert text.isascii()
        lengths = [line.count("#") for line in text.splitlines() if "#" in line]
        values = [row.value for row in rows if row.value]
        assert len(lengths) == len(values)
        in_order = [length for _, length in sorted(zip(values, lengths, strict=True))]
        assert in_order == sorted(in_order)


def test_bars_are_in_proportion_to_the_whole() -> None:
    rows = [Bar(name="a", value=1, words="1"), Bar(name="b", value=2, rest=1, words="2")]
    a, b = bars(rows, width=50, whole=4).splitlines()
    room = 50 - 1 - 1 - 6
    assert (a.count("#"), b.count("#"), b.count("-")) == (room // 4, room // 2, (room + 3) // 4)


def test_a_terminal_that_shows_blocks_is_drawn_in_eighths(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Bar(name="a", value=10, words=""), Bar(name="b", value=1, words="")]
    monkeypatch.setattr(sys, "stdout", Screen())
    assert "█" in bars(rows, width=60)
    assert "█" in changes(rows, width=60)
    monkeypatch.setattr(sys, "stdout", OldScreen())
    assert bars(rows, width=60).isascii()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert bars(rows, width=60).isascii()


def test_nothing_is_drawn_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    row = Bar(name="a", value=1, words="\x1b[31mred")
    assert "\x1b" not in bars([Bar(name="\x1b[31mred", value=1, words="")], width=60)
    assert "\x1b" not in changes([row], width=60)


def test_what_falls_is_left_of_what_grows() -> None:
    rows = [Bar(name="up", value=2, words="+2"), Bar(name="down", value=-1, words="-1")]
    up, down = changes(rows, width=60).splitlines()
    middle = up.index("|")
    assert down.index("|") == middle
    assert "#" not in up[:middle]
    assert "#" not in down[middle:]
    assert up.count("#") == pytest.approx(2 * down.count("#"), abs=1)


def test_a_band_is_in_its_order_and_on_one_axis_with_the_others() -> None:
    rows = [
        Band(name="A", lower=1, expected=2, upper=3, words="2", measured=2.5),
        Band(name="B", lower=2, expected=3, upper=4, words="3"),
    ]
    for width in WIDTHS:
        a, b = bands(rows, width=width).splitlines()[-2:]
        assert a.index("[") < a.index("o") < a.index("x") < a.index("]")
        assert b.index("[") == a.index("o")
        assert len(b) <= width


points = st.lists(
    st.tuples(st.floats(min_value=1e-6, max_value=1e6), st.floats(min_value=1e-6, max_value=1e6)),
    min_size=1,
    max_size=12,
)


@given(points, st.booleans())
def test_each_mark_is_inside_and_further_up_where_it_is_more(
    found: list[tuple[float, float]], is_log: bool
) -> None:
    x = Axis(words="x", label=str, is_log=is_log)
    for width in WIDTHS:
        text = marks(
            [Mark(one, other, "o") for one, other in found], x=X, y=Y, width=width
        ).splitlines()
        assert all(len(line) <= width for line in text)
        assert sum(line.count("o") + line.count("*") for line in text[1:-2]) >= 1
    lowest, highest = min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1])
    two = [Mark(*lowest, "l"), Mark(*highest, "h")]
    rows = marks(two, x=x, y=Y, width=80).splitlines()[1:-2]
    (low,) = [index for index, line in enumerate(rows) if "l" in line.partition("|")[2]]
    (high,) = [index for index, line in enumerate(rows) if "h" in line.partition("|")[2]]
    assert high <= low


def test_marks_that_meet_stand_side_by_side() -> None:
    text = marks([Mark(1, 1, "A"), Mark(1, 1, "B"), Mark(2, 2, "C")], x=X, y=Y, width=60)
    assert "AB" in text
    assert "C" in text


@pytest.mark.parametrize("values", [(0.418, 0.463), (7, 7), (1, 1000)])
def test_an_axis_says_no_label_twice(values: tuple[float, float]) -> None:
    y = Axis(words="GiB", label=lambda value: f"{value:.1f}")
    text = marks([Mark(1, one, "o") for one in values], x=X, y=y, width=60)
    labels = [line.partition("|")[0].strip() for line in text.splitlines() if "|" in line]
    said = [label for label in labels if label]
    assert said
    assert len(said) == len(set(said))


def test_nothing_is_drawn_of_nothing() -> None:
    assert bars([], width=60) == changes([], width=60) == bands([], width=60) == ""
    assert marks([], x=X, y=Y, width=60) == ""
