"""Conditions: a small language over the numbers of a plan, with units and without `eval`.

    condition    all { "or" all }          all    no { "and" no }         no    [ "not" ] comparison
    comparison   sum { ("<" | "<=" | ">" | ">=" | "==" | "!=") sum }
    sum          product { ("+" | "-") product }      product   factor { ("*" | "/") factor }
    factor       [ "-" ] ( number [ unit ] | name | 'text' | "(" condition ")" )

Precedence, chained comparisons (`0.3 <= mfu < 0.6`) and that `and` and `or` look no further than
they must are Python's. Every value has a unit, in powers of bytes and seconds: what is compared or
added must have the same, so that 72 is not taken for 72GiB. What is wrong is said with its column.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

from fsdpplan import errors
from fsdpplan.errors import SpecError
from fsdpplan.units import format_bandwidth, format_gib, format_seconds

Value = bool | int | float | str
Kind = tuple[int, int] | Literal["text", "truth"]
"""Powers of bytes and of seconds; or no number at all."""

NUMBER: Kind = (0, 0)
BYTES: Kind = (1, 0)
SECONDS: Kind = (0, 1)
RATE: Kind = (1, -1)

MOST_CHARACTERS = 2000
MOST_NESTED = 40
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
"""Unit -> (of it in one, what it measures)."""

_EXAMPLES: dict[Kind, str] = {BYTES: "GiB", SECONDS: "s", RATE: "GB/s"}

_UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<number>(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
        (?:[ ]?(?P<unit>{_UNIT})(?![A-Za-z0-9_.]))?
  | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
  | (?P<text>'[^']*'|"[^"]*")
  | (?P<sign><=|>=|==|!=|[-<>+*/()])
  | (?P<other>\S)
  | (?P<end>$)
    )""",
    re.VERBOSE,
)
_OTHERS = {"=": "==", "&": "and", "|": "or", "!": "not"}
"""What people type -> what it is called here."""
WORDS = ("and", "or", "not")

_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


Level = Literal["or", "and", "comparison", "sum", "product"]

_SIGNS: dict[Level, tuple[str, ...]] = {
    "or": ("or",),
    "and": ("and",),
    "comparison": tuple(_COMPARE),
    "sum": ("+", "-"),
    "product": ("*", "/"),
}
"""What joins the operands of each precedence, loosest first."""

_BELOW: dict[Level, Level] = {"or": "and", "comparison": "sum", "sum": "product"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A value that a condition may name."""

    value: Value | None
    """None: not known of this plan."""
    kind: Kind
    to_know: str = "leave it out"
    """What to do where it is not known."""


@dataclass(frozen=True, slots=True)
class _Token:
    at: int
    """Column, from 1."""
    kind: str
    text: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class _Constant:
    at: int
    value: Value
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class _Name:
    at: int
    name: str


@dataclass(frozen=True, slots=True)
class _Prefixed:
    """`not` or a minus."""

    at: int
    sign: str
    inner: _Node


@dataclass(frozen=True, slots=True)
class _Chain:
    """Operands of one precedence, with the column and the sign of what stands between them."""

    at: int
    level: Level
    first: _Node
    rest: tuple[tuple[int, str, _Node], ...]


_Node = _Constant | _Name | _Prefixed | _Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison that was looked at, and the values that its names have."""

    text: str
    holds: bool
    values: tuple[tuple[str, Value, Kind], ...]
    """(name, value, unit) of each name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A condition, whether it holds, and why."""

    text: str
    holds: bool
    compared: tuple[Compared, ...]
    """The comparisons that decide it: those that were looked at."""


def check(text: str, quantities: Mapping[str, Quantity]) -> Checked:
    """Whether the condition `text` holds. Raises SpecError, with the column, for what is none, for
    names that are not among `quantities`, and for units that do not go together."""
    node = _Parser(text).whole()
    try:
        kind = _kind(node, quantities)
        if kind != "truth":
            raise _wrong(node.at, f"this says no condition; compare it{_such_as(kind)}")
        looked: list[Compared] = []
        holds = bool(_value(node, quantities, looked, text))
    except _Wrong as wrong:
        raise wrong.said(text) from None
    return Checked(text=text, holds=holds, compared=tuple(looked))


def _such_as(kind: Kind) -> str:
    return "" if kind == "text" else f", such as by >= 1{_EXAMPLES.get(kind, '')}"


class _Wrong(Exception):
    """What is wrong, and at which column."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at

    def said(self, text: str) -> SpecError:
        """As the user reads it: the text around the place, which is marked."""
        start, end = max(0, self.at - 21), self.at + 29
        before, after = text[start : self.at - 1], text[self.at - 1 : end]
        shown = f"{'...' if start else ''}{before}>>{after}{'...' if end < len(text) else ''}"
        shown = "".join(one if one.isprintable() else "?" for one in shown)
        return SpecError(f"column {self.at} of the condition ({shown}): {self}")


def _wrong(at: int, why: str) -> _Wrong:
    return _Wrong(at, why)


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while True:
        found = _TOKEN.match(text, place)
        assert found is not None, "any text matches"
        kind = found.lastgroup if found["number"] is None else "number"
        assert kind is not None
        at = found.start(kind) + 1
        if kind == "other":
            word = _OTHERS.get(found[kind])
            raise _wrong(at, f"{found[kind]!r} is no sign here" + _or_else(word))
        yield _Token(at, kind, found[kind], found["unit"] or "")
        if kind == "end":
            return
        place = found.end()


def _or_else(word: str | None) -> str:
    return f": type {word}" if word else "; leave it out"


class _Parser:
    """One function a line of the grammar."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise SpecError(
                f"a condition of {len(text):,} characters is too long: split it in several of "
                f"{MOST_CHARACTERS:,} at most"
            )
        self.text = text
        self.tokens: list[_Token] = []
        self.place = 0
        self.depth = 0

    def whole(self) -> _Node:
        """The tree of the text. Raises SpecError where it is none."""
        try:
            self.tokens = list(_tokens(self.text))
            node = self._chain("or")
            left = self._next
            if left.kind != "end":
                raise _wrong(left.at, f"{left.text!r} does not go on from there; {_joined(left)}")
        except _Wrong as wrong:
            raise wrong.said(self.text) from None
        return node

    @property
    def _next(self) -> _Token:
        return self.tokens[self.place]

    def _take(self, *texts: str) -> _Token | None:
        token = self._next
        if token.kind in ("sign", "name") and token.text in texts:
            self.place += 1
            return token
        return None

    def _chain(self, level: Level) -> _Node:
        signs = _SIGNS[level]
        inner: Callable[[], _Node]
        match level:
            case "and":
                inner = self._no
            case "product":
                inner = self._factor
            case _:
                inner = partial(self._chain, _BELOW[level])
        first = inner()
        rest: list[tuple[int, str, _Node]] = []
        while token := self._take(*signs):
            rest.append((token.at, token.text, inner()))
        return _Chain(first.at, level, first, tuple(rest)) if rest else first

    def _no(self) -> _Node:
        token = self._take("not")
        if token is None:
            return self._chain("comparison")
        return _Prefixed(token.at, "not", self._deeper(token.at, self._no))

    def _factor(self) -> _Node:
        if token := self._take("-"):
            return _Prefixed(token.at, "-", self._deeper(token.at, self._factor))
        if token := self._take("("):
            node = self._deeper(token.at, lambda: self._chain("or"))
            if not self._take(")"):
                raise _wrong(self._next.at, f"the ( of column {token.at} is not closed: add a )")
            return node
        return self._atom()

    def _deeper(self, at: int, parse: Callable[[], _Node]) -> _Node:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise _wrong(at, f"more than {MOST_NESTED} levels deep: split the condition")
        node = parse()
        self.depth -= 1
        return node

    def _atom(self) -> _Node:
        token = self._next
        self.place += 1
        if token.kind == "number":
            return _Constant(token.at, *_number(token))
        if token.kind == "text":
            return _Constant(token.at, token.text[1:-1], "text", token.text)
        if token.kind == "name" and token.text not in WORDS:
            return _Name(token.at, token.text)
        found = "nothing" if token.kind == "end" else repr(token.text)
        raise _wrong(
            token.at,
            f"{found} where a name or a number should be; type such as mfu >= 0.4",
        )


def _joined(left: _Token) -> str:
    if left.kind == "name" and left.text.lower() in WORDS:
        return f"type {left.text.lower()}"
    if left.kind == "name" and len(left.text) <= 3:
        return f"units are {', '.join(UNITS)}; join conditions by and or or"
    return "join conditions by and or or, and compare by <, <=, >, >=, == or !="


def _number(token: _Token) -> tuple[Value, Kind, str]:
    """What a number with its unit is: a whole one where it can be, else the nearest float."""
    text = token.text.replace("_", "")
    if len(text) > MOST_DIGITS:
        raise _wrong(token.at, f"{token.text[:20]}... has too many digits; type fewer")
    number, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > 300:
        raise _wrong(token.at, f"{token.text} is beyond the range of a number; type a smaller one")
    scale, kind = UNITS.get(token.unit, (Fraction(1), NUMBER))
    exact = Fraction(number if number.strip(".") else "0") * Fraction(10) ** int(exponent or 0)
    exact *= scale
    try:
        is_whole = exact.denominator == 1 and "." not in text and not exponent
        value = int(exact) if is_whole else float(exact)
    except OverflowError:
        raise _wrong(token.at, f"{token.text} is too large; type a smaller one") from None
    return value, kind, f"{token.text}{token.unit}"


def _kind(node: _Node, quantities: Mapping[str, Quantity]) -> Kind:
    """What a part measures. Raises _Wrong where its parts do not go together."""
    match node:
        case _Constant():
            return node.kind
        case _Name():
            return _named(node, quantities).kind
        case _Prefixed(at, sign, inner):
            kind = _kind(inner, quantities)
            if sign == "not":
                return _require_truth(at, inner, kind)
            return _require_number(inner, kind)
        case _Chain(_, level, first, rest):
            kinds = [
                (one, _kind(one, quantities)) for one in (first, *(other for *_, other in rest))
            ]
            if level in ("or", "and"):
                for one, kind in kinds:
                    _require_truth(one.at, one, kind)
                return "truth"
            if level == "product":
                return _product(kinds, [sign for _, sign, _ in rest])
            kind = _same(kinds, [(at, sign) for at, sign, _ in rest])
            return "truth" if level == "comparison" else kind


def _named(node: _Name, quantities: Mapping[str, Quantity]) -> Quantity:
    found = quantities.get(node.name)
    if found is not None and found.value is None:
        raise _wrong(node.at, f"{node.name} is not known of this plan; {found.to_know}")
    if found is not None:
        return found
    if node.name.lower() in WORDS:
        raise _wrong(node.at, f"type {node.name.lower()} in place of {node.name}")
    near = nearest(node.name, quantities)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise _wrong(
        node.at,
        f"no quantity of a plan is called {node.name[:60]!r}; {hint}fsdpplan check --list has all",
    )


def nearest(name: str, quantities: Mapping[str, Quantity]) -> list[str]:
    """Names of quantities that `name` may mean, best first."""
    plain = name.lower()[:100]
    lower = {known.lower(): known for known in sorted(quantities, key=len, reverse=True)}
    close = errors.nearest(plain, lower) or difflib.get_close_matches(plain, lower, n=3)
    within = sorted((one for one in lower if plain in one), key=len)[:3]
    return [lower[one] for one in dict.fromkeys((*close, *within))][:3]


def _require_truth(at: int, node: _Node, kind: Kind) -> Kind:
    if kind != "truth":
        raise _wrong(at, f"this is no condition but {_a(kind)}; compare it{_such_as(kind)}")
    return kind


def _require_number(node: _Node, kind: Kind) -> tuple[int, int]:
    if isinstance(kind, str):
        raise _wrong(node.at, f"this is {_a(kind)}, not a number; leave it out here")
    return kind


def _product(kinds: list[tuple[_Node, Kind]], signs: list[str]) -> Kind:
    total = _require_number(*kinds[0])
    for (node, kind), sign in zip(kinds[1:], signs, strict=True):
        one, way = _require_number(node, kind), 1 if sign == "*" else -1
        total = total[0] + way * one[0], total[1] + way * one[1]
    return total


def _same(kinds: list[tuple[_Node, Kind]], signs: list[tuple[int, str]]) -> Kind:
    """What all of them measure. Only texts may stand beside `==` and `!=` without being numbers."""
    (_, first), *others = kinds
    for (_, kind), (at, sign) in zip(others, signs, strict=True):
        if "truth" in (first, kind):
            raise _wrong(at, f"what is true or false is not joined by {sign}: use and, or, not")
        if first != kind:
            lacks = next((one for one, other in kinds if other == NUMBER), None)
            needs = next((other for _, other in kinds if other in _EXAMPLES), None)
            if isinstance(lacks, _Constant) and needs is not None:
                raise _wrong(
                    lacks.at,
                    f"{lacks.text} has no unit beside {_a(needs)}: type "
                    f"{lacks.text}{_EXAMPLES[needs]} or another unit",
                )
            raise _wrong(at, f"{_a(first)} {sign} {_a(kind)} has no meaning; use the same unit")
        if first == "text" and sign not in ("==", "!="):
            raise _wrong(at, f"texts have no {sign}: use == or !=")
    return first


def _a(kind: Kind) -> str:
    names: dict[Kind, str] = {
        "text": "a text",
        "truth": "true or false",
        NUMBER: "a plain number",
        BYTES: "a number of bytes",
        SECONDS: "a time",
        RATE: "a rate in bytes a second",
    }
    if kind in names:
        return names[kind]
    return f"a number in bytes^{kind[0]} seconds^{kind[1]}"


def _value(
    node: _Node, quantities: Mapping[str, Quantity], looked: list[Compared], text: str
) -> Value:
    """What a part comes to; its comparisons are added to `looked`."""
    match node:
        case _Constant():
            return node.value
        case _Name(_, name):
            value = quantities[name].value
            assert value is not None, "its kind was asked before"
            if quantities[name].kind == "truth":
                looked.append(_alone(name, bool(value)))
            return value
        case _Prefixed(_, sign, inner):
            value = _value(inner, quantities, looked, text)
            return not value if sign == "not" else -value  # type: ignore[operator]
        case _Chain(_, "or" | "and" as level, first, rest):
            decides = level == "or"
            parts = (first, *(other for *_, other in rest))
            found = (_value(part, quantities, looked, text) == decides for part in parts)
            return decides if any(found) else not decides
        case _Chain(_, "comparison"):
            return _comparison(node, quantities, looked, text)
        case _Chain(_, _, first, rest):
            total = _value(first, quantities, looked, text)
            for at, sign, other in rest:
                total = _calculated(at, sign, total, _value(other, quantities, looked, text))
            return total


def _alone(name: str, value: bool) -> Compared:
    return Compared(text=name, holds=value, values=((name, value, "truth"),))


def _calculated(at: int, sign: str, one: Value, other: Value) -> float:
    try:
        return _ARITHMETIC[sign](one, other)  # type: ignore[arg-type]
    except ZeroDivisionError:
        raise _wrong(at, "this divides by 0; check what stands behind the /") from None
    except OverflowError:
        raise _wrong(at, "this is beyond the range of a number; use smaller ones") from None


def _comparison(
    node: _Chain, quantities: Mapping[str, Quantity], looked: list[Compared], text: str
) -> bool:
    left, holds = _value(node.first, quantities, looked, text), True
    for _, sign, other in node.rest:
        right = _value(other, quantities, looked, text)
        holds = _COMPARE[sign](left, right)
        if not holds:
            break
        left = right
    names = dict.fromkeys(one.name for one in _names(node))
    values = [(name, quantities[name]) for name in names]
    looked.append(
        Compared(
            text=written(node),
            holds=holds,
            values=tuple(
                (name, one.value, one.kind) for name, one in values if one.value is not None
            ),
        )
    )
    return holds


def _names(node: _Node) -> Iterator[_Name]:
    match node:
        case _Name():
            yield node
        case _Prefixed(_, _, inner):
            yield from _names(inner)
        case _Chain(_, _, first, rest):
            for part in (first, *(other for *_, other in rest)):
                yield from _names(part)


def written(node: _Node) -> str:
    """A part as text, with no more parentheses than it needs."""
    match node:
        case _Constant():
            return node.text
        case _Name():
            return node.name
        case _Prefixed(_, sign, inner):
            text = f"({written(inner)})" if isinstance(inner, _Chain) else written(inner)
            return f"not {text}" if sign == "not" else f"-{text}"
        case _Chain(_, level, first, rest):
            parts = [_within(level, first)]
            parts += [f"{sign} {_within(level, other)}" for _, sign, other in rest]
            return " ".join(parts)


def _within(level: Level, node: _Node) -> str:
    order = list(_SIGNS)
    text = written(node)
    inner = isinstance(node, _Chain) and order.index(node.level) <= order.index(level)
    return f"({text})" if inner else text


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
