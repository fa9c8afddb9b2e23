"""All that a script or manifest is rendered from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fsdpplan.emit.job import Job
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.trainer_program import Trainer, require_meaning
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan, and how it is to be launched."""

    plan: Plan
    plan_json: str
    """The plan as JSON text, which travels with the job."""
    job: Job
    version: str
    """fsdpplan that renders it."""
    pods: Pods = field(default_factory=Pods)

    def __post_init__(self) -> None:
        if isinstance(self.job.program, Trainer):
            require_meaning(self.job.program, self.plan.training, self.plan.model)


def differing(value: Any, default: Any) -> tuple[str, ...]:
    """Names of the fields in which a dataclass differs from its default."""
    names = (field.name for field in fields(value))
    return tuple(name for name in names if getattr(value, name) != getattr(default, name))


def refuse_others(order: Order, *, target: str, job: frozenset[str], pods: frozenset[str]) -> None:
    """Raise SpecError for a field of the job or of its pods that is set and that `target` has no
    word for: nothing that was asked for is dropped. `job` and `pods` are those it has."""
    asked = [name for name in differing(order.job, Job()) if name not in job]
    asked += [name for name in differing(order.pods, Pods()) if name not in pods]
    if asked:
        flags = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise SpecError(
            f"{flags} {'has' if len(asked) == 1 else 'have'} no meaning for --target {target}: "
            f"leave {'it' if len(asked) == 1 else 'them'} out"
        )
