"""A recording of what people paste of a host: the output of `nvidia-smi topo -m`, `nvidia-smi -L`
and `ibstat`, and the topology that NCCL dumps, one by one or all in one file.

What they do not say stands in `failed`, under the command that would have said it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpplan.errors import SpecError
from fsdpplan.topology.read.gpu_names import UNNAMED_GPU, listed_gpus
from fsdpplan.topology.read.ibstat import ports_recording
from fsdpplan.topology.read.matrix import has_matrix, matrix_recording
from fsdpplan.topology.read.nccl_topology import has_topology, topology_recording
from fsdpplan.topology.read.recording import Recording

MAX_PASTED_CHARACTERS = 4 * 2**20
"""A host with 16 GPUs and 30 adapters fills some 30 KiB."""
_ROCM = re.compile(r"(Weight|Hops|Link Type) between two GPUs|ROCm System Management Interface")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pasted:
    """One text, and what it is called in messages."""

    text: str
    where: str


def says_gpus(text: str) -> bool:
    """Whether the text shows what joins the GPUs of a host: no two such texts are of one host."""
    return has_matrix(text) or has_topology(text)


def is_pasted(text: str) -> bool:
    """Whether anything that is read here is in the text."""
    return not is_rocm(text) and _is_read(text)


def _is_read(text: str) -> bool:
    return says_gpus(text) or bool(listed_gpus(text)) or ports_recording(text) is not None


def is_rocm(text: str) -> bool:
    """Whether it is what `rocm-smi --showtopo` prints, which looks alike."""
    return _ROCM.search(text) is not None


def recording_of_pasted(texts: Sequence[Pasted], *, host: str) -> Recording:
    """All that `texts` say of one host, which is called `host`.

    Raises SpecError, by file and line, where one of them is broken.
    """
    names: dict[int, str] = {}
    for each in texts:
        names |= listed_gpus(each.text)
    parts = [part for each in texts for part in _parts(each, names)]
    # ports last: they say more than what the others draw of them
    parts.sort(key=lambda part: part.nvml is None)
    whole = Recording(about="pasted: " + ", ".join(each.where for each in texts))
    for part in parts:
        whole = replace(
            whole,
            files={**whole.files, **part.files},
            links={**whole.links, **part.links},
            failed={**whole.failed, **part.failed},
            nvml=part.nvml or whole.nvml,
        )
    if whole.nvml is None and names:
        whole = replace(
            whole,
            nvml={"gpus": [{"index": i, "name": name} for i, name in sorted(names.items())]},
            failed={**whole.failed, "nvidia-smi topo -m": "not in the text: what joins the GPUs"},
        )
    return replace(
        whole,
        files={**whole.files, "/proc/sys/kernel/hostname": host},
        failed={**whole.failed, **_unsaid(whole)},
    )


def _parts(pasted: Pasted, names: dict[int, str]) -> list[Recording]:
    """What each reader finds."""
    if len(pasted.text) > MAX_PASTED_CHARACTERS:
        raise SpecError(
            f"{pasted.where}: a paste of more than {MAX_PASTED_CHARACTERS} characters; keep what "
            "nvidia-smi topo -m and ibstat printed"
        )
    try:
        found = [
            matrix_recording(pasted.text, names),
            topology_recording(pasted.text, names),
            ports_recording(pasted.text),
        ]
    except SpecError as error:
        raise SpecError(f"{pasted.where}: {error}") from error
    if found[0] is not None and found[1] is not None:
        raise SpecError(
            f"{pasted.where}: it has both the matrix of nvidia-smi topo -m and NCCL's topology; "
            "keep one of them: NCCL's says more, of the GPUs of one job"
        )
    return [part for part in found if part is not None]


def _unsaid(whole: Recording) -> dict[str, str]:
    """What no text says that `detect` would read on the host."""
    failed: dict[str, str] = {}
    gpus = whole.nvml.get("gpus") if whole.nvml is not None else None
    gpus = gpus if isinstance(gpus, list) else []
    if any(gpu["name"] == UNNAMED_GPU for gpu in gpus):
        failed["nvidia-smi -L"] = (
            "not in the text: which GPUs they are, and so what an NVLink carries"
        )
    if not gpus:
        failed["nvidia-smi topo -m"] = "not in the text: GPUs, and what joins them"
    silent = [
        name
        for name in whole.children("/sys/class/infiniband")
        if not any(
            whole.text(f"/sys/class/infiniband/{name}/ports/{port}/rate")
            for port in whole.children(f"/sys/class/infiniband/{name}/ports")
        )
    ]
    if silent:
        failed["ibstat"] = (
            f"not in the text: state, rate and kind of {', '.join(silent[:12])}"
            f"{', ...' if len(silent) > 12 else ''}"
        )
    elif gpus and not whole.children("/sys/class/infiniband"):
        failed["ibstat"] = "not in the text: adapters"
    lanes = "" if any("pcie_generation" in gpu for gpu in gpus) else "PCIe lanes of the GPUs, "
    failed["fsdpplan detect --record FILE"] = (
        f"not run on the host: {lanes}CPU, memory, limits, GPUDirect and versions"
    )
    return failed
