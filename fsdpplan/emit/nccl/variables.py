"""The environment of a job as bash: set-up lines, variables as given, and those with a reason."""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.environment import environment
from fsdpplan.emit.nccl.rules import Variable
from fsdpplan.emit.safe_text import paragraph, shell_word
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan


def require_debug_meaning(*, plan: Plan, job: Job) -> None:
    """Refuse NCCL's log where no NCCL runs."""
    if job.nccl_debug is not None and plan.cluster.device.kind == "cpu":
        raise SpecError("nccl_debug has no meaning here: CPU processes talk by gloo; leave it out")


def set_up_lines(job: Job) -> list[str]:
    """What was given to be run first."""
    if not job.env_setup:
        return []
    return [
        "# Set-up lines, as given; such scripts seldom bear unset variables.",
        "set +u",
        *(f"eval {shell_word(line)}" for line in job.env_setup),
        "set -u",
    ]


def given_lines(job: Job) -> list[str]:
    """Variables as they were given."""
    return [f"export {name}={shell_word(value)}" for name, value in job.env]


def reasoned_lines(*, plan: Plan, job: Job) -> list[str]:
    """NCCL's and PyTorch's variables that are the same on all nodes, each with why it is there."""
    lines = []
    for variable in environment(plan=plan, job=job):
        if not variable.on_node:
            reason = f"{variable.name}: {variable.reason} ({variable.versions}; {variable.source})."
            lines += [*paragraph(reason), _export_line(variable)]
    return lines


def _export_line(variable: Variable) -> str:
    """An assignment that gives way to what the user has exported."""
    if variable.expands:
        return f'export {variable.name}="${{{variable.name}:-{variable.value}}}"'
    return f"export {variable.name}=${{{variable.name}:-{shell_word(variable.value)}}}"
