"""Every error that a user can meet, and the exit code each one becomes.

    FsdpPlanError
      SpecError(ValueError)   a value the user gave is impossible        2
        ProfileNotFound       no such hardware profile or model          2
      NoFeasibleLayout        nothing fits; carries counts by reason     3
      ProbeError              a machine command is missing or unread     4
      LaunchError             the job could not be started               5
      GateFailed              a measured value is past its limit         6

A message says what was wrong with the values, what would be right, and what to type next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NotRequired, TypedDict


class FsdpPlanError(Exception):
    """Base of all errors that are the user's to read; `exit_code` is the process's exit code."""

    exit_code = 1


class ErrorJson(TypedDict):
    """What failed, under `error` in JSON."""

    kind: str
    """Such as `SpecError`."""
    message: str
    exit_code: int
    rejected: NotRequired[dict[str, int]]
    """Of `NoFeasibleLayout`: reason -> layouts that it ruled out."""


def error_document(error: FsdpPlanError) -> ErrorJson:
    """`error` as JSON has it."""
    return {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}


class SpecError(FsdpPlanError, ValueError):
    """A value that the user gave is impossible, or contradicts another one."""

    exit_code = 2


class ProfileNotFound(SpecError):
    """No hardware profile or catalogue model has this name."""


class NoFeasibleLayout(FsdpPlanError):
    """No layout fits. `rejected` counts the layouts by reason."""

    exit_code = 3

    def __init__(self, message: str, *, rejected: Mapping[str, int]) -> None:
        super().__init__(message)
        self.rejected = dict(rejected)


class ProbeError(FsdpPlanError):
    """A command or interface of the machine is missing, or said something unreadable."""

    exit_code = 4


class LaunchError(FsdpPlanError):
    """The job could not be started."""

    exit_code = 5


class GateFailed(FsdpPlanError):
    """A measured value is past its limit."""

    exit_code = 6


_SLIP, _ANOTHER = 2, 3

MOST_NEAR = 4
"""So many words are offered in the place of one that is not known."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The `known` words that somebody who typed `word` may have meant, the nearest first: those
    that few slips turn into it. Capitals, dashes and underscores are none.

    A slip is a letter too many, too few, another one, or two in the wrong order.
    """
    typed = _letters(word[:100])
    most = _ANOTHER * max(1, len(typed) // 3)
    found = [(_slips(typed, _letters(one), most), one) for one in dict.fromkeys(known)]
    near = sorted((slips, len(one), one) for slips, one in found if slips <= most)
    return [one for slips, _, one in near if slips <= near[0][0] + 1][:MOST_NEAR]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)`; empty where no known word is near."""
    near = nearest(word, known)
    if not near:
        return ""
    *first, last = near
    return f" (did you mean {', '.join(first)} or {last}?)" if first else f" (did you mean {last}?)"


def _letters(word: str) -> str:
    return word.strip().lower().replace("-", "").replace("_", "")


def _slips(typed: str, word: str, most: int) -> int:
    """Optimal string alignment distance (Damerau 1964, each part changed once), in which another
    letter costs more than one too many; above `most` any number that is."""
    if _SLIP * abs(len(typed) - len(word)) > most:
        return most + 1
    before: list[int] = []
    row = [_SLIP * j for j in range(len(word) + 1)]
    for i, letter in enumerate(typed, start=1):
        above, row = row, [_SLIP * i]
        for j, other in enumerate(word, start=1):
            other_letter = above[j - 1] + _ANOTHER * (letter != other)
            least = min(above[j] + _SLIP, row[j - 1] + _SLIP, other_letter)
            if i > 1 and j > 1 and letter == word[j - 2] and typed[i - 2] == other:
                least = min(least, before[j - 2] + _SLIP)
            row.append(least)
        if min(row) > most and min(above) > most:
            return most + 1
        before = above
    return row[-1]
