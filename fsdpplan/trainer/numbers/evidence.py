"""Why a gradient is wrong: whose sequences are missing in it, or whose shard it is.

A step's gradient is the sum of what each sequence gives. How often each kind of sequence is in the
gradient that a rank has is found by least squares, since the gradients of the kinds are known; then
it is asked which ranks or micro-batches, left out or counted twice, leave just these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import PlanConfig
from ..model.weights import part_at
from ..parallel.mesh import batch_rank, place
from ..preflight.findings import ranks_words
from .look import Kept, error_of, rms
from .plan import kinds_of, sequence_number, sequences_of
from .reference import Reference, kind_gradients

FITTED = 1e-2
"""Of the gradient, left over where an explanation is right."""
COUNTED = 0.1
"""Sequences by which a count may be off."""
MOST_SHARDS = 64
"""Ranks whose shards are compared with a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a rank can say of its wrong gradients."""

    rank: int
    products: list[list[float]] = field(default_factory=list)
    """Of the kinds' gradients with each other, over this rank's parts of the wrong ones."""
    found: list[float] = field(default_factory=list)
    """Of the kinds' gradients with the one that is there."""
    squares: float = 0.0
    """Of the one that is there."""
    shard_of: int | None = None
    """Rank of the sharding axis whose part of the gradient this one was given."""
    bits: dict[str, int] = field(default_factory=dict)
    """Checksum of what replicas must share."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def gather_evidence(
    plan: PlanConfig, reference: Reference, kept: Kept, *, seed: int, fits: bool
) -> Evidence:
    """Of this rank; nothing of gradients where they are right, or nobody `fits` them."""
    wrong = kept.seen.gradients
    bits = dict(kept.bits)
    if not wrong or not fits:
        return Evidence(rank=kept.seen.rank, bits=bits)
    rows = []
    for of_kind in kind_gradients(plan, seed=seed):
        parts = [_own(of_kind, name, kept).flatten() for name in wrong]
        rows.append(torch.cat(parts).double())
    there = torch.cat([kept.gradients[name].flatten() for name in wrong]).double()
    kinds = torch.stack(rows)
    return Evidence(
        rank=kept.seen.rank,
        products=(kinds @ kinds.T).tolist(),
        found=(kinds @ there).tolist(),
        squares=float(there.square().sum()),
        shard_of=_shard_of(reference, kept),
        bits=bits,
    )


def _own(wholes: dict[str, Tensor], name: str, kept: Kept) -> Tensor:
    whole = wholes[kept.named(name)]
    if name not in kept.cuts:
        return whole
    mesh, placements = kept.cuts[name]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return part_at(whole, coordinate, mesh, placements)


def _shard_of(reference: Reference, kept: Kept) -> int | None:
    """The other rank of the sharding axis whose part each wrong gradient is."""
    common: set[int] | None = None
    for name in kept.seen.gradients:
        if name not in kept.cuts:
            return None
        mesh, placements = kept.cuts[name]
        axes = mesh.mesh_dim_names or ()
        number = next((n for n, axis in enumerate(axes) if axis.endswith("dp_shard")), None)
        here = mesh.get_coordinate()
        if number is None or here is None:
            return None
        whole = reference.gradients[kept.named(name)]
        matching = set()
        for other in range(min(mesh.size(number), MOST_SHARDS)):
            at = [*here[:number], other, *here[number + 1 :]]
            part = part_at(whole, at, mesh, placements)
            if other != here[number] and error_of(kept.gradients[name], part, rms(whole)) <= FITTED:
                matching.add(other)
        common = matching if common is None else common & matching
    return min(common) if common else None


def counts_in(evidence: Sequence[Evidence], plan: PlanConfig) -> list[float] | None:
    """How many sequences of each kind are in the gradient that these ranks hold parts of; None
    where no such counts make it."""
    products = torch.tensor([each.products for each in evidence], dtype=torch.float64).sum(0)
    found = torch.tensor([each.found for each in evidence], dtype=torch.float64).sum(0)
    squares = sum(each.squares for each in evidence)
    weights = torch.linalg.lstsq(products, found[:, None], driver="gelsd").solution[:, 0]
    left = squares - 2 * float(weights @ found) + float(weights @ products @ weights)
    if left > FITTED**2 * squares:
        return None
    counts: list[float] = (weights * sequences_of(plan)).tolist()
    return counts


def explain_counts(counts: Sequence[float], plan: PlanConfig, rank: int) -> str:
    """Which sequences a rank's gradient is made of, in words; empty where nothing fits."""
    for words, kept in _stories(plan, rank):
        expected = _kind_counts(plan, kept)
        for factor in _factors(plan):
            pairs = zip(counts, expected, strict=True)
            if all(abs(found - factor * wanted) <= COUNTED * factor for found, wanted in pairs):
                return words
    return ""


def _kind_counts(plan: PlanConfig, kept: dict[tuple[int, int], int]) -> list[int]:
    """Sequences of each kind, where those of (micro-batch, data-parallel rank) count so often, and
    others once."""
    layout, kinds = plan.layout, kinds_of(plan)
    counts = [0] * kinds
    for micro_batch in range(layout.num_microbatches):
        for part in range(layout.data_parallel):
            for row in range(layout.micro_batch):
                number = sequence_number(layout, micro_batch=micro_batch, part=part, row=row)
                counts[number % kinds] += kept.get((micro_batch, part), 1)
    return counts


def _factors(plan: PlanConfig) -> list[float]:
    """By which a mean over fewer may be larger, or one that is divided again smaller."""
    layout = plan.layout
    sizes = {layout.dp_replicate, layout.dp_shard, layout.data_parallel, layout.shard_ranks}
    sizes |= {layout.num_microbatches, layout.shard_ranks * layout.dp_replicate}
    return [1.0, *(float(n) for n in sizes if n > 1), *(1.0 / n for n in sizes if n > 1)]


def _stories(plan: PlanConfig, rank: int) -> Iterator[tuple[str, dict[tuple[int, int], int]]]:
    """What may have happened: in words, and what it makes of the counts."""
    layout, own = plan.layout, place(plan.layout, rank)
    batches, parts = range(layout.num_microbatches), range(layout.data_parallel)

    def only(kept: Sequence[int]) -> dict[tuple[int, int], int]:
        return {(m, part): int(part in kept) for m in batches for part in parts}

    replica = [own.dp_replicate * layout.dp_shard + shard for shard in range(layout.dp_shard)]
    column = [n * layout.dp_shard + own.dp_shard for n in range(layout.dp_replicate)]
    if layout.dp_replicate > 1:
        yield (
            "the gradients are not averaged over dp_replicate: each replica keeps its own",
            only(replica),
        )
    if layout.dp_shard > 1:
        yield (
            "the gradients are not reduced over dp_shard: each rank keeps those of its sequences",
            only(column),
        )
    yield (
        "the gradients are not reduced over any rank: each keeps those of its own sequences",
        only([batch_rank(layout, rank)]),
    )
    for times, words in ((0, "is missing"), (2, "counts twice")):
        for m in batches if len(batches) > 1 else ():
            text = f"micro-batch {m + 1} of {len(batches)} {words}"
            yield f"{text} in the gradients", {(m, part): times for part in parts}
    for times, words in ((0, "is missing"), (2, "counts twice")):
        for part in parts:
            text = f"the part of {_part_words(plan, part)} {words} in the gradients"
            yield text, {(m, part): times for m in batches}
    for m in batches:
        for part in parts:
            text = f"the part of {_part_words(plan, part)} in micro-batch {m + 1} is missing"
            yield text, {(m, part): 0}


def _part_words(plan: PlanConfig, part: int) -> str:
    """The ranks that have a part of the batch; where the sequences of others are of the same kinds,
    one of each."""
    parts = range(part, plan.layout.data_parallel, kinds_of(plan))
    several = sequences_of(plan) > kinds_of(plan) and len(parts) > 1
    ranks = (
        [ranks_of_part(plan, each)[0] for each in parts] if several else ranks_of_part(plan, part)
    )
    return f"one of {ranks_words(ranks)}" if several else ranks_words(ranks)


def ranks_of_part(plan: PlanConfig, part: int) -> list[int]:
    """Ranks that train on one data-parallel part of the batch."""
    layout = plan.layout
    return [rank for rank in range(layout.world) if batch_rank(layout, rank) == part]
