"""The options of time, money and energy: what is known of them, and what is to be best."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from fsdpplan.cli.options import offered
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, fraction, line, number, positive, shown
from fsdpplan.errors import SpecError
from fsdpplan.search.question import ObjectiveName
from fsdpplan.units import parse_seconds

DEFAULT_CHANCE = 0.8
"""With which a deadline is to be met."""


def odds(text: str, *, name: str) -> float:
    """A chance above 0 and below 1."""
    found = fraction(text, name=name)
    if not found:
        raise SpecError(f"{name}: {shown(text)} is no chance above 0; type one such as 80%")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions:
    """What a GPU hour costs."""

    HEADING: ClassVar[str] = "Money (with --tokens)"

    price: Annotated[
        float | None,
        Flag(
            metavar="2.10",
            parse=positive(example="2.10"),
            help="Price per GPU hour, in dollars.",
        ),
    ] = None
    provider: Annotated[
        str | None,
        Flag(
            metavar="aws|azure|lambda|...",
            parse=line,
            help="On-demand price of this provider, from a dated table, in place of --price.",
            offered=offered.providers,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BillOptions(PriceOptions):
    """What a whole training takes; all of it is of `--tokens`."""

    HEADING: ClassVar[str] = "Time, money and energy (with --tokens)"

    epochs: Annotated[
        float | None,
        Flag(
            metavar="N",
            parse=positive(example="2"),
            help="Passes over --data, or --tokens. Default 1.",
        ),
    ] = None
    deadline: Annotated[
        float | None,
        Flag(
            metavar="14d|36h",
            parse=parse_seconds,
            help="When training must be over; exit code 3 where that is too unlikely.",
        ),
    ] = None
    deadline_chance: Annotated[
        float | None,
        Flag(metavar="80%", parse=odds, help="Least probability to meet --deadline. Default 80%."),
    ] = None
    node_watts: Annotated[
        float | None,
        Flag(
            metavar="7800",
            parse=positive(example="7800"),
            help="Watts that a node draws in training. Default: 76 % of its rating.",
        ),
    ] = None
    pue: Annotated[
        float | None,
        Flag(
            metavar="1.2",
            parse=number(example="1.2", least=1, below=10),
            help="Power usage effectiveness of the site. Default 1: nodes alone.",
        ),
    ] = None
    co2_per_kwh: Annotated[
        float | None,
        Flag(
            metavar="350",
            parse=number(example="350", least=0, below=10_000),
            help="Grams of CO2 per kWh at the site.",
        ),
    ] = None

    @property
    def is_asked(self) -> bool:
        """Whether anything of it is."""
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOptions:
    """What is to be best."""

    HEADING: ClassVar[str] = "Objective"

    objective: Annotated[
        ObjectiveName | None,
        Flag(
            metavar="NAME",
            parse=choice(ObjectiveName),
            help="Optimize throughput (default), goodput, cost, energy, fewest-gpus or headroom. "
            "With a range or list of --gpus it chooses the number; cost, energy and fewest-gpus "
            "also without --gpus. With --deadline the default is cost, or fewest-gpus without a "
            "price.",
        ),
    ] = None
