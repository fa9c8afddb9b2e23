"""Which machines: named, found on this machine, or the default profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpplan.cli.options import ClusterOptions
from fsdpplan.cli.resolved import Resolved
from fsdpplan.errors import SpecError

if TYPE_CHECKING:
    from fsdpplan.files.clusters import LoadedCluster

DEFAULT_HARDWARE = "dgx-h100"


def resolve_cluster(options: ClusterOptions) -> Resolved[LoadedCluster]:
    """The cluster that the options ask for."""
    from fsdpplan.files.clusters import load_cluster

    hardware = _hardware(options)
    loaded = load_cluster(
        hardware.value,
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        device=options.gpu,
        intra_bandwidth_bytes_per_second=options.intra_bw,
        inter_bandwidth_bytes_per_second=options.inter_bw,
    )
    count = f"{loaded.cluster.gpus} GPUs, as the profile {hardware.value} has (--gpus)"
    return Resolved(
        value=loaded,
        sources=(*hardware.sources, *loaded.sources),
        assumptions=(*hardware.assumptions, *([] if options.gpus else [count])),
        warnings=loaded.warnings,
    )


def _hardware(options: ClusterOptions) -> Resolved[str]:
    """Name or path of the profile."""
    if options.hardware is not None:
        return Resolved(value=options.hardware, sources=(("cluster", "flag --hardware"),))
    if options.gpu is not None:
        raise SpecError(
            f"--gpu {options.gpu} changes the device of a profile: name that too, such as "
            f"--hardware {DEFAULT_HARDWARE} --gpu {options.gpu}"
        )
    return _detected() or _default(options)


def _detected() -> Resolved[str] | None:
    """The profile of the GPUs of this machine, or None where there are none."""
    from fsdpplan.topology.probe import visible_gpus

    names = [gpu.name for gpu in visible_gpus()]
    if not names:
        return None
    from fsdpplan.files.profiles import profile_for_gpus

    profile = profile_for_gpus(names)
    found = f"{len(names)} x {names[0]}"
    if profile is None:
        raise SpecError(
            f"no profile has the GPUs of this machine ({found}): name one with --hardware, "
            "a name of `fsdpplan profiles` or a file of your own"
        )
    return Resolved(
        value=profile,
        sources=(("cluster", f"found on this machine: {found}"),),
        assumptions=(f"nodes of profile {profile}, for {found} found here (--hardware)",),
    )


def _default(options: ClusterOptions) -> Resolved[str]:
    if options.gpus is None:
        raise SpecError(
            "no GPU was found here: say how many to plan for, such as --gpus 64, and which, "
            f"such as --hardware {DEFAULT_HARDWARE}"
        )
    return Resolved(
        value=DEFAULT_HARDWARE,
        sources=(("cluster", "default: no GPU found here"),),
        assumptions=(
            f"no GPU was found here, so the hardware is profile {DEFAULT_HARDWARE} (--hardware)",
        ),
    )
