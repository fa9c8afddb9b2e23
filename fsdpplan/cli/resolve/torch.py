"""Which release of PyTorch the job will run: given, asked of where it runs, or assumed."""

from __future__ import annotations

from fsdpplan.cli.options.question import TorchOptions
from fsdpplan.cli.resolve.resolved import Resolved
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import DEFAULT_SOURCE, TORCH_SOURCE
from fsdpplan.spec.torch_release import NEWEST_TESTED, OLDEST, TorchRelease, require_supported


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
    from fsdpplan.emit.secrets import require_no_token
    from fsdpplan.topology.torch_found import torch_of_image, torch_of_python

    named = [
        flag for flag in ("torch", "python", "container") if getattr(options, flag) is not None
    ]
    if len(named) > 1:
        raise SpecError(
            f"{' and '.join('--' + flag for flag in named)} each say which torch will run: give "
            "one of them"
        )
    if options.torch is not None:
        return found_torch(options.torch, "flag --torch")
    if options.python is not None:
        return found_torch(torch_of_python(options.python), f"asked {options.python}")
    if options.container is None:
        return None
    require_no_token("--container", options.container)  # plans are shown and passed on
    release = torch_of_image(options.container)
    return None if release is None else found_torch(release, f"image {options.container}")


def found_torch(release: TorchRelease, source: str) -> Resolved[TorchRelease]:
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
    from fsdpplan.topology.torch_found import installed_torch

    found = installed_torch()
    release = NEWEST_TESTED if found is None else max(found, OLDEST)
    which = "the one installed here" if release == found else "as none is installed here"
    if found is not None and found < OLDEST:
        which = f"the oldest that the trainer runs under: {found} is installed here"
    return Resolved(
        value=release,
        sources=((TORCH_SOURCE, DEFAULT_SOURCE),),
        assumptions=(f"torch {release}, {', '.join(filter(None, (which, why)))} (--torch)",),
    )
