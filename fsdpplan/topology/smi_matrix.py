"""Matrices of `nvidia-smi topo`: what is between every two GPUs, and where each GPU stands.

    GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    PIX     0-55,112-167    0               N/A
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_CELL = re.compile(r"X|NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|OK|CNS|GNS|TNS|NS|DR|U|N/A")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""The heading is underlined on a terminal, and in some pipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix; empty where the text was none."""

    cells: Mapping[tuple[int, int], str]
    """(GPU, other GPU) -> `NV18`, `PIX`, `OK`, ..."""
    cpu_affinity: Mapping[int, str]
    numa_node: Mapping[int, int]


def read_matrix(text: str) -> Matrix:
    """The matrix, if it is whole: as many rows as columns, `X` where a GPU meets itself, and the
    same both ways. A column too few would shift all others unseen."""
    lines = [_STYLE.sub("", line) for line in text.splitlines()]
    header = next(
        (at for at, line in enumerate(lines) if re.match(r"\s*GPU[0-9]+(\s|$)", line)), None
    )
    if header is None:
        return _EMPTY
    devices = _devices(lines[header])
    num_gpus = sum(device.startswith("GPU") for device in devices)
    rows = [row for line in lines[header + 1 :] if (row := _row(line, len(devices)))]
    gpus = [int(row[0].removeprefix("GPU")) for row in rows]
    if devices[:num_gpus] != [row[0] for row in rows] or len(set(gpus)) < len(gpus):
        return _EMPTY
    cells = {
        (gpu, other): cell
        for gpu, row in zip(gpus, rows, strict=True)
        for other, cell in zip(gpus, row[1 : 1 + num_gpus], strict=True)
    }
    if any((cell == "X") != (a == b) or cell != cells[b, a] for (a, b), cell in cells.items()):
        return _EMPTY
    tails = {gpu: row[1 + len(devices) :] for gpu, row in zip(gpus, rows, strict=True)}
    return _matrix(cells, tails, num_headings=_num_headings(lines[header]))


_EMPTY = Matrix(cells={}, cpu_affinity={}, numa_node={})


def _devices(header: str) -> list[str]:
    """Names of the columns before the affinities."""
    return header.partition("CPU Affinity")[0].split()


def _num_headings(header: str) -> int:
    return len(re.findall("CPU Affinity|NUMA Affinity|GPU NUMA ID", header))


def _row(line: str, num_devices: int) -> list[str] | None:
    """The words of a row of a GPU, its name first."""
    words = line.split()
    cells = words[1 : 1 + num_devices]
    if not words or not re.fullmatch(r"GPU[0-9]{1,4}", words[0]) or len(cells) < num_devices:
        return None
    return words if all(_CELL.fullmatch(cell) for cell in cells) else None


def _matrix(
    cells: Mapping[tuple[int, int], str], tails: Mapping[int, list[str]], *, num_headings: int
) -> Matrix:
    """With the affinities of the rows that have a word under each heading."""
    whole = {gpu: tail for gpu, tail in tails.items() if len(tail) == num_headings}
    cores = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
    return Matrix(
        cells=cells,
        cpu_affinity={
            gpu: tail[0] for gpu, tail in whole.items() if tail and cores.fullmatch(tail[0])
        },
        numa_node={
            gpu: int(tail[1])
            for gpu, tail in whole.items()
            if len(tail) > 1 and re.fullmatch("[0-9]{1,4}", tail[1])
        },
    )
