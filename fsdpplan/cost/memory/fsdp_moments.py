"""FSDP's memory: what a micro-batch of `fully_shard` allocates and frees, in the order of its
operations.

FSDP2 gathers a unit into a flat buffer, copies it out into parameters, computes and frees it; the
flat buffer of a forward gather lives until the next unit's copy-out is done. Backward gathers the
unit before in advance and keeps the reduce-scatter input of the unit behind until the next
reduction. The embedding's unit is gathered for forward alone; that of the final norm and the head
stays from the end of forward until backward is past it. The root, which has what is in no unit,
maybe both, stays gathered from the first forward to the end of backward. Routed experts that are
units of their own come and go within their block: gathered for it alone, with those of the block
before gathered in advance, and reduced as soon as their gradients are there.

Source: torch 2.13's `_fsdp_param_group.py` and `_fsdp_collectives.py`, and real FSDP2 steps under
fake tensors (tests/ground_truth).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from operator import mul, sub

from fsdpplan.cost.memory.rank_quantities import Left, RankSizes
from fsdpplan.cost.play.heap import Heap, Moment, Phase


def fsdp_phases(s: RankSizes) -> list[Phase]:
    """All candidates for the peak of an FSDP rank, in the last micro-batch of its step.

    Of units that are alike and have like neighbours every quantity is linear in what lies before
    them. So those bound the others between which that grows in one way.
    """
    return [moment.phase for moment in fsdp_moments(s, _bounding_units(s.unit_order))]


@lru_cache(maxsize=1024)
def _bounding_units(order: tuple[int, ...]) -> tuple[int, ...]:
    """Of the units that are alike and have like neighbours the first and the last, and those where
    what lies between them changes; `order`: of which kind each unit is."""
    around = (-1, *order, -1)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(order)):
        alike.setdefault(around[index : index + 3], []).append(index)
    numbers = _numbers_before(order)
    found: set[int] = set()
    for of in alike.values():
        found |= {of[0], of[-1]}
        for before, index, behind in zip(of, of[1:], of[2:], strict=False):
            one = tuple(map(sub, numbers[index], numbers[before]))
            other = tuple(map(sub, numbers[behind], numbers[index]))
            if any(
                a * d != b * c for (a, c), (b, d) in combinations(zip(one, other, strict=True), 2)
            ):
                found.add(index)
    return tuple(sorted(found))


@lru_cache(maxsize=1024)
def _numbers_before(order: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Of each kind how many units lie before each unit, and before the end."""
    kinds = range(max(order, default=-1) + 1)
    return tuple(
        tuple(order[:index].count(kind) for kind in kinds) for index in range(len(order) + 1)
    )


def _left_before(s: RankSizes, units: Sequence[int]) -> dict[int, Left]:
    """What the units before each of `units`, those up to each, and all of them leave."""
    numbers = _numbers_before(s.unit_order)
    each = tuple(zip(*(unit.leaves for unit in s.unit_kinds), strict=True))
    found = {s.units, *units, *(index + 1 for index in units)}
    return {
        index: Left(*(sum(map(mul, numbers[index], kinds)) for kinds in each)) for index in found
    }


def fsdp_moments(s: RankSizes, units: Sequence[int]) -> Iterator[Moment]:
    """A micro-batch through those `units` of blocks, with all that the others leave."""
    heap, left = Heap(gathers_in_place=s.gathers_in_place), _left_before(s, units)
    of_all = left[s.units]
    heap.hold("gradient shards", s.gradient_bytes(0))
    heap.hold("earlier gradients", of_all.held_bytes + s.ends.held_bytes)
    heap.hold("reduced behind", s.behind_ends_bytes)
    heap.hold("saved", s.other_micro_batches_bytes)
    heap.hold("root", s.ends.root.gathered_bytes)
    for phase in _first(s, heap):
        yield Moment("first", -1, phase)
    for index in units:
        for phase in _unit_forward(s, heap, index, left[index]):
            yield Moment("forward", index, phase)
    for phases in (_loss, _head_backward):
        for phase in phases(s, heap, of_all):
            yield Moment("ends", -1, phase)
    for index in reversed(units):
        for phase in _unit_backward(s, heap, index, left[index], left[index + 1], of_all):
            yield Moment("backward", index, phase)
    for phase in _last(s, heap):
        yield Moment("last", -1, phase)


def _first(s: RankSizes, heap: Heap) -> Iterator[Phase]:
    """The embedding's unit is gathered behind the root."""
    tables = s.ends.tables
    if not tables:
        return
    heap.hold("tables", tables.gathered_bytes)
    heap.hold("buffer", tables.buffer_bytes)
    heap.hold("buffer behind", 0 if s.has_lean_units else s.ends.root.buffer_bytes)
    yield heap.moment("forward")
    heap.free("tables")


def _unit_forward(s: RankSizes, heap: Heap, index: int, left: Left) -> Iterator[Phase]:
    """Its gather beside the buffer of what was gathered before; its computation, of each run of
    blocks the last one, beside routed experts that are gathered for it. `left`: of those before."""
    before, unit = index * s.unit_blocks, s.unit(index)
    behind = s.unit(index - 1).last_prefetched_bytes if index else s.ends.first.buffer_bytes
    saved = left.saved_bytes + s.other_micro_batches_bytes
    heap.hold("kept", left.kept_bytes)
    heap.hold("casts", before * s.copies_block_bytes)
    heap.hold("saved", saved)
    heap.hold("stream", s.block.residual_bytes)
    heap.hold("unit", unit.gathered_bytes)
    heap.hold("buffer", unit.buffer_bytes)
    heap.hold("buffer behind", 0 if s.has_lean_units else behind)
    yield heap.moment("forward")
    heap.free("buffer behind", "stream")
    kept = 0
    for run in unit.runs:
        saved += run.number * run.block.saved_bytes
        heap.hold("casts", (before + run.end) * s.copies_block_bytes)
        heap.hold("experts", run.experts_bytes)
        heap.hold("kept experts", kept + (run.number - 1) * run.experts_kept_bytes)
        kept += run.number * run.experts_kept_bytes
        heap.hold("buffer", run.experts_buffer_bytes or unit.buffer_bytes)
        if run.experts_bytes and not s.has_lean_units:
            earlier = run.experts_buffer_bytes if run.number > 1 else unit.buffer_bytes
            heap.hold("buffer", run.experts_buffer_bytes)
            heap.hold("buffer behind", earlier)
            heap.hold("saved", saved - run.block.saved_bytes)
            heap.hold("temporaries", run.block.before_experts_bytes)
            yield heap.moment("forward")
            heap.free("buffer behind")
            heap.hold("buffer", run.experts_buffer_bytes or unit.buffer_bytes)
        heap.hold("saved", saved)
        heap.hold("temporaries", run.block.forward_transient_bytes)
        yield heap.moment("forward")
        heap.free("temporaries")
    heap.free("unit", "experts", "kept experts")


def _loss(s: RankSizes, heap: Heap, left: Left) -> Iterator[Phase]:
    """Head and loss, forward and backward, with everything saved."""
    heap.hold("kept", left.kept_bytes)
    heap.hold("casts", s.copy_bytes(s.blocks))
    heap.hold("saved", left.saved_bytes + s.other_micro_batches_bytes)
    if not s.logits_elements:
        heap.free("buffer")
        return
    head, last = s.ends.head, s.unit(s.units - 1)
    of_last = last.runs[-1].experts_buffer_bytes or last.buffer_bytes
    buffer = head.buffer_bytes if head else of_last
    heap.hold("head", head.gathered_bytes)
    heap.hold("casts of the head", s.copies_root_bytes)
    heap.hold("buffer", buffer)
    beside = s.last_residual_bytes + s.last_normed_bytes
    heap.hold("beside the logits", beside)
    if head:
        heap.hold("buffer behind", 0 if s.has_lean_units else of_last)
        yield heap.moment("forward")
        heap.free("buffer behind")
    if s.pieces is not None:
        heap.free("buffer")
        heap.hold("beside the logits", beside + s.pieces.hidden)
        for gradients, logits in s.pieces.moments:
            heap.hold("gradients", gradients)
            heap.hold("logits", logits)
            yield heap.moment("loss")
    else:
        logits = s.element_bytes * s.logits_elements
        heap.hold("logits", logits + s.logits_gather_bytes)
        yield heap.moment("forward")
        heap.free("buffer")
        heap.hold("beside the logits", beside - s.unkept_normed_bytes)
        heap.hold("logits", s.loss_element_bytes * s.logits_elements)
        yield heap.moment("loss")
        heap.hold("ahead", last.prefetched_bytes if s.regathers else 0)
        heap.hold("beside the logits", beside + s.last_normed_bytes - s.unkept_normed_bytes)
        heap.hold("gradients", s.head_gradient_made_bytes)
        heap.hold("logits", logits)
        yield heap.moment("loss")
    heap.free("logits", "beside the logits", "gradients", "head", "casts of the head")


def _head_backward(s: RankSizes, heap: Heap, left: Left) -> Iterator[Phase]:
    """The reduction of a unit of the final norm and the head, beside what is gathered ahead."""
    head = s.ends.head
    if not head:
        return
    heap.hold("ahead", s.unit(s.units - 1).prefetched_bytes if s.regathers else 0)
    heap.hold("stream", s.block.residual_bytes)
    heap.hold("reduced behind", s.behind_ends_bytes if s.keeps_reduction_behind else 0)
    heap.hold("gradients", head.gradient_bytes)
    heap.hold("reduced", head.reduce_bytes)
    yield heap.moment("backward")
    heap.hold("earlier gradients", left.held_bytes + s.ends.held_bytes - head.held_bytes)
    heap.hold("gradients", 0 if s.has_lean_units else head.last_gradient_bytes)
    heap.hold("reduced shard", head.shard_elements * s.reduced_bytes)
    yield heap.moment("backward")
    heap.free("gradients", "reduced", "reduced shard")


def _unit_backward(
    s: RankSizes, heap: Heap, index: int, left: Left, with_own: Left, of_all: Left
) -> Iterator[Phase]:
    """Its copy-out, its computation, of each run of blocks the last one and the first, its
    reduction. `left`: of the units before, then with its own, and of all."""
    before, unit, head = index * s.unit_blocks, s.unit(index), s.ends.head
    done = s.blocks - before - unit.blocks
    prefetched = s.unit(index - 1).prefetched_bytes if s.regathers and index else 0
    behind = s.unit(index + 1).reduce_bytes if done else head.reduce_bytes
    if not done and not head:
        behind = s.behind_ends_bytes
    beside = behind if s.keeps_reduction_behind and (done or head) else 0
    reduced = of_all.shard_elements - with_own.shard_elements + head.shard_elements
    heap.hold("gradient shards", s.gradient_bytes(reduced))
    heap.hold("gradient of the head", 0 if head else s.head_gradient_bytes)
    held_before = left.held_bytes + s.ends.held_bytes - head.held_bytes
    held = with_own.held_bytes + s.ends.held_bytes - head.held_bytes
    saved = with_own.saved_bytes + s.other_micro_batches_bytes
    heap.hold("earlier gradients", held)
    heap.hold("reduced behind", behind)
    heap.hold("kept", left.kept_bytes)
    heap.hold("unit", unit.gathered_bytes)
    heap.hold("casts", s.copy_bytes(before + unit.blocks))
    heap.hold("saved", saved)
    heap.hold("stream", s.block.residual_bytes)
    heap.free("ahead")
    if s.regathers:
        heap.hold("kept of the unit", with_own.kept_bytes - left.kept_bytes)
        heap.hold("buffer", unit.buffer_bytes)
        yield heap.moment("backward")
        heap.free("kept of the unit", "buffer")
    kept = sum(run.number * run.experts_kept_bytes for run in unit.runs)
    made = 0
    for at in range(len(unit.runs) - 1, -1, -1):
        run = unit.runs[at]
        block, end = run.block, before + run.end
        for turn in sorted({0, run.number - 1}):
            earlier = run if turn < run.number - 1 else unit.runs[at - 1] if at else None
            ahead = prefetched
            if earlier and s.regathers:
                ahead = earlier.experts_prefetched_bytes or prefetched
            if turn:
                behind = run.experts_reduce_bytes or behind
            turned = reduced + turn * run.experts_shard_elements
            heap.hold("gradient shards", s.gradient_bytes(turned))
            heap.hold("gradients", made + turn * block.weight_gradient_bytes)
            heap.hold("earlier gradients", held - turn * run.experts_held_bytes)
            heap.hold("reduced behind", behind)
            heap.hold("experts", run.experts_bytes)
            heap.hold("kept experts", kept - (turn + 1) * run.experts_kept_bytes)
            heap.hold("casts", s.copy_bytes(end - turn))
            heap.hold("saved", saved - turn * block.saved_bytes)
            heap.hold("remade", block.live_bytes - block.saved_bytes)
            if run.experts_bytes and s.regathers:
                # recomputation is a forward pass, which has their buffer until it is through
                heap.hold("buffer", run.experts_buffer_bytes)
                heap.hold("temporaries", 0 if s.has_lean_units else block.remade_peak_bytes)
                yield heap.moment("backward")
                heap.free("buffer")
            heap.hold("ahead", ahead)
            heap.hold("temporaries", block.backward_peak_bytes)
            yield heap.moment("backward")
            if block.reduced_peak_bytes:
                heap.free("experts")
                heap.hold("ahead", ahead)
                heap.hold("reduced behind", behind if s.keeps_reduction_behind else 0)
                heap.hold("temporaries", block.reduced_peak_bytes)
                yield heap.moment("backward")
            heap.free("temporaries", "ahead")
        made += run.number * block.weight_gradient_bytes
        held -= run.number * run.experts_held_bytes
        saved -= run.number * block.saved_bytes
        reduced += run.number * run.experts_shard_elements
        kept -= run.number * run.experts_kept_bytes
        behind = run.experts_reduce_bytes or behind
    heap.free("unit", "experts", "kept experts", "remade")
    heap.hold("gradient shards", s.gradient_bytes(reduced))
    heap.hold("earlier gradients", held)
    heap.hold("ahead", prefetched)
    heap.hold("casts", s.copy_bytes(before))
    heap.hold("saved", saved)
    heap.hold("gradients", unit.gradient_bytes)
    heap.hold("reduced", unit.reduce_bytes)
    heap.hold("reduced behind", beside)
    yield heap.moment("backward")
    last = 0 if s.has_lean_units else unit.runs[-1].block.last_weight_gradient_bytes
    heap.hold("gradients", last)
    heap.hold("earlier gradients", held_before)
    heap.hold("reduced shard", unit.shard_elements * s.reduced_bytes)
    yield heap.moment("backward")
    heap.free("gradients", "reduced", "reduced shard")


def _last(s: RankSizes, heap: Heap) -> Iterator[Phase]:
    """After the last block: the embedding's backward, then the reductions that are left."""
    tables, head, root = s.ends.tables, s.ends.head, s.ends.root
    held = tables.held_bytes + root.held_bytes
    reduced = s.blocks * s.shard_block_elements + head.shard_elements
    behind = s.unit(0).reduce_bytes
    heap.free("ahead", "kept", "casts")
    heap.hold("gradient shards", s.gradient_bytes(reduced))
    heap.hold("gradient of the head", 0 if head else s.head_gradient_bytes)
    heap.hold("embedding's gradient", s.embedding_gradient_bytes)
    heap.hold("reduced behind", behind)
    heap.hold("earlier gradients", held)
    heap.hold("saved", s.other_micro_batches_bytes)
    heap.hold("stream", s.block.residual_bytes)
    yield heap.moment("backward")
    heap.free("root", "stream", "gradient of the head", "embedding's gradient")
    waiting = tables.gradient_bytes + root.gradient_bytes
    for end in (root, tables):
        if not end:
            continue
        heap.hold("gradient shards", s.gradient_bytes(reduced))
        heap.hold("gradients", waiting)
        heap.hold("reduced", end.reduce_bytes)
        heap.hold("reduced behind", behind if s.keeps_reduction_behind else 0)
        yield heap.moment("backward")
        waiting -= end.gradient_bytes
        held -= end.held_bytes
        heap.hold("gradients", waiting + (0 if s.has_lean_units else end.last_gradient_bytes))
        heap.hold("earlier gradients", held)
        heap.hold("reduced shard", end.shard_elements * s.reduced_bytes)
        yield heap.moment("backward")
        heap.free("reduced shard")
        reduced, behind = reduced + end.shard_elements, end.reduce_bytes
