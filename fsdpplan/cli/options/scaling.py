"""The options of questions about how many GPUs: ranges and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, line, positive, shown, size
from fsdpplan.errors import SpecError

MOST_POINTS = 64
"""Numbers of GPUs in one list."""

Scaling = Literal["strong", "weak", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of GPUs: those of a list, or from the first to the last one."""

    numbers: tuple[int, ...]
    is_range: bool


def counts(text: str, *, name: str) -> Counts:
    """`8:1024`, or `8,16,64`."""
    read = size(example="8:1024 or 8,16,64")
    if ":" in text:
        ends = tuple(read(part, name=name) for part in text.split(":"))
        if len(ends) != 2 or ends[0] > ends[1]:
            raise SpecError(
                f"{name}: {shown(text)} is no range; type the least and the most, such as 8:1024"
            )
        return Counts(numbers=ends, is_range=True)
    numbers = tuple(dict.fromkeys(read(part, name=name) for part in text.split(",")))
    if len(numbers) > MOST_POINTS:
        raise SpecError(f"{name}: {len(numbers)} numbers are too many; type {MOST_POINTS} at most")
    return Counts(numbers=tuple(sorted(numbers)), is_range=False)


GPU_COUNTS = Flag(
    metavar="8:1024|8,16,64",
    parse=counts,
    help="A range, in powers of two of whole nodes, or the numbers themselves.",
)


def one_or_several(text: str, *, name: str) -> Counts:
    """`64`, or numbers as `counts` reads them."""
    if ":" in text or "," in text:
        return counts(text, name=name)
    return Counts(numbers=(size(example="64")(text, name=name),), is_range=False)


GPU_COUNT_OR_COUNTS = Flag(
    metavar="N|8:512|8,16",
    parse=one_or_several,
    help="GPUs in all (with --hardware cpu: processes); a range or list: the best number.",
)


def prices(text: str, *, name: str) -> tuple[float, ...]:
    """`2.10`, or one for each machine: `2.10,3.90`."""
    read = positive(example="2.10 or 2.10,3.90")
    return tuple(read(part, name=name) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which curves, and how they are printed."""

    HEADING: ClassVar[str] = "Sweep"

    scaling: Annotated[
        Scaling | None,
        Flag(
            metavar="strong|weak|both",
            parse=choice(Scaling),
            help="Keep the global batch (strong), or grow it with the GPUs up to --global-batch "
            "(weak). Default both.",
        ),
    ] = None
    price: Annotated[
        tuple[float, ...] | None,
        Flag(
            metavar="2.10[,3.90]",
            parse=prices,
            help="Price per GPU hour, in any currency: one for all machines, or one for each.",
        ),
    ] = None
    csv: Annotated[bool | None, Flag(name="--csv", help="Print CSV on stdout, nothing else.")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestOptions:
    """How many GPUs, where that is what is asked."""

    HEADING: ClassVar[str] = "How many GPUs"

    min_gpus: Annotated[
        bool | None,
        Flag(
            name="--min-gpus",
            help="In place of --gpus: the fewest that a layout fits on (whole nodes, or equal "
            "parts of one).",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The machines that are free."""

    HEADING: ClassVar[str] = "What is idle"

    from_slurm: Annotated[
        bool | None,
        Flag(
            name="--from-slurm",
            help="Plan for the nodes that Slurm has idle now, within the partition's limits and at "
            "most --gpus.",
        ),
    ] = None
    partition: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=line,
            help="With --from-slurm: Slurm partition. Default: Slurm's own.",
        ),
    ] = None
