"""The options of a job that say how it outlives faults, and what it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, line, whole
from fsdpplan.errors import SpecError

if TYPE_CHECKING:
    from fsdpplan.emit.container import Container
    from fsdpplan.emit.survival import Survival


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalOptions:
    """What the job does about nodes and ranks that fail."""

    HEADING: ClassVar[str] = "When something fails"

    preflight: Annotated[
        bool | None,
        Flag(
            name="--preflight/--no-preflight",
            help="Try nodes, ranks and links before training. Default: on several nodes.",
        ),
    ] = None
    retries: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=3, least=0),
            help="Starts after the first one, at most: for a bad node, or after a new checkpoint. "
            "Default: 3 with checkpoints, spares or a program of your own, else 0.",
        ),
    ] = None
    spares: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=1, least=0),
            help="Nodes more than the plan has, to take the place of bad ones.",
        ),
    ] = None
    requeue: Annotated[
        bool | None,
        Flag(
            name="--requeue/--no-requeue",
            help="Whether the job may go back into the queue. Default: with checkpoints, or a "
            "program of your own.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """What the ranks run in."""

    HEADING: ClassVar[str] = "Container"

    container: Annotated[
        str | None,
        Flag(
            metavar="IMAGE",
            parse=line,
            help="Image that the ranks run in, as the runtime names it.",
        ),
    ] = None
    container_mount: Annotated[
        tuple[str, ...],
        Flag(
            metavar="SOURCE:TARGET",
            parse=line,
            many=True,
            help="What of the host is seen inside, beside the working folder; may be repeated.",
        ),
    ] = ()
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"] | None,
        Flag(
            metavar="pyxis|apptainer",
            parse=choice(Literal["pyxis", "apptainer"]),
            help="What starts the container. Default: pyxis, which is Slurm's.",
        ),
    ] = None


def survival_of(options: SurvivalOptions) -> Survival:
    """What the options say, with the defaults of what they leave out."""
    from fsdpplan.cli.options.job import given
    from fsdpplan.emit.survival import Survival

    return Survival(**given(options))


def container_of(options: ContainerOptions) -> Container | None:
    """The container that the options describe; None without an image."""
    from fsdpplan.emit.container import Container

    if options.container is None:
        if options.container_mount or options.container_runtime is not None:
            raise SpecError(
                "--container-mount and --container-runtime are of a container: give --container "
                "with its image too"
            )
        return None
    return Container(
        image=options.container,
        mounts=options.container_mount,
        runtime=options.container_runtime or "pyxis",
    )
