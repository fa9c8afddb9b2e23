"""The options of a job: what is asked of the scheduler, and what every rank runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, line, nodes, variable, whole, words
from fsdpplan.cli.options.survival import (
    ContainerOptions,
    SurvivalOptions,
    container_of,
    survival_of,
)
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError

if TYPE_CHECKING:
    from fsdpplan.emit.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the scheduler and the shell are asked for."""

    HEADING: ClassVar[str] = "Job"

    job_name: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="What the queue shows.")
    ] = None
    time: Annotated[
        str | None,
        Flag(metavar="LIMIT", parse=line, help="Time limit as sbatch reads it, such as 08:00:00."),
    ] = None
    partition: Annotated[str | None, Flag(metavar="NAME", parse=line, help="Slurm partition.")] = (
        None
    )
    account: Annotated[str | None, Flag(metavar="NAME", parse=line, help="Slurm account.")] = None
    qos: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Slurm quality of service.")
    ] = None
    reservation: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Slurm reservation.")
    ] = None
    constraint: Annotated[
        str | None,
        Flag(metavar="FEATURES", parse=line, help="Features of Slurm that the nodes must have."),
    ] = None
    output: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="Log of the job; %j is its number.")
    ] = None
    cpus_per_task: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=64), help="CPU cores a node.")
    ] = None
    signal_seconds: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=120),
            help="Seconds before the limit at which the program is told to save.",
        ),
    ] = None
    exclude: Annotated[
        tuple[str, ...],
        Flag(
            metavar="NODES",
            parse=nodes,
            many=True,
            help="Nodes that the job must not get, such as n03,n[17-19]; may be repeated.",
        ),
    ] = ()
    sbatch: Annotated[
        tuple[str, ...],
        Flag(
            metavar="--NAME=VALUE",
            parse=line,
            many=True,
            help="One more option for sbatch; may be repeated.",
        ),
    ] = ()
    env_setup: Annotated[
        tuple[str, ...],
        Flag(
            metavar="LINE",
            parse=line,
            many=True,
            help="A shell line to run first, such as 'module load cuda'; may be repeated.",
        ),
    ] = ()
    env: Annotated[
        tuple[tuple[str, str], ...],
        Flag(
            metavar="NAME=VALUE",
            parse=variable,
            many=True,
            help="A variable to export; may be repeated.",
        ),
    ] = ()
    python: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="The Python that has torch.")
    ] = None
    port: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=29500), help="Port of the rendezvous."),
    ] = None
    nccl_debug: Annotated[
        str | None,
        Flag(
            metavar="VERSION|WARN|INFO",
            parse=choice(Literal["VERSION", "WARN", "INFO"]),
            help="NCCL's own log.",
        ),
    ] = None
    metrics: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="File for one JSON line a step.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """A program of the user's own in place of the reference trainer."""

    HEADING: ClassVar[str] = "Your own program instead"

    script: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="Python file that every rank runs.")
    ] = None
    args: Annotated[
        tuple[str, ...] | None,
        Flag(metavar="'WORDS'", parse=words, help="Its arguments, quoted as for a shell."),
    ] = None


def given(options: Any) -> dict[str, Any]:
    """The fields that were given."""
    pairs = ((field.name, getattr(options, field.name)) for field in fields(options))
    return {name: value for name, value in pairs if value not in (None, ())}


def job_of(
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
) -> Job:
    """The job that the options describe."""
    from fsdpplan.emit.job import Job, UserProgram

    values = given(job)
    values |= {"survival": survival_of(survival), "container": container_of(container)}
    if program.script is None:
        if program.args is not None:
            raise SpecError("--args are those of a program of yours: give --script train.py too")
        return Job(program=trainer, **values)
    if ours := given(trainer):
        flags = ", ".join("--" + name.replace("_", "-") for name in ours)
        raise SpecError(
            f"{flags} would not reach {program.script}: they are the reference trainer's; "
            "pass them in --args"
        )
    return Job(program=UserProgram(script=program.script, args=program.args or ()), **values)
