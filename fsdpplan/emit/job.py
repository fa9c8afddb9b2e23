"""Job: what a person asks of the scheduler, the environment and the program that runs.

More options for sbatch than the script writes of itself, as a person gives them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, get_args

from fsdpplan.emit.container import Container
from fsdpplan.emit.safe_text import (
    require_no_tokens,
    require_passable,
    require_public_text,
    require_public_variable,
    require_public_words,
)
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer, said_steps
from fsdpplan.errors import SpecError
from fsdpplan.spec.nodes import expand_host_list
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.trainer_options import STEPS
from fsdpplan.spec.values import require_choice, require_positive_int
from fsdpplan.units import format_seconds

RESERVED_SBATCH = {
    "nodes": "the plan fixes the number of nodes",
    "ntasks": "one task a node starts torchrun",
    "ntasks-per-node": "one task a node starts torchrun",
    "tasks-per-node": "one task a node starts torchrun",
    "gpus": "the plan fixes the GPUs a node",
    "gpus-per-node": "the plan fixes the GPUs a node",
    "gpus-per-task": "the plan fixes the GPUs a node",
    "cpus-per-task": "use --cpus-per-task",
    "job-name": "use --job-name",
    "time": "use --time",
    "partition": "use --partition",
    "account": "use --account",
    "qos": "use --qos",
    "output": "use --output",
    "signal": "use --signal-seconds",
    "exclude": "use --exclude",
    "requeue": "use --requeue",
    "no-requeue": "use --no-requeue",
    "no-kill": "use --spares",
    "open-mode": "the log has to outlive a requeue",
    "export": "the plan reaches the ranks through the exported environment",
    "array": "each array task would run the same plan on the same checkpoint",
    "segment": "the plan fixes it: leave it out by --no-segment",
    "wrap": "the script is the program",
}
"""Options of sbatch that the script sets itself, or must not have, and why."""

_SBATCH_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)


def sbatch_option(option: str) -> tuple[str, str | None]:
    """(name, value) of one extra option. Raises SpecError for one the script must set itself."""
    match = _SBATCH_OPTION.fullmatch(option)
    if match is None:
        raise SpecError(
            f"sbatch option {option!r} must be written --name or --name=value, "
            "such as --constraint=h100"
        )
    name = match["name"]
    # sbatch takes any unambiguous beginning of a name, so --gpus-per-nod is --gpus-per-node.
    for reserved, reason in RESERVED_SBATCH.items():
        if name == reserved or (len(name) > 2 and reserved.startswith(name)):
            raise SpecError(f"sbatch option --{name} cannot be added ({reason}): leave it out")
    return name, match["value"]


NcclDebug = Literal["VERSION", "WARN", "INFO"]

STEPS_TO_LEAVE = 3
"""Steps that may pass until the trainer leaves after a signal: it is told between hosts a step
late, and a host is a step ahead of its device (trainer/pace.py). A test counts them."""

MARGIN_SECONDS = 60
"""More than steps and saves take until the end of a job; assumed."""

START_SECONDS = 120
"""From the start of a job until its ranks read the checkpoint: nodes are checked, torch is
imported, ranks are connected; assumed."""

MOST_SIGNAL_SECONDS = 65_535
"""Source: sbatch(1), --signal: sig_time must have an integer value between 0 and 65535."""

DEFAULT_RETRIES = 3
"""Starts after the first one, where a later one has something to go on from."""

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)"
    r"|(?P<only_minutes>\d+))"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserProgram:
    """A program of the user's own; it finds the plan in the variable FSDPPLAN_PLAN."""

    script: str
    """Python file that torchrun starts on each rank."""
    args: tuple[str, ...] = ()
    """Its arguments, as they are."""

    def __post_init__(self) -> None:
        if not self.script:
            raise SpecError("script is empty: give the path of a Python file, such as train.py")
        require_passable("--script", self.script)
        for word in self.args:
            require_passable("--args", word)
        require_public_words("--args", self.args)
        require_public_text("--script", self.script)

    def words(self) -> tuple[str, ...]:
        """The command line after the program."""
        return self.args


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything about a job that the plan does not say."""

    program: Trainer | UserProgram = field(default_factory=Trainer)
    """What every rank runs."""
    job_name: str = "fsdpplan"
    """What the queue shows."""
    time: str | None = None
    """Time limit as sbatch reads it: `90` (minutes), `08:00:00`, `2-12`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    """Features that the nodes must have, as sbatch reads them: `h100&ib`."""
    output: str = "fsdpplan-%j.out"
    """Log file; sbatch puts the job id in place of %j."""
    cpus_per_task: int | None = None
    """CPU cores a node; None: whole nodes on GPUs, one core a rank on CPUs."""
    signal_seconds: int | None = None
    """Seconds before the time limit at which the program gets SIGUSR1; None: what steps and saves
    of its plan take (`run/time_limit.py`) when it has a time limit and checkpoints."""
    save_seconds: int | None = None
    """Seconds that a save may take, by the plan: the job counts with it until it has measured one;
    None: nobody said."""
    exclude: tuple[str, ...] = ()
    """Lists of nodes that the job must not get, as Slurm writes them: `n03,n[17-19]`."""
    segment: bool | None = None
    """Whether nodes that NVLink joins are asked for together; None: where the plan counts on it."""
    sbatch: tuple[str, ...] = ()
    """More options for sbatch, such as `--constraint=h100`."""
    env_setup: tuple[str, ...] = ()
    """Shell lines to run first, such as `source venv/bin/activate`."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables to export."""
    python: str = "python3"
    """The Python that has torch."""
    port: int | None = None
    """Port of the rendezvous; None: derived from the job id."""
    nccl_debug: NcclDebug | None = None
    """NCCL's own log."""
    metrics: str | None = None
    """File for one JSON line a step."""
    folder: str | None = None
    """Absolute path of the job folder whose files the script calls, the trainer's among them; None:
    the script holds all but the trainer, which is installed."""
    survival: Survival = field(default_factory=Survival)
    container: Container | None = None

    def __post_init__(self) -> None:
        if self.cpus_per_task is not None:
            require_positive_int(cpus_per_task=self.cpus_per_task)
        if self.nccl_debug is not None:
            require_choice("nccl_debug", self.nccl_debug, get_args(NcclDebug))
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise SpecError(f"port must lie between 1024 and 65535, not {self.port}")
        if not self.python:
            raise SpecError("python is empty: give the name or path of a Python, such as python3")
        _require_no_expansion("output", self.output)
        for name, _ in self.env:
            if not _VARIABLE.fullmatch(name):
                raise SpecError(
                    f"{name!r} is no name of an environment variable: use letters, digits and _ "
                    "only, as in --env NCCL_DEBUG=INFO"
                )
        for name, value in self.env:
            require_public_variable(name, value)
            require_passable(f"--env {name}", value)
        for line in self.env_setup:
            require_public_text("--env-setup", line)
        require_no_tokens(self)
        for option in self.sbatch:
            name, _ = sbatch_option(option)
            if getattr(self, name, None) is not None and name in ("constraint", "reservation"):
                raise SpecError(f"--{name} is given twice, once by --sbatch: leave one out")
        for hosts in self.exclude:
            expand_host_list(hosts)
        self._check_signal()

    def _check_signal(self) -> None:
        limit = None if self.time is None else time_limit_seconds(self.time)
        if self.signal_seconds is None:
            return
        require_positive_int(signal_seconds=self.signal_seconds)
        if limit is None:
            raise SpecError("signal_seconds counts back from a time limit: give --time too")
        if self.signal_seconds > MOST_SIGNAL_SECONDS:
            raise SpecError(
                f"signal_seconds {self.signal_seconds} is more than Slurm takes: give at most "
                f"{MOST_SIGNAL_SECONDS}"
            )
        if self.signal_seconds >= limit:
            raise SpecError(
                f"signal_seconds {self.signal_seconds} is not below the time limit of "
                f"{limit} s: lower it, or raise --time"
            )


def tries_first(job: Job, *, nodes: int) -> bool:
    """Whether nodes, ranks and links are tried before training."""
    if job.survival.preflight is None:
        return nodes > 1 and isinstance(job.program, Trainer)
    return job.survival.preflight


def excluded_hosts(job: Job) -> tuple[str, ...]:
    """Names of the nodes that the job must not get, each once."""
    names = (host for hosts in job.exclude for host in expand_host_list(hosts))
    return tuple(dict.fromkeys(names))


def may_go_on(job: Job) -> bool:
    """Whether a later start may have something to go on from: a program of the user's own may save
    where nobody here knows of."""
    return not isinstance(job.program, Trainer) or saves_to(job) is not None


def later_starts(job: Job) -> int:
    """Starts after the first one, at most. Without checkpoints each begins at step 1: only who asks
    for them gets any, and spares are asked for to be used."""
    if job.survival.retries is not None:
        return job.survival.retries
    return DEFAULT_RETRIES if may_go_on(job) or job.survival.spares else 0


def requeues(job: Job) -> bool:
    """Whether Slurm may put the job back into the queue."""
    asked = job.survival.requeue
    return may_go_on(job) if asked is None else asked


def starts_again(job: Job) -> bool:
    """Whether the job may start more than once."""
    return requeues(job) or later_starts(job) > 0


def trained_words(job: Job) -> str:
    """What the job does, in words: how far, on which data, and whether that is kept."""
    if not isinstance(job.program, Trainer):
        return f"Runs: {job.program.script}"
    return f"Trains: {_training_words(job.program, job)}"


def trial_words(job: Job) -> str | None:
    """What a job of the reference trainer does that was told too little to be more than a trial;
    None where all was said."""
    if not isinstance(job.program, Trainer) or not left_out(job):
        return None
    return f"trains {_training_words(job.program, job)}"


def left_out(job: Job) -> tuple[str, ...]:
    """The options that would make a trial more than that."""
    if not isinstance(job.program, Trainer):
        return ()
    said = {
        "--steps": job.program.steps or job.program.epochs,
        "--data": job.program.sources or None,
        "--checkpoint-dir": job.program.checkpoint_dir,
    }
    return tuple(name for name, value in said.items() if value is None)


def _training_words(program: Trainer, job: Job) -> str:
    far = f"{STEPS if program.steps is None else program.steps:,} steps"
    if program.epochs is not None:
        far = f"{program.epochs:g} epoch{'' if program.epochs == 1 else 's'}"
    data = " and ".join(program.sources) or "made-up tokens"
    kept = "without checkpoints" + ("" if starts_again(job) else ", so it starts once")
    if program.checkpoint_dir is not None:
        kept = f"with checkpoints in {program.checkpoint_dir}"
    return f"{far} on {data}, {kept}"


def limit_words(job: Job, plan: Plan) -> str | None:
    """How many jobs of its time limit the steps are, and when each is told to save; None where it
    is not told. A start takes its time in each of them."""
    limit = None if job.time is None else time_limit_seconds(job.time)
    if limit is None or job.signal_seconds is None or not isinstance(job.program, Trainer):
        return None
    step, steps = plan.estimate.step_seconds.expected, said_steps(job.program, plan.training)
    if job.program.epochs is not None:
        return (
            f"each job of {format_seconds(limit)} is told to save "
            f"{format_seconds(job.signal_seconds)} before it ends"
        )
    steps = steps or STEPS
    used = max(limit - job.signal_seconds - START_SECONDS, step)
    jobs = ceil(steps * step / used)
    are = "one job" if jobs == 1 else f"about {jobs:,} jobs"
    return (
        f"{steps:,} steps are {are} of {format_seconds(limit)}, told to save "
        f"{format_seconds(job.signal_seconds)} before "
        f"{'its end' if jobs == 1 else 'each ends'}"
    )


def saves_to(job: Job) -> str | None:
    """Where the program saves checkpoints, as far as the job knows."""
    return job.program.checkpoint_dir if isinstance(job.program, Trainer) else None


def time_limit_seconds(text: str) -> int | None:
    """Seconds of a Slurm time limit; None for an unlimited one.

    Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes and days-hours:minutes:seconds; 0, -1, INFINITE and UNLIMITED for none.
    """
    if text.lower() in ("infinite", "unlimited"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise SpecError(
            f"time {text!r} is not one that sbatch reads: use minutes (90), hours:minutes:seconds "
            "(08:00:00) or days-hours (2-12)"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = 24 * part["days"] + part["day_hours"] + part["hours"]
    minutes = part["day_minutes"] + part["minutes"] + part["only_minutes"]
    seconds = 3600 * hours + 60 * minutes + part["day_seconds"] + part["seconds"]
    return seconds or None


def _require_no_expansion(name: str, path: str) -> None:
    """Refuse what a shell would have expanded: sbatch does not."""
    if "$" in path or path.startswith("~"):
        raise SpecError(
            f"{name} {path!r} would be taken literally, since #SBATCH lines expand nothing: "
            "write the path out, with %j for the job id"
        )
