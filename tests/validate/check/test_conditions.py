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
    Kind,
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
def atoms(draw: Any, kind: Kind) -> Both:
    names = [name for name, one in NAMES.items() if one.kind == kind and one.value is not None]
    if draw(st.booleans()):
        name = draw(st.sampled_from(names))
        return name, f"values[{name!r}]"
    quarters = draw(st.integers(0, 400))
    whole = not quarters % 4 and draw(st.booleans())
    number = str(quarters // 4) if whole else repr(quarters / 4)
    unit, scale = draw(st.sampled_from(sorted(PYTHON_UNITS[kind].items())))
    return (
        f"{number}{draw(st.sampled_from(['', ' '])) if unit else ''}{unit}",
        f"({number}*{scale})",
    )


def joined(signs: list[str], parts: list[Both]) -> Both:
    """The parts with the signs between them, in both languages with the same precedence."""
    (ours, python), *rest = parts
    for sign, (one, other) in zip(signs, rest, strict=True):
        ours, python = f"{ours} {sign} {one}", f"{python} {sign} {other}"
    return ours, python


@st.composite
def factors(draw: Any, kind: Kind, depth: int) -> Both:
    form = draw(st.sampled_from(("atom", "minus", "parens"))) if depth else "atom"
    if form == "atom":
        return draw(atoms(kind))  # type: ignore[no-any-return]
    if form == "minus":
        ours, python = draw(factors(kind, depth - 1))
        return f"-{ours}", f"-{python}"
    ours, python = draw(sums(kind, depth - 1))
    return f"({ours})", f"({python})"


@st.composite
def products(draw: Any, kind: Kind, depth: int) -> Both:
    others = [draw(factors(NUMBER, depth)) for _ in range(draw(st.integers(0, 2)))]
    signs = [draw(st.sampled_from("*/")) for _ in others]
    return joined(signs, [draw(factors(kind, depth)), *others])


@st.composite
def sums(draw: Any, kind: Kind, depth: int) -> Both:
    parts = [draw(products(kind, depth)) for _ in range(draw(st.integers(1, 3)))]
    return joined([draw(st.sampled_from("+-")) for _ in parts[1:]], parts)


@st.composite
def comparisons(draw: Any, depth: int) -> Both:
    form = draw(st.sampled_from(("compare", "compare", "name", "text", "parens")))
    if form == "name":
        name = draw(st.sampled_from(["runnable", "compile"]))
        return name, f"values[{name!r}]"
    if form == "text":
        word, sign = draw(st.sampled_from(["1f1b", "gpipe"])), draw(st.sampled_from(["==", "!="]))
        return f"schedule {sign} '{word}'", f"values['schedule'] {sign} {word!r}"
    if form == "parens" and depth:
        ours, python = draw(truths(depth - 1))
        return f"({ours})", f"({python})"
    kind = draw(st.sampled_from([NUMBER, BYTES, SECONDS, RATE]))
    sides = [draw(sums(kind, depth)) for _ in range(draw(st.integers(2, 3)))]
    signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    return joined([draw(signs) for _ in sides[1:]], sides)


@st.composite
def truths(draw: Any, depth: int) -> Both:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        ours, python = draw(comparisons(depth))
        nots = "not " * draw(st.integers(0, 2))
        parts.append((nots + ours, nots + python))
    return joined([draw(st.sampled_from(["and", "or"])) for _ in parts[1:]], parts)


@settings(max_examples=60, deadline=None)
@given(truths(2))
def test_a_condition_is_what_python_says_of_it(both: Both) -> None:
    ours, python = both
    values = {name: one.value for name, one in NAMES.items()}
    try:
        expected = eval(python, {"__builtins__": {}}, {"values": values})
    except ZeroDivisionError:
        with pytest.raises(SpecError, match="divides by 0"):
            check(ours, NAMES)
        return
    assert check(ours, NAMES).holds is bool(expected), python


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
        ("mfu", 1, "no condition"),
        ("mfu = 0.3", 5, "type =="),
        ("mfu >= 0.3 && runnable", 12, "type and"),
        ("mfu > step", 5, "no meaning"),
        ("mfu > (gpus", 12, "column 7 is not closed"),
        ("mfu >", 6, "nothing where"),
        ("peak < 72G", 10, "units are"),
        ("schedule < '1f1b'", 10, "use == or !="),
        ("runnable == compile", 10, "use and, or, not"),
        ("gpus / none_left > 1", 6, "divides by 0"),
        ("tokens > 1", 1, "not known of this plan"),
        ("not mfu", 1, "no condition but a plain number"),
        ("1e500 > 1", 1, "range"),
        ("peak * step > 1", 13, "bytes^1 seconds^1"),
        ("(" * 60 + "1" + ")" * 60 + " > 0", 41, "levels deep"),
    ],
)
def test_what_is_wrong_is_said_with_its_column(text: str, column: int, said: str) -> None:
    with pytest.raises(SpecError, match=f"column {column} ") as caught:
        check(text, NAMES)
    assert said in str(caught.value)


def test_long_ones_are_refused_or_read_but_never_overflow() -> None:
    with pytest.raises(SpecError, match="too long"):
        check("1+" * 3000 + "1 > 0", NAMES)
    assert check("+".join(["1"] * 900) + " == 900", NAMES).holds


def test_it_says_what_decided() -> None:
    found = check("mfu >= 40% and peak <= 70 GiB or schedule == 'gpipe'", NAMES)
    assert not found.holds
    assert [(one.text, one.holds) for one in found.compared] == [
        ("mfu >= 40%", True),
        ("peak <= 70GiB", False),
        ("schedule == 'gpipe'", False),
    ]
    assert found.compared[1].values == (("peak", 70 * 2**30 + 1, BYTES),)
