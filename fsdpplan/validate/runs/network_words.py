"""Network words: the ports of a node, from what a table says of its network."""

from __future__ import annotations

import re
from dataclasses import dataclass

GENERATION_GBITS = {
    "fdr": 56.0,
    "edr": 100.0,
    "hdr": 200.0,
    "ndr": 400.0,
    "xdr": 800.0,
    "omnipath": 100.0,
}
"""Rate of one port of 4 lanes of InfiniBand, by generation (the InfiniBand Trade Association's
roadmap), and of Omni-Path 100, the only one in service to 2024."""

GENERATIONS = re.compile(r"\b(FDR|EDR|HDR|NDR|XDR|Omni-?Path)[ -]?(\d{2,3})?(?![0-9])", re.I)
"""A generation of links, with its rate where that is written behind it."""

RATE = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*([GT])b(?:it)?(?:ps|/s)?\b")
"""A rate in bits a second."""

OTHER_ADAPTERS = re.compile(
    r"manage|mgmt|storage|front-?end|\bBMC\b|in-band|\bhost\b|internet", re.I
)
"""Words on adapters that do not carry collectives."""

COMPUTE_ADAPTERS = re.compile(r"comput|back-?end|RDMA|\bGPUs?\b|fabric", re.I)
"""Words on those that do."""

MAX_GBITS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What words say of a node's network."""

    ports: int | None
    """Ports a node; None: the words name one port and not how many there are."""
    gbits: float
    """Rate of each."""


def ports_of(words: str, gpus_per_node: int) -> Ports | None:
    """The ports a node that `words` name, such as `4x100 Gb RoCE per node` or `8x NDR 400`.

    Adapters for storage, management or the host are not those that train. A rate without "per GPU"
    is the node's, shared by one port for each of its GPUs; a generation's name, as in `NDR 400`,
    is one port's.
    """
    parts = [part for part in re.split(r"[;,+]|\band\b", words) if part.strip()]
    train = [part for part in parts if not OTHER_ADAPTERS.search(part)] or parts
    train.sort(key=lambda part: not COMPUTE_ADAPTERS.search(part))
    found = (_ports(part, gpus_per_node) for part in train)
    return next((one for one in found if one is not None), None)


def _ports(words: str, gpus_per_node: int) -> Ports | None:
    generation = GENERATIONS.search(words)
    many = re.search(r"\b(\d{1,3})\s*x\s*", words, re.I)
    rate = RATE.search(words, many.end() if many else 0)
    per_gpu = re.search(r"(?:per|a|/)\s*GPU", words, re.I)
    gbits = _generation_gbits(generation)
    if rate:
        gbits = float(rate[1]) * (1000 if rate[2] in "Tt" else 1)
    if gbits is None or not 0 < gbits <= MAX_GBITS:
        return None
    if many:
        ports: int | None = int(many[1])
    elif generation and not per_gpu:
        ports = None
    else:
        ports, gbits = gpus_per_node, gbits if per_gpu else gbits / gpus_per_node
    return None if ports == 0 else Ports(ports=ports, gbits=gbits)


def _generation_gbits(found: re.Match[str] | None) -> float | None:
    """Rate of one port of a generation of links, with the number behind its name going first."""
    if found is None:
        return None
    return float(found[2]) if found[2] else GENERATION_GBITS[found[1].lower().replace("-", "")]
