"""The matrix that `nvidia-smi topo -m` prints, as a part of a recording.

A cell says how two devices reach each other: `NV18` by 18 NVLinks, else the nearest that their PCIe
ways share (`PIX` one bridge, `PXB` several, `PHB` the host bridge, `NODE` a NUMA node, `SYS`
the link between sockets; `SOC` in older drivers). The matrix has no PCI addresses, so that its
devices get some of the domain ffff here, in a tree of bridges that has the same ways.

A paste may be cut at its end or wrapped at the width of a terminal: cells are counted, not lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpplan.errors import SpecError
from fsdpplan.topology.read.gpu_names import (
    UNKNOWN_NVLINK,
    capability_of,
    gpu_facts,
    nvlinks_of_capability,
)
from fsdpplan.topology.read.reading import numbers_in_list, whole_number
from fsdpplan.topology.read.recording import Recording

MOST_DEVICES = 250
"""As many as fit a PCI domain's buses; the largest host pasted anywhere shows some 60."""

_NVLINK = re.compile(r"NV([1-9][0-9]?)")
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_ANCESTORS = dict(zip(_NEAREST_FIRST, (10, 20, 30, 40, 50), strict=True))
"""NVML's codes of a common ancestor."""
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_GPU = re.compile(r"GPU([0-9]{1,3})")
_STYLE = re.compile(r"\x1b?\[[0-9;]{0,8}m")
"""The heading is underlined, which a paste may keep in part."""
_AFFINITY = re.compile(r"[0-9][0-9,-]*|N/A")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """What stands in the text."""

    names: tuple[str, ...]
    """As the heading has them."""
    cells: Mapping[tuple[int, int], str]
    """(row, column) -> way, both directions; what no row says is not in it."""
    affinities: Mapping[int, tuple[str, ...]]
    """Row -> what stands behind its cells: cores, NUMA node."""
    complete: frozenset[int]
    """Rows that are there with all their cells."""
    adapters: Mapping[str, str]
    """By the legend: `NIC0` -> `mlx5_0`."""
    without_nvlinks: bool
    """Its legend knows no NVLinks: `nvidia-smi topo -mp` leaves them out."""


def has_matrix(text: str) -> bool:
    """Whether the text shows such a matrix, or a part of one with its heading."""
    return _heading_line(_lines(text)) is not None


def matrix_recording(text: str, names: Mapping[int, str]) -> Recording | None:
    """What the matrix in `text` says of its host; None where there is none.

    `names`: GPU -> its name, said elsewhere. Raises SpecError, by line, where its rows contradict
    each other or cannot be told apart.
    """
    matrix = _matrix(text)
    if matrix is None:
        return None
    gpus = {i: int(m[1]) for i, name in enumerate(matrix.names) if (m := _GPU.fullmatch(name))}
    adapters = {
        i: matrix.adapters.get(name, name) for i, name in enumerate(matrix.names) if i not in gpus
    }
    numa = _numa_nodes(matrix)
    ways = _ways(matrix, gpus, adapters)
    switched = _switched(matrix, gpus, names)
    files: dict[str, str] = {}
    links = {f"/sys/bus/pci/devices/{_bus_id(i)}": way for i, way in ways.items() if i in gpus}
    for i, name in adapters.items():
        files[f"/sys/class/infiniband/{name}/ports/1/link_layer"] = ""
        if i in ways:
            links[f"/sys/class/infiniband/{name}/device"] = ways[i]
            files[f"/sys/class/infiniband/{name}/device/numa_node"] = f"{numa[i]}\n"
    return Recording(
        files=files,
        links=links,
        failed=_unsaid(matrix, gpus, adapters),
        nvml={
            "gpus": [
                {
                    **_gpu(matrix, i, index, names.get(index)),
                    "numa_node": numa[i],
                    "nvlinks": _nvlinks(_peers(matrix, i, gpus), switched),
                }
                for i, index in gpus.items()
            ],
            "pairs": [
                {"first": gpus[i], "second": gpus[j], "ancestor": _ANCESTORS[way]}
                for (i, j), way in matrix.cells.items()
                if i < j and i in gpus and j in gpus and way in _ANCESTORS
            ],
        },
    )


def _lines(text: str) -> list[list[str]]:
    """The words of each line, without what styles it or quotes it."""
    return [_STYLE.sub("", line).lstrip("> ").split() for line in text.splitlines()]


def _is_way(word: str) -> bool:
    return word in ("X", "SOC", *_NEAREST_FIRST) or _NVLINK.fullmatch(word) is not None


def _heading_line(lines: Sequence[list[str]]) -> int | None:
    """The line that names the columns: it begins with a GPU, and no way follows."""
    for at, words in enumerate(lines):
        if words and _GPU.fullmatch(words[0]):
            after = words[1:] or (lines[at + 1] if at + 1 < len(lines) else [])
            following = after[0] if after else ""
            if following == "CPU" or (_DEVICE.fullmatch(following) and not _is_way(following)):
                return at
    return None


def _matrix(text: str) -> _Matrix | None:
    lines = _lines(text)
    heading = _heading_line(lines)
    if heading is None:
        return None
    tokens = [
        _Token(text=word, line=at + 1)
        for at, words in enumerate(lines[heading:], heading)
        for word in words
    ]
    names, place = _names(tokens)
    cells: dict[tuple[int, int], str] = {}
    said_at: dict[tuple[int, int], int] = {}
    affinities: dict[int, tuple[str, ...]] = {}
    complete: set[int] = set()
    starts = _row_starts(tokens, names, place)
    if not starts:
        raise _wrong(tokens[0], "no row of the matrix follows its heading: paste all of it")
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        label, row = tokens[start], names.index(tokens[start].text)
        words = tokens[start + 1 : end]
        ways = _leading(words, _is_way)
        if row in affinities:
            raise _wrong(
                label, f"a second row {label.text}: give the matrix of each host in its own file"
            )
        if len(ways) > len(names) or (len(ways) < len(names) and end != len(tokens)):
            raise _wrong(
                label,
                f"row {label.text} has {len(ways)} cells, and the heading names "
                f"{len(names)} devices: paste it again, in a wider window",
            )
        for column, way in enumerate(ways):
            _put(cells, said_at, names, (row, column), way)
        rest = _leading(words[len(ways) :], lambda word: _AFFINITY.fullmatch(word) is not None)
        affinities[row] = tuple(token.text for token in rest[:3])
        if len(ways) == len(names):
            complete.add(row)
    return _Matrix(
        names=names,
        cells=cells,
        affinities=affinities,
        complete=frozenset(complete),
        adapters=_legend(lines),
        without_nvlinks=_without_nvlinks(lines),
    )


def _names(tokens: Sequence[_Token]) -> tuple[tuple[str, ...], int]:
    """The columns' devices, and the place of the first token behind them."""
    names: list[str] = []
    place = 0
    while place < len(tokens) and tokens[place].text not in ("CPU", "NUMA"):
        token = tokens[place]
        if place + 1 < len(tokens) and _is_way(tokens[place + 1].text):
            break
        if not _DEVICE.fullmatch(token.text) or token.text in names or _is_way(token.text):
            raise _wrong(
                token,
                f"the heading of nvidia-smi topo -m names devices, not {token.text[:40]!r}: paste "
                "it again",
            )
        names.append(token.text)
        if len(names) > MOST_DEVICES:
            raise _wrong(
                token, f"the heading names more than {MOST_DEVICES} devices: paste one host's"
            )
        place += 1
    return tuple(names), place


def _row_starts(tokens: Sequence[_Token], names: tuple[str, ...], place: int) -> list[int]:
    known = frozenset(names)
    return [
        at
        for at in range(place, len(tokens) - 1)
        if tokens[at].text in known and _is_way(tokens[at + 1].text)
    ]


def _leading(words: Sequence[_Token], belongs: Callable[[str], bool]) -> list[_Token]:
    found: list[_Token] = []
    for word in words:
        if not belongs(word.text):
            break
        found.append(word)
    return found


def _put(
    cells: dict[tuple[int, int], str],
    said_at: dict[tuple[int, int], int],
    names: tuple[str, ...],
    place: tuple[int, int],
    cell: _Token,
) -> None:
    """Write one cell in both directions; rows that contradict each other are refused."""
    row, column = place
    if (cell.text == "X") != (row == column):
        raise _wrong(
            cell,
            f"row {names[row]} has {cell.text} in the column of {names[column]}: cells are missing "
            "or moved, paste it again",
        )
    if row == column:
        return
    way = "SYS" if cell.text == "SOC" else cell.text
    if cells.get(place, way) != way:
        raise _wrong(
            cell,
            f"row {names[row]} says {way} of {names[column]}, and line {said_at[place]} "
            f"{cells[place]}: paste it again",
        )
    for both in (place, (column, row)):
        cells[both] = way
        said_at.setdefault(both, cell.line)


def _legend(lines: Sequence[list[str]]) -> dict[str, str]:
    return {
        words[0].removesuffix(":"): words[1]
        for words in lines
        if len(words) == 2
        and re.fullmatch(r"NIC[0-9]{1,3}:", words[0])
        and _DEVICE.fullmatch(words[1])
    }


def _without_nvlinks(lines: Sequence[list[str]]) -> bool:
    legend = {words[0] for words in lines if len(words) > 2 and words[1] == "="}
    return "SYS" in legend and "PIX" in legend and "NV#" not in legend


def _wrong(token: _Token, what: str) -> SpecError:
    return SpecError(f"line {token.line}: {what}")


def _bus_id(device: int) -> str:
    return f"ffff:{device:02x}:00.0"


def _groups(matrix: _Matrix, farthest: str) -> list[int]:
    """Device -> the first device of its group: those within this way of each other."""
    within = _NEAREST_FIRST[: _NEAREST_FIRST.index(farthest) + 1]
    group = list(range(len(matrix.names)))
    for (one, other), way in matrix.cells.items():
        if way in within and group[one] != group[other]:
            low, high = sorted((group[one], group[other]))
            group = [low if each == high else each for each in group]
    return group


def _ways(matrix: _Matrix, gpus: Mapping[int, int], adapters: Mapping[int, str]) -> dict[int, str]:
    """Device -> its real path in a tree of bridges with the matrix's ways.

    A GPU of which not every adapter is said, and the other way around, has none: what is not said
    would else look far.
    """
    lower, upper, host = (_groups(matrix, way) for way in ("PIX", "PXB", "PHB"))
    known = [i for i in gpus if all((i, j) in matrix.cells for j in adapters)]
    placed = known + [j for j in adapters if all((i, j) in matrix.cells for i in known)]
    return {
        i: f"/sys/devices/pciffff:{host[i]:02x}/ffff:{upper[i]:02x}:1c.0/ffff:{lower[i]:02x}:1d.0"
        f"/ffff:{lower[i]:02x}:1e.0/{_bus_id(i)}"
        for i in placed
    }


def _numa_nodes(matrix: _Matrix) -> dict[int, int]:
    """Device -> its NUMA node. Devices whose node the matrix does not say but that are near each
    other get a number that no other has."""
    said = _said_nodes(matrix)
    group = _groups(matrix, "NODE")
    of_group = {group[i]: node for i, node in sorted(said.items(), reverse=True)}
    free = (node for node in range(2 * MOST_DEVICES) if node not in said.values())
    for first in dict.fromkeys(group):
        if first not in of_group:
            of_group[first] = next(free)
    return {i: said.get(i, of_group[first]) for i, first in enumerate(group)}


def _said_nodes(matrix: _Matrix) -> dict[int, int]:
    """Device -> NUMA node, by its row."""
    return {
        i: node
        for i, words in matrix.affinities.items()
        if len(words) > 1 and (node := whole_number(words[1])) is not None and node < MOST_DEVICES
    }


def _gpu(matrix: _Matrix, device: int, index: int, name: str | None) -> dict[str, object]:
    """One GPU as NVML would say it, without its links."""
    words = matrix.affinities.get(device, ())
    cores = numbers_in_list(words[0]) if words else None
    affinity = {"cpu_affinity": _words(cores)} if cores else {}
    return {**gpu_facts(index, name), "bus_id": _bus_id(device), **affinity}


def _peers(matrix: _Matrix, device: int, gpus: Iterable[int]) -> dict[int, int]:
    """Other GPU -> NVLinks that the matrix has between it and this one."""
    return {
        other: int(match[1])
        for other in gpus
        if (match := _NVLINK.fullmatch(matrix.cells.get((device, other), ""))) is not None
    }


def _switched(matrix: _Matrix, gpus: Mapping[int, int], names: Mapping[int, str]) -> int | None:
    """NVLinks of each GPU into switches; None without switches.

    They are there where some GPU would need more links than it has if each led to one peer.
    """
    for device, index in gpus.items():
        peers = _peers(matrix, device, gpus)
        most = nvlinks_of_capability(capability_of(names.get(index)))
        if len(set(peers.values())) == 1 and sum(peers.values()) > most:
            return next(iter(peers.values()))
    return None


def _nvlinks(peers: Mapping[int, int], switched: int | None) -> list[dict[str, object]]:
    """Links as NVML would list them. Their generation goes by the GPU, where that is known."""
    one = {"state": 1, "version": UNKNOWN_NVLINK}
    if switched is not None and set(peers.values()) == {switched}:
        return [{"link": link, **one, "remote_type": 2} for link in range(switched)]
    ends = [other for other, count in peers.items() for _ in range(count)]
    return [
        {"link": link, **one, "remote_type": 0, "remote_bus_id": _bus_id(other)}
        for link, other in enumerate(ends)
    ]


def _words(cores: frozenset[int]) -> list[int]:
    """A set of numbers as NVML's 64-bit words."""
    bits = sum(1 << core for core in cores)
    return [(bits >> at) & (2**64 - 1) for at in range(0, bits.bit_length(), 64)]


def _unsaid(
    matrix: _Matrix, gpus: Mapping[int, int], adapters: Mapping[int, str]
) -> dict[str, str]:
    """What the matrix leaves open."""
    failed: dict[str, str] = {}
    cut = [name for i, name in enumerate(matrix.names) if i not in matrix.complete]
    if cut:
        shown = ", ".join(cut[:8]) + (", ..." if len(cut) > 8 else "")
        unsaid = sum(
            (i, j) not in matrix.cells
            for i in gpus
            for j in range(len(matrix.names))
            if i != j and (j not in gpus or i < j)
        )
        failed["nvidia-smi topo -m"] = (
            f"the text ends before the rows of {shown}, and {unsaid} ways of GPUs are unknown"
        )
    if matrix.without_nvlinks:
        failed["NVLinks"] = (
            "the legend of the matrix has none, as nvidia-smi topo -mp prints it: paste "
            "nvidia-smi topo -m"
        )
    unnamed = [name for name in adapters.values() if re.fullmatch(r"NIC[0-9]+", name)]
    if unnamed:
        failed["NIC Legend"] = f"not in the text: what {', '.join(unnamed[:8])} are called"
    if not gpus.keys() <= _said_nodes(matrix).keys():
        failed["NUMA Affinity"] = "not in the text whole: nodes without number are given one"
    return failed
