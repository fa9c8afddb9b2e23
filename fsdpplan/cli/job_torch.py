"""The torch that a job of a saved plan will run, and what that says of the plan."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdpplan.cli.options import TorchOptions
from fsdpplan.cli.resolve_torch import asked_torch, found_torch
from fsdpplan.cli.resolved import Resolved
from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.spec.plan import TORCH_SOURCE, Plan
from fsdpplan.spec.torch_features import torch_need
from fsdpplan.spec.torch_release import TorchRelease, torch_release

if TYPE_CHECKING:
    from fsdpplan.emit.job import Job


def given(torch: TorchRelease | None) -> Resolved[TorchRelease] | None:
    """The release of an option, if it was given."""
    return asked_torch(TorchOptions(torch=torch))


def of_job(
    torch: TorchRelease | None, *, image: str | None, python: str | None
) -> Resolved[TorchRelease] | None:
    """The release that was given, or that of the image or Python that the job runs, where that can
    be asked from here; None where nobody knows."""
    from fsdpplan.topology.torch_found import torch_of_python

    if torch is not None or image is not None:
        options = TorchOptions(torch=torch, container=None if torch else image)
        return asked_torch(options)
    if python is None:
        return None
    try:
        return found_torch(torch_of_python(python), "the Python of the job")
    except (ProbeError, SpecError):
        return None  # it may be another one on the nodes, whose check says so


def python_here(job: Job) -> str | None:
    """The Python of the job, if this host has it: not one of a container, nor one that lines which
    set up the environment will put on PATH."""
    return None if job.container or job.env_setup else shutil.which(job.python)


def settled(
    plan: Plan, torch: Resolved[TorchRelease] | None, *, own_program: bool
) -> Resolved[Plan]:
    """`plan` for the release that its job will run, with what to say of that. Raises SpecError
    where its layout cannot be trained under it; a program of the user's own may know a way."""
    if torch is None:
        return Resolved(value=plan)
    release, source = torch.value, dict(torch.sources)[TORCH_SOURCE]
    if not own_program:
        _require_enough(plan, release, source)
    said = list(torch.warnings)
    if plan.known_torch not in (None, release):
        said.append(
            f"the plan is for torch {plan.training.torch} ({plan.torch_source}), and the job runs "
            f"{release} ({source}): fsdpplan recommend --torch {release} searches what that one has"
        )
    sources = {**dict(plan.sources), TORCH_SOURCE: source}
    training = replace(plan.training, torch=str(release))
    return Resolved(
        value=replace(plan, training=training, sources=tuple(sources.items())),
        warnings=tuple(said),
    )


def _require_enough(plan: Plan, release: TorchRelease, source: str) -> None:
    need = torch_need(plan.case)
    if release < need.oldest:
        raise SpecError(
            f"the plan's layout needs torch {need.oldest} or newer, for {need.because}, and the "
            f"job runs {release} ({source}): plan again with fsdpplan recommend --torch {release}, "
            "or name another environment by --python, --container or --torch"
        )


def other_torch(plan: Plan, ran: str | None) -> str:
    """What to say of a run under another release than the plan's; empty: nothing."""
    planned = plan.training.torch
    if ran is None or planned in (None, str(torch_release(ran))):
        return ""
    return (
        f"It ran under torch {ran}, and the plan is for {planned}: what it measured is of the one, "
        "what was searched and rehearsed of the other."
    )
