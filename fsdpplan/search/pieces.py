"""Pieces: head and loss computed piece by piece, where the logits stand in the way.

It costs next to nothing, but is one setting more: so it is tried with every layout that it spares
some recomputation, or lets fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdpplan.cost.formats import local_tokens
from fsdpplan.search.pins import Pins
from fsdpplan.search.program_rules import loss_problem
from fsdpplan.search.rule import Problem
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.program import program_named
from fsdpplan.spec.training import DTYPE_BYTES, Training

PIECE_TOKENS = 1024
"""Tokens of a piece at the most: enough rows for matmuls at full rate."""

MOST_BYTES_A_LOGIT = 32
"""More than what all tensors of a whole loss, and what is reserved beside them, take."""

MANY_LOSSES_SCHEDULES = frozenset({"gpipe", "looped_bfs", *SPLIT_BACKWARD_SCHEDULES})
"""Schedules that have several losses waiting, each of which would hold a gradient of the head's
weight."""


def in_pieces(layout: Layout, *, training: Training, pins: Pins) -> Layout | None:
    """`layout` with its loss in pieces; None where it cannot be, or the user has fixed them."""
    tokens = local_tokens(training=training, layout=layout)
    pieces = replace(layout, loss_chunks=max(2, -(-tokens // PIECE_TOKENS)))
    is_free = pins.loss_chunks is None
    illegal = next(pieces_problems(layout=pieces, training=training), None)
    return pieces if is_free and illegal is None else None


def most_saved_bytes(layout: Layout, *, model: Model, training: Training) -> int:
    """What pieces can spare at the most: logits, and the head as autocast keeps it beside them."""
    tokens = local_tokens(training=training, layout=layout)
    head = 0 if layout.sharding == "fsdp" else DTYPE_BYTES["fp32"] * model.hidden
    return (MOST_BYTES_A_LOGIT * tokens + head) * -(-model.vocab // layout.tp)


def pieces_problems(*, layout: Layout, training: Training) -> Iterator[Problem]:
    """What is wrong with the number of pieces."""
    if layout.loss_chunks == 1:
        return
    if training.runtime != "fsdp2":
        yield Problem(
            reason="a loss in pieces with another runtime",
            sentence=f"runtime {training.runtime} has a loss of its own, not one in "
            f"{layout.loss_chunks} pieces; leave --loss-chunks out, or use --runtime fsdp2",
        )
    program = program_named(training.program)
    if not program.knows_blocks:
        yield loss_problem(layout, program)
    tokens = local_tokens(training=training, layout=layout)
    if layout.loss_chunks > tokens:
        yield Problem(
            reason="more pieces of the loss than tokens",
            sentence=f"{tokens} tokens a micro-batch and rank do not split into "
            f"{layout.loss_chunks} pieces; use a --loss-chunks of at most {tokens}",
        )
    if layout.schedule in MANY_LOSSES_SCHEDULES:
        yield Problem(
            reason="a loss in pieces with a schedule that has many waiting",
            sentence=f"schedule {layout.schedule} has losses of several micro-batches waiting, and "
            "in pieces each holds a gradient of the head's weight; use --schedule 1f1b or "
            "interleaved_1f1b, or --loss-chunks 1",
        )
