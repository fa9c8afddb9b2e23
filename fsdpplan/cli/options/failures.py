"""The options of how a cluster fails, and of how a run saves."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import whole
from fsdpplan.spec.plan import Failures
from fsdpplan.units import parse_bandwidth_bytes_per_second, parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """How the machines fail. Any of them shows what failures leave of the time."""

    HEADING: ClassVar[str] = "Failures"

    goodput: Annotated[
        bool | None,
        Flag(
            name="--goodput",
            help="Show the share of time that failures leave, and how often to save. Implied by "
            "the others here.",
        ),
    ] = None
    mtbf_gpu: Annotated[
        float | None,
        Flag(
            metavar="79000h",
            parse=parse_seconds,
            help="Mean time between failures of a GPU. Default: as published.",
        ),
    ] = None
    mtbf_node: Annotated[
        float | None,
        Flag(
            metavar="17600h",
            parse=parse_seconds,
            help="Mean time between failures of a node, its GPUs left out. Default: as published.",
        ),
    ] = None
    storage_bw: Annotated[
        float | None,
        Flag(
            metavar="20GB/s",
            parse=parse_bandwidth_bytes_per_second,
            help="Bandwidth of the checkpoint folder, all ranks together. Default: that of your "
            "runs, else as published.",
        ),
    ] = None
    restart: Annotated[
        float | None,
        Flag(
            metavar="11min",
            parse=parse_seconds,
            help="Time from a failure until the next start reads its checkpoint. Default: as "
            "published.",
        ),
    ] = None
    requeue: Annotated[
        float | None,
        Flag(
            metavar="5min",
            parse=parse_seconds,
            help="Part of --restart that waits for another node; it decides how many spare nodes "
            "are worth it.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions(FailureOptions):
    """How the machines fail, and how the run saves."""

    checkpoint_every: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=500),
            help="Steps between saves. Default: the best for goodput.",
        ),
    ] = None
    checkpoint_async: Annotated[
        bool | None,
        Flag(
            name="--checkpoint-async/--no-checkpoint-async",
            help="Save in the background while training goes on. Default: yes.",
        ),
    ] = None


FIELDS = {
    "mtbf_gpu": "gpu_mtbf_seconds",
    "mtbf_node": "node_mtbf_seconds",
    "storage_bw": "storage_bytes_per_second",
    "restart": "restart_seconds",
    "requeue": "requeue_seconds",
}
"""Option -> field of `Failures`."""


def given_failures(options: FailureOptions, *, known: Failures | None = None) -> Failures | None:
    """What was typed, over what a plan knows; None where there is nothing."""
    values = {field: getattr(options, name) for name, field in FIELDS.items()}
    typed = {field: value for field, value in values.items() if value is not None}
    return replace(known or Failures(), **typed) if typed else known


def is_asked(options: FailureOptions) -> bool:
    """Whether what failures leave is to be shown."""
    return any(getattr(options, field.name) is not None for field in fields(options))
