"""Faults by chance: the same seed draws the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Passing = Literal[
    "kill_slurmd",
    "stop_slurmd",
    "cut_link",
    "slow_link",
    "fill_disk",
    "corrupt",
    "stop_rank",
    "shift_clock",
    "hide_folder",
]
"""What a job may outlive without a start anew."""
Ending = Literal["kill_rank", "kill_agent", "choke_rank", "preempt"]
"""What ends the ranks."""
Kind = Passing | Ending

PASSING: tuple[Passing, ...] = get_args(Passing)
ENDING: tuple[Ending, ...] = get_args(Ending)

ENDING_FRACTION = 0.6
GONE_FRACTION = 0.1
LONG: tuple[Kind, ...] = ("hide_folder", "stop_rank", "stop_slurmd")
"""May last for some seconds, in which ranks start again."""
IMPATIENT_FRACTION = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    place: int
    """Which of the job's nodes, counted around."""
    seconds: float
    """How long it lasts, where it lasts."""
    seed: int
    """What else is left to chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Faults that overlap, of which the last one may end the ranks."""

    faults: tuple[Fault, ...]
    patient: bool
    """Whether it waits until the job has saved something since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A job, and what happens to it."""

    seed: int
    nodes: int
    per_node: int
    spares: int
    """Nodes that it holds beyond its plan; there is one more in any case."""
    goes: bool
    """One node is lost for good: a link that stays cut, a daemon that stays away."""
    strikes: tuple[Strike, ...]

    @property
    def num_faults(self) -> int:
        """All that happens."""
        return self.goes + sum(len(strike.faults) for strike in self.strikes)


def draw_story(seed: int, *, num_faults: int) -> Story:
    """A job with so many faults."""
    draw = random.Random(seed)
    nodes, per_node = draw.choice(((2, 1), (2, 1), (2, 1), (3, 1), (2, 2)))
    goes = draw.random() < GONE_FRACTION * num_faults / 2
    strikes: list[Strike] = []
    left = num_faults - goes
    while left:
        strike = _draw_strike(draw, most=left)
        strikes.append(strike)
        left -= len(strike.faults)
    return Story(
        seed=seed,
        nodes=nodes,
        per_node=per_node,
        spares=draw.randrange(2) if goes else 0,
        goes=goes,
        strikes=tuple(strikes),
    )


def _draw_strike(draw: random.Random, *, most: int) -> Strike:
    ends = draw.random() < ENDING_FRACTION
    least = 0 if ends else 1
    passing = draw.sample(PASSING, k=min(draw.randint(least, 3), most - ends))
    kinds: list[Kind] = [*passing, draw.choice(ENDING)] if ends else [*passing]
    return Strike(
        faults=tuple(_draw_fault(draw, kind) for kind in kinds),
        patient=draw.random() >= IMPATIENT_FRACTION,
    )


def _draw_fault(draw: random.Random, kind: Kind) -> Fault:
    return Fault(
        kind=kind,
        place=draw.randrange(4),
        seconds=draw.uniform(0.2, 15 if kind in LONG else 1.5),
        seed=draw.randrange(2**32),
    )
