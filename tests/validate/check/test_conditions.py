"""Conditions mean what Python's own evaluation of them says, and never end in a traceback."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.validate.check.conditions import (
    BYTES,
    NUMBER,
    RATE,
    SECONDS,
    UNITS,
    Quantity,
    check,
)

NAMES: dict[str, Quantity] = {
    "mfu": Quantity(value=0.41, kind=NUMBER),
    "gpus": Quantity(value=64, kind=NUMBER),
    "none_left": Quantity(value=0, kind=NUMBER),
    "peak": Quantity(value=70 * 2**30 + 1, kind=BYTES),
    "step": Quantity(value=1.75, kind=SECONDS),
    "step.upper": Quantity(value=2.5, kind=SECONDS),
    "link": Quantity(value=50e9, kind=RATE),
    "schedule": Quantity(value="1f1b", kind="text"),
    "runnable": Quantity(value=True, kind="truth"),
    "compile": Quantity(value=False, kind="truth"),
    "tokens": Quantity(value=None, kind=NUMBER),
}

PYTHON_UNITS = {
    BYTES: {"B": "1", "kB": "10**3", "GB": "10**9", "MiB": "2**20", "GiB": "2**30"},
    SECONDS: {"s": "1", "min": "60", "h": "3600", "d": "86400"},
    RATE: {"GB/s": "10**9", "Gb/s": "125_000_000"},
    NUMBER: {"": "1"},
}

Both = tuple[str, str]
"""A part as conditions have it, and as Python does."""


@st.composite
def comparisons(draw: Any) -> Both:
    name = draw(st.sampled_from([name for name, one in NAMES.items() if one.value is not None]))
    kind = NAMES[name].kind
    equal = st.sampled_from(["==", "!="])
    if kind == "truth":
        sign, word = draw(equal), draw(st.sampled_from(["true", "false"]))
        return f"{name} {sign} {word}", f"values[{name!r}] {sign} {word.title()}"
    if kind == "text":
        sign, word = draw(equal), draw(st.sampled_from(["1f1b", "gpipe"]))
        typed = draw(st.sampled_from([word, repr(word)]))
        return f"{name} {sign} {typed}", f"values[{name!r}] {sign} {word!r}"
    quarters = draw(st.integers(-4, 400))
    whole = not quarters % 4 and draw(st.booleans())
    number = str(quarters // 4) if whole else repr(quarters / 4)
    unit, scale = draw(st.sampled_from(sorted(PYTHON_UNITS[kind].items())))
    space = draw(st.sampled_from(["", " "])) if unit else ""
    sign = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
    return f"{name}{sign} {number}{space}{unit}", f"values[{name!r}] {sign} ({number}*{scale})"


@settings(max_examples=60, deadline=None)
@given(st.lists(comparisons(), min_size=1, max_size=3))
def test_a_condition_is_what_python_says_of_it(parts: list[Both]) -> None:
    ours, python = (" and ".join(side) for side in zip(*parts, strict=True))
    values = {name: one.value for name, one in NAMES.items()}
    expected = eval(python, {"__builtins__": {}}, {"values": values})
    assert check(ours, NAMES).holds is expected, python


PIECES = [*NAMES, *UNITS, "and", "or", "not", "12", "0.5", ".", "1e9", "1e999", "'", '"x"', "("]
PIECES += [
    ")",
    "<",
    "<=",
    "==",
    "=",
    "!",
    "-",
    "*",
    "/",
    "%",
    "\\",
    "\u20ac",
    "\0",
    "\n",
    "eval",
    "__",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join) | st.text(max_size=30))
def test_no_text_ends_in_a_traceback(text: str) -> None:
    try:
        check(text, NAMES)
    except SpecError as error:
        said = str(error)
    else:
        return
    assert "column" in said
    assert said.isprintable()


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("peek >= 1GiB", 1, "nearest: peak;"),
        ("mfu >= 0.3 and peak <= 72", 24, "type 72GiB"),
        ("mfu >= 0.3 AND gpus == 64", 12, "type and"),
        ("mfu >= 0.3 or gpus == 64", 12, "joined by and"),
        ("mfu >= 0.3 and", 15, "name of a quantity"),
        ("mfu", 4, "such as mfu >= 0.4"),
        ("runnable", 9, "such as compile == true"),
        ("not runnable", 1, "compile == false"),
        ("mfu = 0.3", 5, "type =="),
        ("mfu >= 0.3 && runnable", 12, "type and"),
        ("mfu > step", 7, "a plain number"),
        ("step > 3GiB", 8, "this is a time"),
        ("0.3 <= mfu", 1, "name of a quantity"),
        ("mfu > 0.3 <= 1", 11, "one sign"),
        ("mfu / step > 1", 5, "do not calculate"),
        ("mfu > 1 + 1", 9, "do not calculate"),
        ("(mfu > 1)", 1, "name of a quantity"),
        ("mfu >", 6, "a value stands here"),
        ("peak < 72G", 8, "units are"),
        ("peak < 72 GiB oh", 15, "joined by and"),
        ("schedule < '1f1b'", 10, "use == or !="),
        ("runnable == compile", 13, "true or false"),
        ("tokens > 1", 1, "not known of this plan"),
        ("mfu > " + "1" * 50, 7, "too many digits"),
        ("mfu > 1e5000", 7, "a plain number"),
    ],
)
def test_what_is_wrong_is_said_with_its_column(text: str, column: int, said: str) -> None:
    with pytest.raises(SpecError, match=f"column {column} ") as caught:
        check(text, NAMES)
    assert said in str(caught.value)


def test_long_ones_are_refused_and_large_numbers_are_numbers() -> None:
    with pytest.raises(SpecError, match="too long"):
        check("mfu > 0 and " * 300 + "mfu > 0", NAMES)
    assert check("mfu < 1e999", NAMES).holds
    assert check("mfu > 1e-999", NAMES).holds


def test_it_says_what_decided() -> None:
    found = check("mfu >= 40% and peak <= 70 GiB and schedule == 'gpipe'", NAMES)
    assert not found.holds
    assert [(one.text, one.holds) for one in found.compared] == [
        ("mfu >= 40%", True),
        ("peak <= 70GiB", False),
    ]
    assert found.compared[1].values == (("peak", 70 * 2**30 + 1, BYTES),)
