"""Mixtures: sequences of several sources, in an order in which each has its share from the first
sequence on.

Which source sequence `n` is of, and which of its own, is a function of the weights and `n` alone.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ..errors import TrainerError
from ..shared import trainer_options

MOST_PARTS = 100_000
"""Weights are rounded to this part of the whole, where they are no simple fractions."""


class Share(NamedTuple):
    """A source as the command line names it."""

    path: str
    weight: Fraction | None
    """None: by its tokens."""


def share_of(text: str) -> Share:
    """`PATH` or `PATH=WEIGHT`."""
    path, weight = trainer_options.data_share(text)
    return Share(path, None if weight is None else Fraction(weight))


def require_shares(shares: Sequence[Share]) -> None:
    """Raise TrainerError for weights that no mixture has."""
    for share in shares:
        if share.weight is not None and share.weight <= 0:
            raise TrainerError(f"--data {share.path}: its weight must be above 0")
    weighted = [share.weight is not None for share in shares]
    if any(weighted) and not all(weighted):
        bare = next(share.path for share in shares if share.weight is None)
        raise TrainerError(
            f"--data {bare} has no weight, others have: write --data {bare}=WEIGHT, or leave all "
            "weights out, for each source to have its share by its tokens"
        )


def parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Sequences of each source in one round: the least whole numbers in these proportions, or those
    nearest to them of MOST_PARTS in all."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    of_round = math.lcm(*(share.denominator for share in shares))
    if of_round <= MOST_PARTS:
        return tuple(int(share * of_round) for share in shares)
    exact = [share * MOST_PARTS for share in shares]
    rounded = [math.floor(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])
    for index in by_rest[: MOST_PARTS - sum(rounded)]:
        rounded[index] += 1
    return tuple(rounded)


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence of a mixture."""

    source: int
    number: int
    """Of the source's own sequences."""


class Order:
    """Which source each sequence is of.

    A round has P sequences, p_i of source i, and is the same every time. Before any sequence n each
    source has had less than one more or less than n * p_i / P.

        of those i with  n * p_i - P * had_i >= P / (2k - 2)  the one with the least
        (P - P / (2k - 2) - n * p_i + P * had_i) / p_i  takes sequence n = 1, 2, ...

    Source: R. Tijdeman (1980), "The chairman assignment problem", Discrete Mathematics 32, whose
    bound is 1 - 1 / (2k - 2) for k sources.
    """

    def __init__(self, of_round: Sequence[int]) -> None:
        self.parts = tuple(of_round)
        self.round = sum(self.parts)
        had = [0] * len(self.parts)
        self._source = array("H")
        self._places = [array("L") for _ in self.parts]
        for n in range(1, self.round + 1):
            chosen = self._next(n, had)
            self._source.append(chosen)
            self._places[chosen].append(n - 1)
            had[chosen] += 1

    def _next(self, n: int, had: Sequence[int]) -> int:
        k = len(self.parts)
        if k == 1:
            return 0
        least = self.round  # in units of 1 / ((2k - 2) P)
        owed = [
            (2 * k - 2) * (n * part - self.round * so_far)
            for part, so_far in zip(self.parts, had, strict=True)
        ]
        may = [i for i, each in enumerate(owed) if each >= least]
        full = (2 * k - 2) * self.round - least
        return min(may, key=lambda i: (full - owed[i]) / self.parts[i])

    def __call__(self, number: int) -> Turn:
        """Sequence `number` of the mixture, from 0."""
        source = self._source[number % self.round]
        return Turn(source, self.had(number, source))

    def had(self, number: int, source: int) -> int:
        """Sequences of `source` before sequence `number` of the mixture."""
        rounds, place = divmod(number, self.round)
        return rounds * self.parts[source] + bisect_left(self._places[source], place)
