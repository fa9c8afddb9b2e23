"""Which release of PyTorch a job will run, and what that says of its plan."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cli.options.question import TorchOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.emit.safe_text import require_no_token
from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.spec.plan import DEFAULT_SOURCE, TORCH_SOURCE, Plan
from fsdpplan.spec.torch_features import torch_need
from fsdpplan.spec.training import (
    NEWEST_TESTED,
    OLDEST,
    TorchRelease,
    require_supported,
    torch_release,
)
from fsdpplan.topology import probe


def resolve_torch(options: TorchOptions) -> Resolved[TorchRelease]:
    """The release that the options name, or that of the torch beside this program."""
    found = asked_torch(options)
    if found is not None:
        return found
    if options.container is not None:
        return _assumed(f"since nothing is known of {options.container}")
    return _assumed("")


def asked_torch(options: TorchOptions) -> Resolved[TorchRelease] | None:
    """The release that was given, or that of the Python or image that was named; None where none
    was, or the image is not known."""
    named = [
        flag for flag in ("torch", "python", "container") if getattr(options, flag) is not None
    ]
    if len(named) > 1:
        raise SpecError(
            f"{' and '.join('--' + flag for flag in named)} each say which torch will run: give "
            "one of them"
        )
    if options.torch is not None:
        return supported(options.torch, "flag --torch")
    if options.python is not None:
        return supported(probe.torch_of_python(options.python), f"asked {options.python}")
    if options.container is None:
        return None
    require_no_token("--container", options.container)  # plans are shown and passed on
    release = probe.torch_of_image(options.container)
    return None if release is None else supported(release, f"image {options.container}")


def supported(release: TorchRelease, source: str) -> Resolved[TorchRelease]:
    """`release`, refused where the trainer does not run under it."""
    require_supported(release)
    new = (
        f"torch {release} ({source}) is newer than {NEWEST_TESTED}, the newest that fsdpplan was "
        "tested with: fsdpplan rehearse tries the plan under it",
    )
    return Resolved(
        value=release,
        sources=((TORCH_SOURCE, source),),
        warnings=new if release > NEWEST_TESTED else (),
    )


def _assumed(why: str) -> Resolved[TorchRelease]:
    found, release = probe.installed_torch(), probe.default_torch()
    which = "installed here" if release == found else "as none is installed here"
    if found is not None and found < OLDEST:
        which = f"the oldest that the trainer runs under: {found} is installed here"
    return Resolved(
        value=release,
        sources=((TORCH_SOURCE, DEFAULT_SOURCE),),
        assumptions=(f"torch {release}, {', '.join(filter(None, (which, why)))} (--torch)",),
    )


def given_torch(torch: TorchRelease | None) -> Resolved[TorchRelease] | None:
    """The release of an option, if it was given."""
    return asked_torch(TorchOptions(torch=torch))


def torch_of_job(
    torch: TorchRelease | None, *, image: str | None, python: str | None
) -> Resolved[TorchRelease] | None:
    """The release that was given, or that of the image or Python that the job runs, where that can
    be asked from here; None where nobody knows."""
    if torch is not None or image is not None:
        options = TorchOptions(torch=torch, container=None if torch else image)
        return asked_torch(options)
    if python is None:
        return None
    try:
        return supported(probe.torch_of_python(python), "the Python of the job")
    except (ProbeError, SpecError):
        return None  # it may be another one on the nodes, whose check says so


def settled_plan(
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
