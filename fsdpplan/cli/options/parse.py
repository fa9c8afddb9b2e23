"""Text of an option to its value. Each parser takes the flag's name for its message, as
`fsdpplan.units` does, and says what to type instead."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from fsdpplan.emit.safe_text import looks_secret, redacted
from fsdpplan.errors import SpecError, did_you_mean
from fsdpplan.spec.layout import CheckpointBlocks, Reshard
from fsdpplan.spec.nodes import expand_host_list
from fsdpplan.spec.training import TorchRelease, torch_release

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UPPER_CASE = re.compile(r"[A-Z_][A-Z0-9_]{0,60}")


class Parser(Protocol):
    """Text to value; raises SpecError that starts with `name`."""

    def __call__(self, text: str, *, name: str) -> Any:
        """The value that `text` stands for."""


MOST_DIGITS = 15
"""More digits than this in a whole number are a slip, whatever the option."""


def whole(*, example: int, least: int = 1) -> Parser:
    """A parser of plain whole numbers of at least `least`."""

    def parse(text: str, *, name: str) -> int:
        value = _digits(text)
        if value is None or value < least:
            raise SpecError(
                f"{name}: {shown(text)} is not a whole number of at least {least}; "
                f"type one such as {example}"
            )
        return value

    return parse


def _digits(text: str) -> int | None:
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) <= MOST_DIGITS:
        return int(stripped)
    return None


_POWERS = {"k": 2**10, "m": 2**20}


def size(*, example: str) -> Parser:
    """A parser of whole numbers that people round to powers of two: `8192`, `8k`, `1M`."""
    plain = whole(example=1)

    def parse(text: str, *, name: str) -> int:
        number, unit = text.strip()[:-1], text.strip()[-1:].lower()
        value = _digits(number) if unit in _POWERS else None
        if value is not None and value * _POWERS[unit] < 10**MOST_DIGITS and value > 0:
            return value * _POWERS[unit]
        try:
            value = plain(text, name=name)
        except SpecError:
            raise SpecError(
                f"{name}: {shown(text)} is not a whole number of at least 1; type one such as "
                f"{example} (k is 1,024, M 1,024 of those)"
            ) from None
        return int(value)

    return parse


@dataclass(frozen=True, slots=True)
class Choice:
    """A parser of one of some words, or of what others call them; capitals, dashes and underscores
    do not matter."""

    allowed: tuple[str, ...]
    known: Mapping[str, str]

    def __call__(self, text: str, *, name: str) -> str:
        word = self.known.get(_plain(text))
        if word is None:
            raise SpecError(
                f"{name}: {shown(text)} is not known{did_you_mean(text, self.allowed)}; type "
                f"{either(self.allowed)}"
            )
        return word


def choice(literal: Any, synonyms: Mapping[str, str] | None = None) -> Choice:
    """A parser of one of the words of a `Literal`."""
    allowed = get_args(literal)
    known = {_plain(word): word for word in allowed}
    known |= {_plain(word): meant for word, meant in (synonyms or {}).items()}
    return Choice(allowed, known)


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "").replace("_", "")


def either(alternatives: tuple[str, ...]) -> str:
    """`a, b or c`."""
    *first, last = alternatives
    return f"{', '.join(first)} or {last}" if first else last


def fraction(text: str, *, name: str) -> float:
    """`8%` or `0.08`: at least 0 and below 1."""
    number = text.strip()
    value = _float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    if not 0 <= value < 1:
        raise SpecError(
            f"{name}: {shown(text)} is not a share of at least 0 and below 1; "
            "type one such as 8% or 0.08"
        )
    return value


def positive(*, example: str) -> Parser:
    """A parser of finite numbers above 0."""

    def parse(text: str, *, name: str) -> float:
        value = _float(text)
        if not (math.isfinite(value) and value > 0):
            raise SpecError(
                f"{name}: {shown(text)} is not a number above 0; type one such as {example}"
            )
        return value

    return parse


def number(*, example: str, least: float, below: float | None = None) -> Parser:
    """A parser of finite numbers of at least `least`, and below `below`."""
    bound = f"of at least {least:g}" + ("" if below is None else f" and below {below:g}")

    def parse(text: str, *, name: str) -> float:
        value = _float(text)
        if not (math.isfinite(value) and value >= least and (below is None or value < below)):
            raise SpecError(
                f"{name}: {shown(text)} is not a number {bound}; type one such as {example}"
            )
        return value

    return parse


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def release(text: str, *, name: str) -> TorchRelease:
    """A release of PyTorch: `2.9`, `2.9.1`, or as `torch.__version__` prints it."""
    try:
        return torch_release(text.strip())
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error


def reshard(text: str, *, name: str) -> Reshard:
    """`always`, `never`, or how many ranks keep the parameters between them."""
    match text.strip().lower():
        case "always" | "true" | "yes":  # as fully_shard says it
            return "always"
        case "never" | "false" | "no":
            return "never"
    ranks = _digits(text)
    if ranks is None or ranks < 2:
        raise SpecError(
            f"{name}: {shown(text)} is not known{did_you_mean(text, ('always', 'never'))}; "
            "type always, never or a whole number of at least 2"
        )
    return ranks


def checkpoint_blocks(text: str, *, name: str) -> CheckpointBlocks:
    """`all`, or how many blocks of each stage recompute."""
    if text == "all":
        return "all"
    number = _digits(text)
    if number is None or number < 1:
        raise SpecError(
            f"{name}: {shown(text)} is not known{did_you_mean(text, ('all',))}; type all or a "
            "whole number of at least 1 "
            "(--activation-checkpointing none recomputes no block)"
        )
    return number


def stage_blocks(text: str, *, name: str) -> tuple[int, ...]:
    """`9,8,8,7`: whole numbers, first stage to last."""
    numbers = [_digits(part) for part in text.split(",")]
    found = tuple(number for number in numbers if number is not None)
    if len(found) < len(numbers) or len(found) < 2:
        raise SpecError(
            f"{name}: {shown(text)} is not the blocks of each stage, first to last; type such as "
            "9,8,8,7"
        )
    return found


def line(text: str, *, name: str) -> str:
    """Any text of one line that is not empty."""
    if not text.strip() or not text.isprintable():
        raise SpecError(f"{name}: {shown(text)} is not a line of text; type one, or leave it out")
    return text


def variable(text: str, *, name: str) -> tuple[str, str]:
    """NAME=VALUE on one line, as the two; no message shows the value, which may be a secret."""
    given, equals, value = text.partition("=")
    if not equals:
        # It may well be the value alone.
        what = given if _UPPER_CASE.fullmatch(given) and not looks_secret(given) else "one"
        raise SpecError(f"{name}: {what} has no value; type one such as {name} NCCL_DEBUG=INFO")
    if not _VARIABLE.fullmatch(given):
        raise SpecError(
            f"{name}: what stands before the = is no name of a variable: use letters, digits and "
            f"_ only, as in {name} NCCL_DEBUG=INFO"
        )
    if not text.isprintable():
        raise SpecError(f"{name}: the value of {given} is not a line of text; type one")
    return given, value


def nodes(text: str, *, name: str) -> str:
    """A list of nodes as Slurm writes it, on one line."""
    line(text, name=name)
    try:
        expand_host_list(text)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error
    return text


def path(text: str, *, name: str) -> Path:
    """A path of the file system; whether it exists is for its user to say."""
    if not text or "\0" in text:
        raise SpecError(f"{name}: {shown(text)} is not a path; type one such as fsdpplan.json")
    return Path(text)


def words(text: str, *, name: str) -> tuple[str, ...]:
    """Words as a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(
            f"{name}: {shown(text)} cannot be split into words ({error}); check its quotes"
        ) from None


def shown(text: str) -> str:
    """`text` quoted, without secrets, cut where it would fill the screen."""
    text = redacted(text)
    return repr(text if len(text) <= 40 else text[:37] + "...")
