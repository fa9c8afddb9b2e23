"""Reshard: what a run saves, and what is read when it goes on in another layout.

    saved    every parameter and its optimizer state, once
    read     the files, once, by all ranks together, for their checksums; then by each rank those
             parts of them that hold something of its own shard

A part is read whole (torch 2.13, distributed/checkpoint/filesystem.py, `read_data`: it loads the
tensor that lies there, and narrows it). A copy that n ranks saved in equal pieces and m ranks read
has n + m - gcd(n, m) pairs of a piece and a reader that overlap, so it is read

    (n + m - gcd(n, m)) / n

times: once by as many or by a divisor of them, m times from whole copies. Pieces of several
dimensions multiply. Random states and the index are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, inf

from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What it takes to go on in another layout."""

    saved_bytes: int
    """What the run writes before it ends, and what the next one checks."""
    read_bytes: int
    """What the ranks of the next one read of it for their shards, all together."""
    network_bytes_per_second: float
    """What all nodes of the next run can receive: storage is behind it. Infinite within a node."""

    def seconds(self, storage_bytes_per_second: float | None) -> float:
        """To write and to read all that; by the network of the nodes alone where the storage is not
        known, which is the least that it takes."""
        rate = min(storage_bytes_per_second or inf, self.network_bytes_per_second)
        return (2 * self.saved_bytes + self.read_bytes) / rate


def moved(before: Case, after: Case, *, saved_bytes: int | None = None) -> Moved:
    """From one layout of a model to another; `saved_bytes` where the files are known."""
    saved = checkpoint_bytes(before) if saved_bytes is None else saved_bytes
    copies = 1 if after.layout.sharding == "ddp" else after.layout.dp_replicate
    if after.layout.sharding == "ddp":
        copies = after.layout.data_parallel * after.layout.cp
    times = overlaps(_pieces(before.layout), _pieces(after.layout))
    times *= overlaps(before.layout.tp, after.layout.tp)
    outer = after.cluster.levels[-1]
    nodes = after.cluster.nodes
    rate = nodes * outer.ports * outer.port_bandwidth_bytes_per_second if nodes > 1 else inf
    return Moved(
        saved_bytes=saved,
        read_bytes=round(copies * times * saved),
        network_bytes_per_second=rate,
    )


def overlaps(pieces: int, readers: int) -> float:
    """Times that a copy saved in so many equal pieces is read by so many ranks, of which each takes
    its own equal part."""
    return (pieces + readers - gcd(pieces, readers)) / pieces


def _pieces(layout: Layout) -> int:
    return 1 if layout.sharding == "ddp" else layout.shard_ranks


def checkpoint_bytes(case: Case) -> int:
    """Parameters and optimizer state, each once, however many ranks hold it; rows that pad the
    vocabulary are not saved.

        B = parameters * (bytes of one + optimizer's bytes of one)
    """
    model = replace(case.model, vocab_multiple=1)
    plain = replace(case, model=model)
    states = [rank_state(plain, stage) for stage in pipeline_ranks(model=model, layout=case.layout)]
    held = sum(each.held_parameters for each in states)
    updated = sum(each.optimizer_parameters for each in states)
    weights = sum(each.parameters for each in states) / held
    moments = sum(each.optimizer for each in states) / updated
    return round(parameter_count(model) * (weights + moments))
