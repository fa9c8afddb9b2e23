"""What Slurm has idle now, within the limits of a partition.

Source: scontrol(1), `show node` and `show partition`; slurm.conf(5), `Gres` and node states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.topology.probe import run_command

ANSWER_SECONDS = 20.0
"""A busy controller takes seconds; a login node waits no longer for one that is down."""

_KEYS = ("NodeName", "State", "Partitions", "Gres", "PartitionName", "Default", "MaxNodes")
_FIELD = re.compile(rf"(?:^|\s)({'|'.join((*_KEYS, 'MaxTime'))})=(\S*)")
_GPU = re.compile(r"gpu(?::(?P<type>[^:,()]+))??:(?P<count>[0-9]+)(?:\([^)]*\))?")
_TIME = re.compile(
    r"(?:(?P<days>[0-9]+)-)?(?P<hours>[0-9]+):(?P<minutes>[0-9]+):(?P<seconds>[0-9]+)"
)

TAKES_JOBS = frozenset({"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
"""Flags beside IDLE with which a job starts at once. Not so those that are drained, planned for
another job, reserved, powered down, or do not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition and its limits of a job."""

    name: str
    is_default: bool
    is_up: bool
    max_nodes: int | None
    """None: no limit."""
    max_seconds: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, as far as a plan needs to know."""

    name: str
    partitions: tuple[str, ...]
    is_idle: bool
    """A job would start there at once."""
    gpu_type: str | None
    """As GRES calls it; None: it has no type, or there are none."""
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Nodes of one kind that are idle in a partition."""

    partition: Partition
    nodes: int
    """As many as a job may have."""
    idle_nodes: int
    """That are idle, of this kind."""
    gpu_type: str | None
    gpus_per_node: int
    waiting: int
    """Jobs that wait in the partition: what is idle may be theirs."""


def idle_nodes(partition: str | None) -> Idle:
    """What is idle in a partition, or in the default one. Raises ProbeError where no Slurm answers,
    SpecError where there is no such partition or nothing idle in it."""
    partitions = parse_partitions(_said("scontrol", "show", "partition", "--oneliner"))
    chosen = _chosen(partitions, partition)
    nodes = parse_nodes(_said("scontrol", "show", "node", "--oneliner"))
    queue = ("squeue", "--noheader", "--states=PENDING", f"--partition={chosen.name}")
    waiting = _said(*queue, "--format=%i").split()
    return usable(chosen, nodes, waiting=len(waiting))


def usable(partition: Partition, nodes: list[Node], *, waiting: int) -> Idle:
    """Of the kinds of idle nodes with GPUs, that of which a job gets most GPUs."""
    if not partition.is_up:
        raise SpecError(
            f"partition {partition.name} takes no jobs now: name another one with --partition"
        )
    own = [node for node in nodes if partition.name in node.partitions and node.gpus]
    kinds: dict[tuple[str | None, int], int] = {}
    for node in own:
        if node.is_idle:
            kind = node.gpu_type, node.gpus
            kinds[kind] = kinds.get(kind, 0) + 1
    if not own:
        raise SpecError(
            f"no node of partition {partition.name} has GPUs that Slurm knows of (Gres): name "
            "another --partition, or the machines by --hardware and --gpus"
        )
    if not kinds:
        raise SpecError(
            f"none of the {len(own)} nodes with GPUs of partition {partition.name} is idle, and "
            f"{waiting} jobs wait there: name another --partition, or plan for what you will get "
            "by --hardware and --gpus"
        )
    limit = partition.max_nodes

    def of_job(number: int) -> int:
        return number if limit is None else min(number, limit)

    (gpu_type, gpus), number = max(
        kinds.items(), key=lambda one: (of_job(one[1]) * one[0][1], one[0][1], one[0][0] or "")
    )
    return Idle(
        partition=partition,
        nodes=of_job(number),
        idle_nodes=number,
        gpu_type=gpu_type,
        gpus_per_node=gpus,
        waiting=waiting,
    )


def _chosen(partitions: list[Partition], name: str | None) -> Partition:
    names = ", ".join(one.name for one in partitions) or "none"
    for one in partitions:
        if one.name == name or (name is None and one.is_default):
            return one
    if name is None:
        raise SpecError(f"this Slurm has no default partition: name one with --partition: {names}")
    raise SpecError(f"Slurm has no partition {name}: name one of {names} with --partition")


def _said(*command: str) -> str:
    try:
        return run_command(command, timeout_seconds=ANSWER_SECONDS)
    except ProbeError as error:
        raise ProbeError(
            f"--from-slurm: no Slurm answers here ({error}): go to a login node of it, or name the "
            "machines by --hardware and --gpus"
        ) from error


def _lines(text: str, key: str) -> Iterator[dict[str, str]]:
    """The fields of each line; of a key that comes twice the first, since free text stands last."""
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(line):
            fields.setdefault(name, value)
        if key in fields:
            yield fields


def parse_nodes(text: str) -> list[Node]:
    """What `scontrol show node --oneliner` prints."""
    found = []
    for fields in _lines(text, "NodeName"):
        state, *flags = fields.get("State", "").split("+")
        gpu_type, gpus = _gpus(fields.get("Gres", ""))
        found.append(
            Node(
                name=fields["NodeName"],
                partitions=tuple(fields.get("Partitions", "").split(",")),
                is_idle=state == "IDLE" and TAKES_JOBS.issuperset(flags),
                gpu_type=gpu_type,
                gpus=gpus,
            )
        )
    return found


def _gpus(gres: str) -> tuple[str | None, int]:
    """Type and number of the GPUs in `gpu:h100:8(S:0-1),nvme:1`; of several types the most."""
    found = [
        (each["type"], int(each["count"])) for each in map(_GPU.fullmatch, _split(gres)) if each
    ]
    return max(found, key=lambda one: one[1], default=(None, 0))


def _split(gres: str) -> list[str]:
    """At commas that stand in no parentheses."""
    return re.split(r",(?![^(]*\))", gres)


def parse_partitions(text: str) -> list[Partition]:
    """What `scontrol show partition --oneliner` prints."""
    return [
        Partition(
            name=fields["PartitionName"],
            is_default=fields.get("Default") == "YES",
            is_up=fields.get("State", "UP") == "UP",
            max_nodes=int(fields["MaxNodes"]) if fields.get("MaxNodes", "").isdigit() else None,
            max_seconds=_seconds(fields.get("MaxTime", "")),
        )
        for fields in _lines(text, "PartitionName")
    ]


def _seconds(text: str) -> int | None:
    """`1-12:00:00`; None for UNLIMITED."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(one or 0) for one in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
