"""Which machines: named, found on this machine, or the default profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdpplan.cli.options.question import ClusterOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.errors import ProbeError, ProfileNotFound, SpecError
from fsdpplan.files.clusters import Flags, LoadedCluster, load_cluster
from fsdpplan.files.profiles.catalogue import usual_node
from fsdpplan.spec.cluster import Cluster
from fsdpplan.topology import probe
from fsdpplan.units import format_bandwidth

DEFAULT_HARDWARE = "dgx-h100"
BY_DEFAULT = "default: "
"""Begins the source of a cluster that nobody named; what follows says why."""

FOUND_HERE = "found on this machine"
"""Begins the source of a cluster that nobody named."""


def why_default(sources: Sequence[tuple[str, str]]) -> str | None:
    """Why the default profile was taken; None where the machines were named or found."""
    source = dict(sources).get("cluster", "")
    return source.removeprefix(BY_DEFAULT) if source.startswith(BY_DEFAULT) else None


def resolve_cluster(options: ClusterOptions) -> Resolved[LoadedCluster]:
    """The cluster that the options ask for."""
    if options.hardware is not None:
        source = ("cluster", "flag --hardware")
        return _loaded(options, options.hardware, Resolved(value=None, sources=(source,)))
    if options.gpu is not None:
        raise SpecError(
            f"--gpu {options.gpu} changes the device of a profile: name that too, such as "
            f"--hardware {_machine_with(options.gpu)}"
        )
    return _detected(options) or _loaded(options, DEFAULT_HARDWARE, _default(options))


def _machine_with(gpu: str) -> str:
    """The words for a machine with GPUs of that name: one that has them, or others changed."""
    from fsdpplan.files.profiles.catalogue import load_device, load_node, profile_names

    names = [name for name in profile_names("device") if name.startswith(gpu)]
    if len(names) == 1:
        nodes = [name for name in profile_names("node") if load_node(name).device == names[0]]
        own = [name for name in nodes if name.startswith("dgx-")] or nodes
        if own:
            return max(own, key=lambda name: load_node(name).gpus_per_node or 0)
        gpu = names[0]
    else:
        load_device(gpu)  # says which there are
    return f"{DEFAULT_HARDWARE} --gpu {gpu}"


def larger_clusters(options: ClusterOptions) -> Callable[[int], Cluster] | None:
    """The machines of a named or default profile with other numbers of GPUs, under the same flags;
    None for the machines that were found here."""
    if options.hardware is None and probe.visible_gpus():
        return None

    def larger(gpus: int) -> Cluster:
        asked = replace(options, gpus=gpus, hardware=options.hardware or DEFAULT_HARDWARE)
        return resolve_cluster(asked).value.cluster

    return larger


def node_gpus(options: ClusterOptions) -> int | None:
    """GPUs of a node, as the profile has them or the flags use them; None: it may have any number,
    as a machine of CPU processes."""
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    hardware = options.hardware or DEFAULT_HARDWARE
    try:
        return load_cluster(hardware).cluster.gpus_per_node
    except ProfileNotFound:
        raise
    except SpecError:
        return None


def _loaded(
    options: ClusterOptions, hardware: str, said: Resolved[None]
) -> Resolved[LoadedCluster]:
    """The cluster of a profile, under what is `said` of the choice."""
    loaded = load_cluster(
        hardware,
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        domain_gpus=options.domain_gpus,
        device=options.gpu,
        intra_bandwidth_bytes_per_second=options.intra_bw,
        inter_bandwidth_bytes_per_second=options.inter_bw,
        host_memory_bytes=options.host_memory,
    )
    count = f"{loaded.cluster.gpus} GPUs, as the profile {hardware} has (--gpus)"
    cluster = loaded.cluster
    taken = [] if options.gpus else [count]
    if (usual := usual_node(hardware)) is not None:
        taken.insert(0, f"{hardware} is {usual}, its usual node (fsdpplan profiles {hardware})")
    if options.gpus_per_node is None and loaded.leaves_idle:
        taken.append(
            f"{cluster.gpus_per_node} GPUs on each of {cluster.nodes} nodes, since {cluster.gpus} "
            "do not fill whole ones (--gpus-per-node)"
        )
    return Resolved(
        value=loaded,
        sources=(*said.sources, *loaded.sources),
        assumptions=(*said.assumptions, *taken, *_domains_taken(options, cluster)),
        warnings=loaded.warnings,
    )


def _detected(options: ClusterOptions) -> Resolved[LoadedCluster] | None:
    """The machine that this is, or None where it has no GPU of NVIDIA."""
    if not probe.visible_gpus():
        return None
    from fsdpplan.run import detect

    survey = detect.survey_of_recordings([detect.this_host()])
    nodes, here = detect.allocated_nodes(survey), survey.machines[survey.typical].gpus
    flags = Flags(
        gpus=options.gpus or nodes * len(here),
        gpus_per_node=options.gpus_per_node,
        domain_gpus=options.domain_gpus,
        intra_bandwidth_bytes_per_second=options.intra_bw,
        inter_bandwidth_bytes_per_second=options.inter_bw,
        host_memory_bytes=options.host_memory,
    )
    loaded = detect.found_cluster(survey, flags)
    found = f"{len(here)} x {here[0].name}"
    count = f"{loaded.cluster.gpus} GPUs: {_how_many(nodes, len(here))} (--gpus)"
    said = f"the hardware is what was found here: {found} ({_links(loaded)}) (--hardware)"
    return Resolved(
        value=loaded,
        sources=(("cluster", f"{FOUND_HERE}: {found}"), *loaded.sources),
        assumptions=(
            said,
            *([] if options.gpus else [count]),
            *_domains_taken(options, loaded.cluster),
        ),
        warnings=loaded.warnings,
    )


def _domains_taken(options: ClusterOptions, cluster: Cluster) -> tuple[str, ...]:
    """How much of each domain of NVLink is used, where nobody said so."""
    domain = cluster.nvlink_domain
    if domain is None or options.domain_gpus is not None or domain.domain_gpus >= cluster.gpus:
        return ()
    used, nodes = domain.domain_gpus, cluster.segment_nodes
    if nodes is None:
        more = -(-cluster.gpus // used) * used
        return (
            f"NVLink domains of {used} GPUs are filled one after another, since "
            f"{cluster.gpus:,} do not fill them evenly: groups of ranks cross them (--domain-gpus; "
            f"--gpus {more} would)",
        )
    share = f"{used} of the {domain.whole_gpus}" if domain.whole_gpus else f"all {used}"
    return (
        f"{share} GPUs of each of {cluster.gpus // used} NVLink domains, {nodes} nodes of each "
        "(--domain-gpus)",
    )


def _how_many(nodes: int, per_node: int) -> str:
    if nodes == 1:
        return "those of this machine"
    return f"{per_node} on each of the {nodes} nodes of this allocation"


def _links(loaded: LoadedCluster) -> str:
    return ", ".join(
        f"{level.name} {level.ports} x {format_bandwidth(level.port_bandwidth_bytes_per_second)}"
        for level in loaded.cluster.levels
        if level.name != "none"
    )


def _other_accelerators() -> str:
    """Those that are not NVIDIA's, in words; empty where there are none."""
    if not probe.may_have_other_accelerators():
        return ""
    from fsdpplan.run.detect import other_accelerators_here

    return " and ".join(other_accelerators_here())


def _default(options: ClusterOptions) -> Resolved[None]:
    """The default profile. Raises SpecError where not even a number of GPUs is given, and
    ProbeError where there are accelerators, but none that could be planned for."""
    others = _other_accelerators()
    if options.gpus is None and others:
        raise ProbeError(
            f"this machine has {others}, which fsdpplan cannot plan for as found: name declared "
            "hardware with --hardware (`fsdpplan profiles` lists it)"
        )
    if options.gpus is None:
        raise SpecError(
            "no GPU was found here: say how many to plan for, such as --gpus 64, and which, "
            f"such as --hardware {DEFAULT_HARDWARE}"
        )
    why = f"{others} here cannot be planned for as found" if others else "no GPU was found here"
    return Resolved(
        value=None,
        sources=(("cluster", f"{BY_DEFAULT}{why}"),),
        assumptions=(f"hardware {DEFAULT_HARDWARE}, as {why} (--hardware)",),
    )
