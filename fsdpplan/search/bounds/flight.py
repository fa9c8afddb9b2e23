"""Flight: what is in flight on a rank of a pipeline at the least, and which gradients are there.

Of schedules that do not split the backward pass, in closed form: `moments_of_rank` plays them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.schedule.order import layout_order
from fsdpplan.spec.layout import Layout


class Flight(NamedTuple):
    """What is in flight on a rank, at the least."""

    graded: int
    """When gradients of earlier micro-batches are there: 2 when most are in flight, 1 in the last
    backward pass, 0 never for sure."""
    alive: int
    """(micro-batch, block) pairs."""
    rows: int
    """Those of the first block of each of its `stages`."""
    stages: int
    graded_blocks: int = 0
    """Where `graded` is not 2: blocks whose gradients are there when so much is in flight."""


def flights(layout: Layout, stage: Stage, rank: int) -> Iterator[Flight]:
    """Of a rank that holds `stage`, at moments that may hold most.

    The first pairs are those before a rank's first backward pass; with enough micro-batches as many
    are there again behind it.
    """
    number, pp = layout.num_microbatches, layout.pp
    if layout.schedule == "gpipe":
        yield Flight(int(number > 1), number * stage.blocks, number, 1)
        return
    if layout.schedule == "1f1b":
        graded, rows = 2 if number > pp else int(number > 1), min(number, pp - rank)
        yield Flight(graded, rows * stage.blocks, rows, 1)
        return
    a_round = layout_order(layout).round_size
    pieces = [piece.blocks for piece in stage.pieces]
    of_the_last = min(a_round, 2 * (pp - 1 - rank) + 1)
    yield Flight(
        graded_when_interleaved(number, a_round),
        a_round * sum(pieces[:-1]) + of_the_last * pieces[-1],
        a_round * (len(pieces) - 1) + of_the_last,
        len(pieces),
    )
    yield from _in_rhythm(number, a_round, pieces, ahead=2 * (pp - 1 - rank))


def _in_rhythm(number: int, a_round: int, pieces: list[int], *, ahead: int) -> Iterator[Flight]:
    """The last forward pass of interleaved 1F1B, with which as much is in flight as with the first
    that a backward pass follows.

        w = (v - 1) * round + ahead forward passes before that one; then one backward for one
        forward: at the last of v * m forward passes v * m - w - 1 backward passes are over, a round
        of the last stage first, then one of the stage before it

    Which stages they are of, so late, is not asked: each is taken to have as few blocks as any.
    """
    stages, before = len(pieces), (len(pieces) - 1) * a_round + ahead
    over = stages * number - before - 1
    if over <= 0 or not min(pieces):
        return
    begun = min(stages, -(-over // a_round))
    alive = before + 1
    graded = sum(pieces[stages - begun :])
    when = 2 if begun == stages else int(number > a_round)
    yield Flight(when, alive * min(pieces), alive, stages, graded)


def graded_when_interleaved(num_microbatches: int, a_round: int) -> int:
    """`Flight.graded` under interleaved 1F1B: under 1F1B, whose round is no longer, no later."""
    return 2 if num_microbatches > 3 * a_round else int(num_microbatches > a_round)
