"""Host: what FSDP2's offload has the CPUs of a node do, and how fast it copies.

Everything here waits for memory: the node's own, which its ranks share, or the link between host
and device. How many threads a rank has does not count, as long as its share of the memory is what
they wait for; the job script gives each rank its share of the cores.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`all_gather_inputs`) and
_fsdp_collectives.py (`foreach_reduce`).
"""

from __future__ import annotations

from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.spec.cluster import Cluster

ADD_BYTES_PER_PARAMETER = 12
"""An fp32 gradient is added to another: two are read, one is written."""

NORM_BYTES_PER_PARAMETER = 4
SCALE_BYTES_PER_PARAMETER = 8
"""Clipping reads gradients, then reads and writes them."""

ASSUMED_NODE_BYTES_PER_SECOND = 409.6e9
"""Memory of a node of which it is not known: two sockets of eight channels of DDR4-3200 each."""

FRESH_PAGES_BYTES_PER_SECOND = 3.5e9
"""What one thread copies into memory that the system hands out page by page: what is behind a copy
from the device into memory that is not pinned. A seventh of a copy into memory that was written
before, where both were measured (tests/benchmarks/host.py, on a CPU without GPUs)."""


def host_bytes_per_second(cluster: Cluster) -> float:
    """A rank's share of what streaming code reaches of its node's memory.

    B = fraction * node's bandwidth / devices of the node
    """
    node = cluster.host_memory_bytes_per_second or ASSUMED_NODE_BYTES_PER_SECOND
    return cluster.device.fit.host_memory_fraction * node / cluster.gpus_per_node


def link_bytes_per_second(cluster: Cluster) -> float:
    """Copies of one rank between pinned memory and its device, one way: what the link carries, or
    the rank's share of the memory that it reads or writes."""
    device = cluster.device
    return min(
        device.fit.host_link_fraction * device.host_link_bytes_per_second,
        host_bytes_per_second(cluster),
    )


def pinned_copy_seconds(elements: int, cluster: Cluster) -> float:
    """One way of so many fp32 elements: shards to the device before they are gathered, gradients
    to the host after they are reduced."""
    return FP32_BYTES * elements / link_bytes_per_second(cluster)


def adding_seconds(elements: int, cluster: Cluster) -> float:
    """Gradients to the host where there are others of earlier micro-batches, to which they are
    added: the host waits for the copy, which is into memory that is not pinned, and adds.

        T = 4 n / min(link, fresh pages) + 12 n / B
    """
    copied = min(link_bytes_per_second(cluster), FRESH_PAGES_BYTES_PER_SECOND)
    added = ADD_BYTES_PER_PARAMETER * elements / host_bytes_per_second(cluster)
    return FP32_BYTES * elements / copied + added
