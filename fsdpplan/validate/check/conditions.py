"""Conditions on the numbers of a plan: `mfu >= 0.4 and peak_reserved <= 72GiB`.

    condition    comparison { "and" comparison }
    comparison   name ("<" | "<=" | ">" | ">=" | "==" | "!=") value [unit]

A value has the kind of its quantity: a number with its unit, a word in quotes or without, `true` or
`false`. A number of bytes or seconds without a unit is refused, so that 72 is not taken for 72GiB.
Errors name the column. `and` looks no further than the first comparison that is false.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fsdpplan import errors
from fsdpplan.errors import SpecError
from fsdpplan.units import format_bandwidth, format_gib, format_seconds

Value = bool | int | float | str
Kind = Literal["number", "bytes", "seconds", "rate", "text", "truth"]

NUMBER: Kind = "number"
BYTES: Kind = "bytes"
SECONDS: Kind = "seconds"
RATE: Kind = "rate"

MOST_CHARACTERS = 2000
MOST_DIGITS = 40

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"kb/s": 10**3, "Mb/s": 10**6, "Gb/s": 10**9, "Tb/s": 10**12}
UNITS: dict[str, tuple[Fraction, Kind]] = {
    **{unit: (Fraction(size), BYTES) for unit, size in _SIZES.items()},
    **{f"{unit}/s": (Fraction(size), RATE) for unit, size in _SIZES.items()},
    **{unit: (Fraction(bits, 8), RATE) for unit, bits in _BITS.items()},
    "us": (Fraction(1, 10**6), SECONDS),
    "ms": (Fraction(1, 10**3), SECONDS),
    "s": (Fraction(1), SECONDS),
    "min": (Fraction(60), SECONDS),
    "h": (Fraction(3600), SECONDS),
    "d": (Fraction(86400), SECONDS),
    "%": (Fraction(1, 100), NUMBER),
}
"""Unit -> (its size in bytes, seconds or bytes per second; the kind of quantity it measures)."""

_EXAMPLES: dict[Kind, str] = {
    NUMBER: "mfu >= 0.4",
    BYTES: "peak_reserved <= 72GiB",
    SECONDS: "step <= 1.5s",
    RATE: "a rate >= 25GB/s",
    "text": "sharding == 'fsdp'",
    "truth": "compile == true",
}
_UNIT_EXAMPLES: dict[Kind, str] = {BYTES: "GiB", SECONDS: "s", RATE: "GB/s"}
_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_NAME = re.compile(r"\s*(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_SIGN = re.compile(rf"\s*(?P<sign>{'|'.join(_COMPARE)})")
_VALUE = re.compile(
    rf"""\s*(?P<value>'[^']*'|"[^"]*"|[^\s'"<>=!()&|*]+(?:[ ](?:{_UNIT})(?=\s|$))?)"""
)
_NUMBER = re.compile(
    rf"(?P<digits>-?(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?)"
    rf"[ ]?(?P<unit>{_UNIT})?"
)
_AND = re.compile(r"\s+and(?=\s|$)|\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A value that a condition may name."""

    value: Value | None
    """None: not known of this plan."""
    kind: Kind
    to_know: str = "leave it out"
    """What to do where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison, whether it holds, and the value that its quantity has."""

    text: str
    holds: bool
    values: tuple[tuple[str, Value, Kind], ...]
    """(name, value, kind) of the quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A condition, whether it holds, and why."""

    text: str
    holds: bool
    compared: tuple[Compared, ...]
    """The comparisons up to the first that is false."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    name: str
    sign: str
    typed: str
    """The value as it was typed, without the space before its unit."""
    value: Value
    quantity: Quantity

    def compared(self) -> Compared:
        """Whether it holds."""
        known = self.quantity.value
        assert known is not None, "that was asked before"
        return Compared(
            text=f"{self.name} {self.sign} {self.typed}",
            holds=_COMPARE[self.sign](known, self.value),
            values=((self.name, known, self.quantity.kind),),
        )


def check(text: str, quantities: Mapping[str, Quantity]) -> Checked:
    """Whether the condition `text` holds. Raises SpecError, with the column, where it is no
    condition, names no quantity of `quantities`, or compares one with a value of another kind."""
    if len(text) > MOST_CHARACTERS:
        raise SpecError(
            f"a condition of {len(text):,} characters is too long: split it in several of "
            f"{MOST_CHARACTERS:,} at most"
        )
    try:
        comparisons = list(_comparisons(text, quantities))
    except _Wrong as wrong:
        raise wrong.said(text) from None
    compared = list[Compared]()
    for one in comparisons:
        compared.append(one.compared())
        if not compared[-1].holds:
            break
    return Checked(text=text, holds=compared[-1].holds, compared=tuple(compared))


class _Wrong(Exception):
    """What is wrong, and at which column."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.column = place + 1

    def said(self, text: str) -> SpecError:
        """As the user reads it: the text around the place, which is marked."""
        start, end = max(0, self.column - 21), self.column + 29
        before, after = text[start : self.column - 1], text[self.column - 1 : end]
        shown = f"{'...' if start else ''}{before}>>{after}{'...' if end < len(text) else ''}"
        shown = "".join(one if one.isprintable() else "?" for one in shown)
        return SpecError(f"column {self.column} of the condition ({shown}): {self}")


def _comparisons(text: str, quantities: Mapping[str, Quantity]) -> Iterator[_Comparison]:
    """The comparisons of a condition, in their order."""
    place = 0
    while True:
        name = _NAME.match(text, place)
        if name is None or name["name"] in ("not", "and", "or"):
            raise _no_name(text, _skip(text, place))
        quantity = _named(name["name"], name.start("name"), quantities)
        sign = _SIGN.match(text, name.end())
        if sign is None:
            raise _no_sign(text, _skip(text, name.end()), quantity.kind)
        value = _VALUE.match(text, sign.end())
        if value is None:
            raise _Wrong(
                _skip(text, sign.end()), f"a value stands here, such as {_EXAMPLES[quantity.kind]}"
            )
        yield _Comparison(
            name["name"],
            sign["sign"],
            *_value(value["value"], value.start("value"), quantity.kind, sign),
            quantity,
        )
        joined = _AND.match(text, value.end())
        if joined is None:
            raise _not_joined(text, _skip(text, value.end()))
        if not joined.group().strip():
            return
        place = joined.end()


def _skip(text: str, place: int) -> int:
    """Where the next word begins."""
    return place + len(text[place:]) - len(text[place:].lstrip())


def _no_name(text: str, place: int) -> _Wrong:
    if text.startswith("not", place):
        return _Wrong(place, "there is no not: type such as compile == false, or < in place of >=")
    return _Wrong(
        place,
        "the name of a quantity stands here, compared with one value, such as mfu >= 0.4",
    )


def _no_sign(text: str, place: int, kind: Kind) -> _Wrong:
    if text.startswith("=", place):
        return _Wrong(place, "type == in place of =")
    if text[place : place + 1] in tuple("+-*/"):
        return _Wrong(
            place, f"conditions do not calculate; compare one quantity: {_EXAMPLES[kind]}"
        )
    return _Wrong(
        place, f"one of {' '.join(_COMPARE)} and a value stand here, such as {_EXAMPLES[kind]}"
    )


def _not_joined(text: str, place: int) -> _Wrong:
    left = text[place:]
    word = re.match(r"\w*", left)
    if (word and word.group().lower() == "and") or left.startswith("&"):
        return _Wrong(place, "type and, between spaces")
    if left[:1] in tuple("<>=!"):
        return _Wrong(place, "a comparison has one sign; type such as mfu >= 0.3 and mfu < 0.6")
    if left[:1] in tuple("+*/"):
        return _Wrong(place, "conditions do not calculate; type the value")
    return _Wrong(
        place, f"comparisons are joined by and, and units are {', '.join(UNITS)}; leave this out"
    )


def _named(name: str, place: int, quantities: Mapping[str, Quantity]) -> Quantity:
    found = quantities.get(name)
    if found is not None and found.value is None:
        raise _Wrong(place, f"{name} is not known of this plan; {found.to_know}")
    if found is not None:
        return found
    near = nearest(name, quantities)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise _Wrong(
        place, f"no quantity of a plan is called {name[:60]!r}; {hint}fsdpplan check --list has all"
    )


def nearest(name: str, quantities: Mapping[str, Quantity]) -> list[str]:
    """Names of quantities that `name` may mean, best first."""
    plain = name.lower()[:100]
    lower = {known.lower(): known for known in sorted(quantities, key=len, reverse=True)}
    close = errors.nearest(plain, lower) or difflib.get_close_matches(plain, lower, n=3)
    within = sorted((one for one in lower if plain in one), key=len)[:3]
    return [lower[one] for one in dict.fromkeys((*close, *within))][:3]


def _value(typed: str, place: int, kind: Kind, sign: re.Match[str]) -> tuple[str, Value]:
    """A value as it is shown, and what it is. Raises _Wrong where it is not of that kind."""
    if kind in ("text", "truth") and sign["sign"] not in ("==", "!="):
        raise _Wrong(
            sign.start("sign"), f"use == or != beside {_a(kind)}, such as {_EXAMPLES[kind]}"
        )
    if kind == "text":
        return typed, typed[1:-1] if typed[0] in "'\"" else typed
    if kind == "truth":
        if typed not in ("true", "false"):
            raise _Wrong(place, "this is compared with true or false")
        return typed, typed == "true"
    number = _NUMBER.fullmatch(typed)
    if number is None:
        units = ", ".join(UNITS)
        raise _Wrong(
            place,
            f"this is compared with {_a(kind)}, such as {_EXAMPLES[kind]}; units are {units}",
        )
    if len(number["digits"]) > MOST_DIGITS:
        raise _Wrong(place, f"{typed[:20]}... has too many digits; type fewer")
    scale, unit_kind = UNITS[number["unit"]] if number["unit"] else (Fraction(1), NUMBER)
    if unit_kind != kind and number["unit"] is None:
        needed = _UNIT_EXAMPLES[kind]
        raise _Wrong(
            place, f"{typed} has no unit beside {_a(kind)}: type {typed}{needed} or another unit"
        )
    if unit_kind != kind:
        raise _Wrong(place, f"{typed} is {_a(unit_kind)}, and this is {_a(kind)}; use its unit")
    exact = Fraction(number["digits"]) * scale
    whole = exact.denominator == 1
    return typed.replace(" ", ""), int(exact) if whole else float(exact)


def _a(kind: Kind) -> str:
    names: dict[Kind, str] = {
        "text": "a text",
        "truth": "true or false",
        NUMBER: "a plain number",
        BYTES: "a number of bytes",
        SECONDS: "a time",
        RATE: "a rate in bytes per second",
    }
    return names[kind]


def value_words(value: Value, kind: Kind) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if kind == BYTES and abs(value) < math.inf:
        return format_gib(value)
    if kind == SECONDS and abs(value) < math.inf:
        return format_seconds(value)
    if kind == RATE and abs(value) < math.inf:
        return format_bandwidth(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
