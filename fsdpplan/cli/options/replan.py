"""The options of planning again for other GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import path, whole
from fsdpplan.units import parse_bandwidth_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOptions:
    """What of the training is kept, and where it goes on from."""

    HEADING: ClassVar[str] = "Replan"

    keep_global_batch: Annotated[
        bool | None,
        Flag(
            name="--keep-global-batch/--no-keep-global-batch",
            help="Default: the batch stays, and with it tokens, warm-up and learning rate of a "
            "step. --no: the nearest that all GPUs share evenly.",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Flag(
            metavar="N", parse=whole(example=256), help="Sequences a step in place of the plan's."
        ),
    ] = None
    free: Annotated[
        bool | None,
        Flag(name="--free", help="Search what the plan fixed of its layout, too."),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help="The run's: says where it stands, and with which options it goes on.",
        ),
    ] = None
    storage_bw: Annotated[
        float | None,
        Flag(
            metavar="20GB/s",
            parse=parse_bandwidth_bytes_per_second,
            help="What all ranks together write to, and read from, the checkpoint folder.",
        ),
    ] = None
    save: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help="Where to save the new plan. Default: beside the old one, PLAN-56gpus.json.",
        ),
    ] = None
