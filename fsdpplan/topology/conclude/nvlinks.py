"""NVLinks of one GPU, out of what NVML said of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fsdpplan.spec.machine import NvLink, NvLinkRemote
from fsdpplan.topology.conclude.distrust import line, number, parts, pci_address

_REMOTES: Mapping[int | None, NvLinkRemote] = {0: "gpu", 1: "cpu", 2: "switch"}

_GENERATION_OF_CAPABILITY = {
    "6.0": 1,
    "7.0": 2,
    "7.5": 2,
    "8.0": 3,
    "8.6": 3,
    "8.7": 3,
    "9.0": 4,
    "10.0": 5,
    "10.3": 5,
}
"""By compute capability, which NVML says of every GPU: one that no profile knows is read, too."""
_GENERATION_OF_CODE = {1: 1, 2: 2, 3: 2, 5: 3}
"""Where NVML's code means the same however it is read: see `_generation`."""

_PAYLOAD_BYTES_PER_SECOND = {25_781: 25e9, 26_562: 25e9, 53_125: 50e9}
"""Data rate of a link that says this speed in MB/s: speeds count the line code or the forward error
correction, too. nvidia-smi says 25.781 GB/s on V100, 26.562 on H100, 53.125 on B300; datasheets
count 25, 25 and 50 one way (300 over 6 links, 900 over 18 and 1800 over 18 both ways)."""

_USUAL_BYTES_PER_SECOND = {1: 20e9, 2: 25e9, 4: 25e9, 5: 50e9}
"""One way, by generation. Source: open-mpi/hwloc issue 574; the fifth from B200's 1800 GB/s."""
_USUAL_OF_AMPERE = {"8.0": 25e9, "8.6": 14.0625e9}
"""The third generation is slower on GA10x: 14.062 GB/s by nvidia-smi on RTX 3090 and A6000."""


def nvlinks_of(
    gpu: Mapping[str, object], *, compute_capability: str | None, gpu_bus_ids: Collection[str]
) -> tuple[NvLink, ...]:
    """The links of one GPU by their number."""
    links: dict[int, NvLink] = {}
    for facts in parts(gpu, "nvlinks"):
        link, state = number(facts, "link", least=0), number(facts, "state", least=0)
        if link is not None and state is not None and link not in links:
            links[link] = _nvlink(link, state == 1, facts, compute_capability, gpu_bus_ids)
    return tuple(links[link] for link in sorted(links))


def _nvlink(
    link: int,
    active: bool,
    facts: Mapping[str, object],
    compute_capability: str | None,
    gpu_bus_ids: Collection[str],
) -> NvLink:
    generation = _generation(number(facts, "version"), compute_capability)
    speed = number(facts, "speed_megabytes_per_second")
    address = pci_address(line(facts, "remote_bus_id"))
    remote = _REMOTES.get(number(facts, "remote_type", least=0))
    if remote is None and address in gpu_bus_ids:
        remote = "gpu"
    return NvLink(
        link=link,
        active=active,
        version=generation,
        bandwidth_bytes_per_second=(
            _bytes_per_second(speed, generation, compute_capability) if active else None
        ),
        remote=remote,
        remote_bus_id=address if remote == "gpu" else None,
    )


def _generation(code: int | None, compute_capability: str | None) -> int | None:
    """NVLink's generation. It goes by the architecture, and only what that leaves open by the code.

    nvml.h numbers the versions 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 from 1 on, but drivers gave the
    kernel's own numbers, which skip 3: an A100 says 5 (open-mpi/hwloc issue 658) as an RTX 3090
    does (Syllo/nvtop pull request 469), though nvml.h has 4 and 5 for them.
    """
    if code is None:
        return None
    if compute_capability is not None:
        return _GENERATION_OF_CAPABILITY.get(compute_capability)
    return _GENERATION_OF_CODE.get(code)


def _bytes_per_second(
    speed_megabytes_per_second: int | None, generation: int | None, compute_capability: str | None
) -> float | None:
    """What one link carries one way; what the link says counts before what is usual."""
    if speed_megabytes_per_second is not None:
        said = speed_megabytes_per_second * 1e6
        return _PAYLOAD_BYTES_PER_SECOND.get(speed_megabytes_per_second, said)
    if generation == 3:
        return _USUAL_OF_AMPERE.get(compute_capability or "")
    return _USUAL_BYTES_PER_SECOND.get(generation or 0)
