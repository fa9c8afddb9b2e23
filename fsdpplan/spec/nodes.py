"""Nodes: many names in one word, as Slurm writes them (`n[01-04,7],m3`), and what a launch must
know of the nodes' network; found on them, or said in a profile.

Everything of a network that is unknown stays None, and nothing is set for it.

Source: Flux RFC 29, "Hostlist Format" (leading zeros), and Slurm::Hostlist(3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.values import require_choice

PciPath = Literal["pix", "pxb", "phb", "node", "sys"]
"""Way between two PCIe devices as NCCL and `nvidia-smi topo` name it, nearest first: one switch,
several switches, one host bridge, one NUMA node, the link between sockets."""
GpuDirect = Literal["peermem", "dmabuf", "none"]
"""How adapters may read device memory: the nvidia-peermem module, the kernel's DMA-BUF with the
open driver, or not at all."""
Transport = Literal["infiniband", "roce", "efa", "tcpx", "tcpxo", "gib", "ethernet"]
"""What carries data between nodes: verbs over InfiniBand or RoCE, AWS's EFA, Google's GPUDirect
stacks (TCPX of a3-high, TCPXO of a3-mega, gIB of a3-ultra and later), or plain sockets."""
VERBS: tuple[Transport, ...] = ("infiniband", "roce")
"""What NCCL's own transport drives; the others bring a plugin or are sockets."""
Provider = Literal["aws", "gcp", "azure", "oci", "coreweave", "lambda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes, the same on all of them unless a field says otherwise."""

    transport: Transport
    """What carries data between nodes."""
    evidence: str
    """Who says so: `found on n01 by fsdpplan detect, 2026-11-22`, or the profile's source."""
    hcas: tuple[str, ...] = ()
    """Adapter ports of the compute fabric, such as `mlx5_0` or `mlx5_0:1`; empty: unknown, or all
    adapters belong to it."""
    hcas_left_out: tuple[str, ...] = ()
    """Adapters that do not belong to it: storage, management, another link layer, or down."""
    hcas_differ: bool = False
    """Nodes name their adapters differently, so that one list cannot serve all."""
    gid_index: int | None = None
    """Of RoCE: the entry with RoCE v2 and an IPv4 address, on all ports and nodes."""
    traffic_class: int | None = None
    """Of RoCE: what the operator of the fabric says; it cannot be read off a node."""
    socket_interface: str | None = None
    """The interface that routes between the nodes, on all of them."""
    socket_interfaces_left_out: tuple[str, ...] = ()
    """Interfaces that are up but do not lead to other nodes (docker0, virbr0, another subnet)."""
    gpudirect: GpuDirect | None = None
    """How adapters may read device memory, as far as that was found. Whether they do, as it is
    priced and launched, the levels of the cluster say (`Cluster.gpudirect`)."""
    gpudirect_path: PciPath | None = None
    """Farthest way between a GPU and the port that serves it."""
    rails: int | None = None
    """Ports of a node that lead to switches of their own (rail-optimised); None: unknown."""
    nvlink_switch: bool | None = None
    """The GPUs of a node hang on switches that can reduce (NVLS: H100 and later)."""
    provider: Provider | None = None
    """The cloud, by evidence."""
    instance_type: str | None = None
    """The cloud's name of the machine, such as `p5.48xlarge`."""
    net_plugins: tuple[str, ...] = ()
    """Files of NCCL network plugins on the nodes."""
    env_profiles: tuple[str, ...] = ()
    """Scripts of the cloud that set NCCL's variables."""
    nccl_version: str | None = None
    """NCCL of the nodes' torch, such as `2.27.3`."""

    def __post_init__(self) -> None:
        require_choice("transport", self.transport, get_args(Transport))
        names = (
            *self.hcas,
            *self.hcas_left_out,
            *self.socket_interfaces_left_out,
            *([] if self.socket_interface is None else [self.socket_interface]),
        )
        for name in names:
            if not name or not name.isascii() or set(name) & set(" ,=^\"'\\$`;\n\t"):
                raise SpecError(
                    f"{name!r} is no name of an adapter or interface: write one such as mlx5_0"
                )
        for path in (*self.net_plugins, *self.env_profiles):
            if not path.startswith("/") or not path.isprintable():
                raise SpecError(
                    f"{path!r} is no absolute path of a file on the nodes: write it from / on"
                )
        if self.gid_index is not None and not 0 <= self.gid_index < 256:
            raise SpecError(f"gid_index must lie in [0, 256), not {self.gid_index}")
        if self.traffic_class is not None and not 0 <= self.traffic_class < 256:
            raise SpecError(f"traffic_class must lie in [0, 256), not {self.traffic_class}")


MAX_NODES = 65536
"""More than any machine has: a longer list is a slip."""

_NUMBERS = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_PART = re.compile(rf"(?!-)(?:[A-Za-z0-9_.-]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+(?:,|$)")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand_host_list(text: str) -> tuple[str, ...]:
    """The names in `text`, in its order, each once. Raises SpecError where it is no host list.

    Numbers keep the width of a range's first: `n[08-10]` is n08, n09, n10.
    """
    names: dict[str, None] = {}
    for part in _parts(text):
        pieces = [_choices(text, match) for match in _PIECE.finditer(part)]
        count = 1
        for choices in pieces:
            count *= len(choices)
        if count + len(names) > MAX_NODES:
            raise _wrong(text, f"it names more than {MAX_NODES} nodes")
        names |= dict.fromkeys("".join(chosen) for chosen in product(*pieces))
    return tuple(names)


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas that are not in brackets."""
    left, end = text.strip(), 0
    while True:
        match = _PART.match(left, end)
        if match is None:
            raise _wrong(text, f"{left[end : end + 40]!r} is no name of a node")
        yield match[0].removesuffix(",")
        end = match.end()
        if not match[0].endswith(","):
            return


def _choices(text: str, piece: re.Match[str]) -> list[str]:
    """What one bracket or one plain piece of a name may be."""
    if piece[2] is not None:
        return [piece[2]]
    choices: list[str] = []
    for numbers in piece[1].split(","):
        low, dash, high = numbers.partition("-")
        first, last = int(low), int(high if dash else low)
        if last < first:
            raise _wrong(text, f"the range {numbers} runs backwards")
        if len(choices) + last - first >= MAX_NODES:
            raise _wrong(text, f"it names more than {MAX_NODES} nodes")
        choices += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return choices


def _wrong(text: str, why: str) -> SpecError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return SpecError(f"{shown!r} is no list of nodes: {why}; type one such as n[01-04,7],m3")


def compress_host_list(names: Iterable[str]) -> str:
    """The shortest list of `names`, sorted; `expand_host_list` gives them back.

    The last number of a name becomes the bracket; numbers that count up with the same width become
    a range.
    """
    plain: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        match = re.fullmatch(r"(.*?)([0-9]{1,18})([^0-9]*)", name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((match[1], match[3]), []).append(match[2])
    numbered = [f"{start}{_bracket(numbers)}{end}" for (start, end), numbers in groups.items()]
    return ",".join([*plain, *numbered])


def _bracket(numbers: list[str]) -> str:
    """`[01-04,7]`, or the number alone where there is one."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), len(text))):
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"
