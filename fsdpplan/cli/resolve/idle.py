"""The machines that Slurm has idle, as the options that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpplan.cli.options.question import ClusterOptions
from fsdpplan.cli.options.scaling import SlurmOptions
from fsdpplan.cli.resolve.cluster import node_gpus
from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.search import profiles_of_gres
from fsdpplan.run.engines.slurm_idle import Idle, idle_nodes
from fsdpplan.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMachines:
    """What is idle, and the options that ask for it."""

    idle: Idle
    cluster: ClusterOptions
    assumptions: tuple[str, ...]


def idle_machines(options: SlurmOptions, cluster: ClusterOptions) -> IdleMachines:
    """The options of the nodes that are idle now, and at most `--gpus` of them."""
    idle = idle_nodes(options.partition)
    if cluster.gpus_per_node is not None and cluster.gpus_per_node > idle.gpus_per_node:
        raise SpecError(
            f"--gpus-per-node {cluster.gpus_per_node} is more than the {idle.gpus_per_node} of "
            f"each idle node of partition {idle.partition.name}: use that or less"
        )
    per_node = cluster.gpus_per_node or idle.gpus_per_node
    most = idle.nodes * per_node
    if cluster.gpus is not None and cluster.gpus > most:
        raise SpecError(
            f"--gpus {cluster.gpus} is more than a job can have now in partition "
            f"{idle.partition.name}, {most} on {_nodes(idle.nodes)}: leave it out, or use "
            f"--gpus {most} or less"
        )
    gpus, hardware = cluster.gpus or most, cluster.hardware
    said = [_what(idle, most)]
    if hardware is None:
        hardware = _hardware(idle)
        said.append(
            f"the hardware is profile {hardware}, by Slurm's type {idle.gpu_type} and "
            f"{idle.gpus_per_node} GPUs a node: of its network Slurm says nothing (--hardware, "
            "--inter-bw)"
        )
    named = replace(cluster, hardware=hardware, gpus=gpus)
    if cluster.gpus_per_node is None and node_gpus(named) != idle.gpus_per_node:
        named = replace(named, gpus_per_node=min(per_node, gpus))
    return IdleMachines(idle=idle, cluster=named, assumptions=tuple(said))


def _what(idle: Idle, most: int) -> str:
    partition = idle.partition
    limits = []
    if partition.max_nodes is not None:
        limits.append(_nodes(partition.max_nodes))
    if partition.max_seconds is not None:
        limits.append(format_seconds(partition.max_seconds))
    at_most = f", at most {' and '.join(limits)} a job" if limits else ""
    waiting = ""
    if idle.waiting:
        jobs = "job waits" if idle.waiting == 1 else "jobs wait"
        waiting = f"; {idle.waiting} {jobs} there, and may come first"
    return (
        f"{most} GPUs, what partition {partition.name} has idle now: {_nodes(idle.idle_nodes)} of "
        f"{idle.gpus_per_node}{at_most}{waiting} (emit-launch --partition {partition.name})"
    )


def _nodes(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"


def _hardware(idle: Idle) -> str:
    """The profile of the idle nodes. Raises SpecError where GRES leaves it open."""
    if idle.gpu_type is None:
        raise SpecError(
            f"Slurm does not say of which type the GPUs of partition {idle.partition.name} are: "
            "name the machines by --hardware"
        )
    by_device = profiles_of_gres(idle.gpu_type, gpus_per_node=idle.gpus_per_node)
    if len(by_device) == 1:
        return next(iter(by_device.values()))[0]
    if not by_device:
        raise SpecError(
            f"no hardware profile has {idle.gpus_per_node} GPUs a node, or more, that are called "
            f"{idle.gpu_type}, as Slurm does: name the machines by --hardware"
        )
    nodes = [names[0] for names in by_device.values()]
    raise SpecError(
        f"Slurm's type {idle.gpu_type} may be {_or(list(by_device))}: name the machines by "
        f"--hardware, such as {_or(nodes)}"
    )


def _or(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def with_idle(inputs: Inputs, machines: IdleMachines) -> Inputs:
    """`inputs` of machines that Slurm named."""
    source = ("cluster", f"Slurm: idle in partition {machines.idle.partition.name}")
    others = tuple(pair for pair in inputs.sources if pair[0] != "cluster")
    return replace(
        inputs,
        sources=(source, *others),
        assumptions=(*machines.assumptions, *inputs.assumptions),
    )


def time_warning(machines: IdleMachines, seconds: float | None) -> tuple[str, ...]:
    """Of a training that no one job of the partition may finish."""
    limit = machines.idle.partition.max_seconds
    if limit is None or seconds is None or seconds <= limit:
        return ()
    return (
        f"the training takes {format_seconds(seconds)}, and partition "
        f"{machines.idle.partition.name} ends a job after {format_seconds(limit)}: "
        f"{-(-seconds // limit):.0f} jobs one after another, from checkpoint to checkpoint "
        "(emit-launch --checkpoint-dir)",
    )
