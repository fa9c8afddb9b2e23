"""Pieces: what a pass through a block, or through the ends of the model, does one after another.

Kernels in the order of the reference decoder, each with what `kernels` says that it takes, and
between them what is waited for of the collectives inside the block. The sum is what `block_times`
says of the pass: what a host needs beyond its device stands at the end, and what element-wise
kernels take is split by the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from fsdpplan.cost.block.operators import repeated_operators
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.compute import Kernel, block_kernels, device_parts
from fsdpplan.cost.kernels.head import layout_embedding_seconds, layout_head_seconds
from fsdpplan.cost.kernels.products import backward_matmul_seconds, forward_matmul_seconds
from fsdpplan.cost.kernels.rates import aligned_fraction, in_family
from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.cost.model.params import PLACES, Place
from fsdpplan.cost.model.shards import Stage, block_cases
from fsdpplan.cost.timeline.events import Kind
from fsdpplan.cost.traffic.block_times import AxisSeconds, block_times, exposed_seconds
from fsdpplan.cost.traffic.calls import BlockCall
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES
from fsdpplan.spec.values import replace

Direction = Literal["", "forward", "recompute", "backward"]


class Piece(NamedTuple):
    """A kernel, or a wait for a collective."""

    name: str
    kind: Kind
    seconds: float
    direction: Direction
    calls: tuple[BlockCall, ...] = ()
    """Of a wait, which may be of no time at all: what is waited for, one after another."""
    block: int | None = None
    """Of the model, where it was given a name there."""


def merged(pieces: Iterable[Piece], name: str) -> tuple[Piece, ...]:
    """What is computed of each pass as one piece of that `name`, and the waits for each axis."""
    computed: dict[Direction, float] = {}
    waits: dict[tuple[Direction, str], float] = {}
    calls: dict[tuple[Direction, str], dict[BlockCall, int]] = {}
    for piece in pieces:
        way = piece.direction
        computed.setdefault(way, 0.0)
        if not piece.calls:
            computed[way] += piece.seconds
            continue
        key = (way, piece.calls[0].group.axis)
        waits[key] = waits.get(key, 0.0) + piece.seconds
        numbers = calls.setdefault(key, {})
        for call in piece.calls:
            alike = {"place": "attention", "is_first": False, "overlap": "none", "share": 1.0}
            one = replace(call, count=1, when="forward", **alike)
            numbers[one] = numbers.get(one, 0) + call.count
    found: list[Piece] = []
    for way, seconds in computed.items():
        assert way
        found.append(Piece(name, way, seconds, way))
        for (of, axis), waiting in waits.items():
            if of == way:
                made = tuple(replace(c, count=n) for c, n in calls[of, axis].items())
                found.append(Piece(f"waits for {axis}", "wait", waiting, way, made))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Passes:
    """Both passes of one micro-batch."""

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    """Recomputation included."""

    def merged(self) -> Passes:
        """The same with all that is computed in a pass as one piece."""
        return Passes(merged(self.forward, "forward"), merged(self.backward, "backward"))

    def of_block(self, number: int) -> Passes:
        """The same with the names of the model's block of that number."""
        return Passes(
            *(
                tuple(
                    piece._replace(name=f"layers.{number}.{piece.name}", block=number)
                    for piece in pieces
                )
                for pieces in (self.forward, self.backward)
            )
        )


NO_PASSES = Passes((), ())
EMBEDDING = "tok_embeddings"
"""The embedding's piece of a pass."""


_STREAMED: dict[Place, str] = {
    "attention_in": "first norm",
    "attention": "rotation",
    "attention_out": "stream",
    "ffn_in": "second norm",
    "ffn_out": "activation",
}
"""Element-wise kernels by what they stand beside, as most of them are."""


@lru_cache(maxsize=256)
def block_pieces(case: Case) -> Passes:
    """One block of the case."""
    times, work = block_times(case), block_work(case)
    seconds, device = times.seconds, case.cluster.device
    first, then = device_parts(work, device)
    kernels = block_kernels(work, device)
    waits = _waits(case, times.calls, times.waiting.forward_by_axis, ("forward",))
    forward = _in_order(
        kernels, element_wise=first.element_wise, waits=waits["forward"], direction="forward"
    )
    waits = _waits(case, times.calls, times.waiting.backward_by_axis, ("recompute", "backward"))
    again = {operator.name: operator for operator in repeated_operators(work)}
    repeated = [
        Kernel(own, kernel.forward if own.product or own.kind == "attention" else 0.0)
        for kernel in kernels
        if (own := again.get(kernel.operator.name))
    ]
    alone = sum(kernel.forward for kernel in repeated)
    recompute = _in_order(
        repeated,
        element_wise=max(0.0, seconds.recompute_device_seconds - alone),
        waits=waits["recompute"],
        direction="recompute",
    )
    backward = _in_order(
        kernels, element_wise=then.element_wise, waits=waits["backward"], direction="backward"
    )
    idle = seconds.forward_seconds - seconds.forward_device_seconds
    idle_behind = seconds.recompute_seconds + seconds.backward_seconds
    idle_behind -= seconds.recompute_device_seconds + seconds.backward_device_seconds
    return Passes(
        forward=(*forward, *_launch(idle, "forward")),
        backward=(*recompute, *backward, *_launch(idle_behind, "backward")),
    )


def _launch(seconds: float, direction: Direction) -> tuple[Piece, ...]:
    """What the device waits for its host to start kernels."""
    return (Piece("kernel starts", "launch", seconds, direction),) if seconds > 0 else ()


_Wait = tuple[BlockCall, float]


def _waits(
    case: Case, calls: Iterable[BlockCall], by_axis: AxisSeconds, whens: Sequence[str]
) -> dict[str, list[_Wait]]:
    """(call, exposed seconds) of the calls of each pass: an axis' waiting, where some of it hides
    behind the host, in the proportion of what they would expose without."""
    work = block_work(case)
    own = [
        (call, exposed_seconds(call, work=work, cluster=case.cluster))
        for call in calls
        if call.when in whens
    ]
    alone: dict[str, float] = {}
    for call, seconds in own:
        alone[call.group.axis] = alone.get(call.group.axis, 0.0) + seconds
    left = {axis: seconds / alone[axis] if alone[axis] else 0.0 for axis, seconds in by_axis}
    found: dict[str, list[_Wait]] = {when: [] for when in whens}
    for call, seconds in own:
        found[call.when].append((call, seconds * left[call.group.axis]))
    return found


def _in_order(
    kernels: Sequence[Kernel], *, element_wise: float, waits: list[_Wait], direction: Direction
) -> list[Piece]:
    """Kernels place by place, the last place first in backward; waits before or behind them. What
    is element-wise takes its part of all such seconds by bytes, one piece a place."""
    is_back = direction == "backward"
    moved = dict.fromkeys(PLACES, 0.0)
    for operator, *_ in kernels:
        moved[operator.place] += operator.backward_bytes if is_back else operator.forward_bytes
    whole = sum(moved.values())
    pieces: list[Piece] = []
    for place in reversed(PLACES) if is_back else PLACES:
        waited = {
            is_first: [
                Piece(f"waits for {call.group.axis}", "wait", seconds, direction, (call,))
                for call, seconds in waits
                if call.place == place and call.is_first == is_first
            ]
            for is_first in (True, False)
        }
        pieces += waited[True]
        own = [
            piece
            for kernel in kernels
            if kernel.operator.place == place
            for piece in _of_kernel(kernel, direction)
        ]
        share = moved[place] / whole if whole else float(place == "ffn_out")
        streamed = (
            [Piece(_STREAMED[place], "elementwise", element_wise * share, direction)]
            if element_wise and share
            else []
        )
        pieces += own + streamed if is_back else streamed + own
        pieces += waited[False]
    return pieces


def _of_kernel(kernel: Kernel, direction: Direction) -> list[Piece]:
    """Its product, or both of backward; attention where it takes time."""
    operator = kernel.operator
    is_back = direction == "backward"
    if operator.product:
        each = {"": kernel.forward}
        if is_back:
            each = {" by input": kernel.by_input, " by weight": kernel.by_weight}
        return [Piece(operator.name + of, "matmul", own, direction) for of, own in each.items()]
    seconds = kernel.by_input if is_back else kernel.forward
    if operator.kind != "attention" or not seconds:
        return []
    return [Piece("attention", "attention", seconds, direction)]


def end_pieces(case: Case, stage: Stage) -> Passes:
    """Embedding, final norm, head and loss of a stage."""
    forward: list[Piece] = []
    backward: list[Piece] = []
    if stage.has_embedding:
        looked_up = layout_embedding_seconds(case, is_tied_here=stage.has_head)
        forward.append(Piece(EMBEDDING, "elementwise", looked_up[0], "forward"))
    if stage.has_head:
        whole, matmuls = layout_head_seconds(case), _head_matmuls(case)
        forward += [
            Piece("output", "matmul", matmuls[0], "forward"),
            Piece("loss", "elementwise", whole[0] - matmuls[0], "forward"),
        ]
        backward += [
            Piece("loss", "elementwise", whole[1] - matmuls[1], "backward"),
            Piece("output", "matmul", matmuls[1], "backward"),
        ]
    if stage.has_embedding:
        backward.append(Piece(EMBEDDING, "elementwise", looked_up[1], "backward"))
    return Passes(
        forward=tuple(piece for piece in forward if piece.seconds),
        backward=tuple(piece for piece in backward if piece.seconds),
    )


def _head_matmuls(case: Case) -> tuple[float, float]:
    """The head's product in (forward, backward), as `kernels/head` prices it: all of it in forward
    where the loss is made in pieces."""
    model, training, layout = case.model, case.training, case.layout
    device = in_family(case.cluster.device, training.family)
    dtype = "bf16" if training.precision == "fp8" else training.precision
    vocab = model.vocab_rows(layout.tp) // layout.tp
    tokens = local_tokens(training=training, layout=layout)
    shapes = ((-(-tokens // layout.loss_chunks), vocab, model.hidden),)
    share = aligned_fraction(vocab, element_bytes=DTYPE_BYTES[dtype], device=device)
    if training.traits.pads_vocabulary and layout.loss_chunks == 1:
        share = 1.0
    forward = forward_matmul_seconds(shapes, dtype=dtype, device=device) / share
    backward = backward_matmul_seconds(shapes, dtype=dtype, device=device) / share
    if layout.loss_chunks > 1:
        return layout.loss_chunks * (forward + backward), 0.0
    return forward, backward


def own_blocks(case: Case, stage: Stage) -> list[Case]:
    """The case as it is for each block of a stage, kind by kind in the order of forward: of one
    kind those that recompute stand before those that keep everything."""
    return [
        own
        for piece in stage.pieces
        for own, number in block_cases(case, piece)
        for _ in range(number)
    ]
