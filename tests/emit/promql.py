"""Enough of PromQL to ask alert rules of made-up series what they would say.

Selectors with labels, ranges and offsets; avg_over_time; avg by (...); time(); arithmetic and
comparisons between vectors of equal labels, or a vector and a number; `and`, with `on (...)`.
Precedence as prometheus.io, "Operators": `*` and `/`, then `+` and `-`, comparisons, `and`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LOOKBACK_SECONDS = 300.0
"""A sample is stale behind it, as prometheus.io, "Querying basics" has it."""

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = Vector | float


@dataclass(frozen=True)
class Series:
    """Samples of one metric with its labels: (seconds, value)."""

    name: str
    labels: Mapping[str, str]
    samples: list[tuple[float, float]]


_TOKEN = re.compile(
    r"\s*(?:(?P<duration>\d+[smh])\b|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    r'|(?P<word>[a-zA-Z_]\w*)|(?P<text>"[^"]*")|(?P<mark>[=!<>]=|[-+*/<>=(){}\[\],]))'
)
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "*": operator.mul,
    "/": lambda a, b: a / b if b else float("nan"),
    "+": operator.add,
    "-": operator.sub,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
}


def fires(expression: str, series: list[Series], at: float) -> bool:
    """Whether an alert with this expression would speak at a time."""
    found = _Reader(expression, series, at).whole()
    assert isinstance(found, dict), "an alert's expression is a vector"
    return bool(found)


class _Reader:
    def __init__(self, expression: str, series: list[Series], at: float) -> None:
        self.series, self.at = series, at
        self.tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(expression.rstrip()):
            match = _TOKEN.match(expression, place)
            assert match, f"not understood: {expression[place:]!r}"
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            place = match.end()

    def whole(self) -> Value:
        value = self.conjunction()
        assert not self.tokens, f"left over: {self.tokens}"
        return value

    def next(self, *wanted: str) -> str | None:
        if self.tokens and self.tokens[0][1] in wanted:
            return self.tokens.pop(0)[1]
        return None

    def require(self, wanted: str) -> None:
        assert self.next(wanted), f"{wanted} is missing before {self.tokens[:3]}"

    def conjunction(self) -> Value:
        left = self.comparison()
        while self.next("and"):
            on = self.names() if self.next("on") else None
            right = self.comparison()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            kept = {_some(labels, on) for labels in right}
            left = {labels: value for labels, value in left.items() if _some(labels, on) in kept}
        return left

    def comparison(self) -> Value:
        left = self.sum()
        while sign := self.next(*_COMPARISONS):
            left = _compared(left, self.sum(), _COMPARISONS[sign])
        return left

    def sum(self) -> Value:
        left = self.product()
        while sign := self.next("+", "-"):
            left = _combined(left, self.product(), _ARITHMETIC[sign])
        return left

    def product(self) -> Value:
        left = self.atom()
        while sign := self.next("*", "/"):
            left = _combined(left, self.atom(), _ARITHMETIC[sign])
        return left

    def atom(self) -> Value:
        if self.next("("):
            value = self.conjunction()
            self.require(")")
            return value
        kind, word = self.tokens.pop(0)
        if kind == "number":
            return float(word)
        if word == "time":
            self.require("(")
            self.require(")")
            return self.at
        if word == "avg":
            self.require("by")
            names = self.names()
            return _averaged(self.atom(), names)
        if word == "avg_over_time":
            self.require("(")
            found = self.selected(self.tokens.pop(0)[1])
            self.require(")")
            return {one: sum(values) / len(values) for one, values in found.items() if values}
        return {one: values[-1] for one, values in self.selected(word).items() if values}

    def names(self) -> tuple[str, ...]:
        self.require("(")
        found = []
        while not self.next(")"):
            found.append(self.tokens.pop(0)[1])
            self.next(",")
        return tuple(found)

    def selected(self, name: str) -> dict[Labels, list[float]]:
        wanted = {}
        if self.next("{"):
            while not self.next("}"):
                label = self.tokens.pop(0)[1]
                self.require("=")
                wanted[label] = self.tokens.pop(0)[1].strip('"')
                self.next(",")
        window, offset = LOOKBACK_SECONDS, 0.0
        if self.next("["):
            window = _seconds(self.tokens.pop(0)[1])
            self.require("]")
        if self.next("offset"):
            offset = _seconds(self.tokens.pop(0)[1])
        last = self.at - offset
        return {
            frozenset(one.labels.items()): [
                value for when, value in one.samples if last - window < when <= last
            ]
            for one in self.series
            if one.name == name and wanted.items() <= dict(one.labels).items()
        }


def _seconds(text: str) -> float:
    return float(text[:-1]) * _SECONDS[text[-1]]


def _some(labels: Labels, names: tuple[str, ...] | None) -> Labels:
    return labels if names is None else frozenset(one for one in labels if one[0] in names)


def _averaged(value: Value, names: tuple[str, ...]) -> Vector:
    assert isinstance(value, dict)
    groups: dict[Labels, list[float]] = {}
    for labels, one in value.items():
        groups.setdefault(_some(labels, names), []).append(one)
    return {labels: sum(its) / len(its) for labels, its in groups.items()}


def _pairs(left: Value, right: Value) -> dict[Labels, tuple[float, float]]:
    if isinstance(left, dict) and isinstance(right, dict):
        return {labels: (left[labels], right[labels]) for labels in left.keys() & right.keys()}
    if isinstance(left, dict):
        assert isinstance(right, float)
        return {labels: (value, right) for labels, value in left.items()}
    assert isinstance(right, dict), "numbers alone are not asked here"
    return {labels: (left, value) for labels, value in right.items()}


def _combined(left: Value, right: Value, of: Callable[[float, float], float]) -> Value:
    return {labels: of(*pair) for labels, pair in _pairs(left, right).items()}


def _compared(left: Value, right: Value, holds: Callable[[float, float], Any]) -> Value:
    return {labels: pair[0] for labels, pair in _pairs(left, right).items() if holds(*pair)}
