"""Pieces: head and loss computed piece by piece, where the logits stand in the way.

It costs next to nothing, but is one setting more; and the fewer pieces, the less it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.program import loss_problem
from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.program import program_named
from fsdpplan.spec.training import DTYPE_BYTES, Training

PIECE_TOKENS = 1024
"""Tokens of a piece at the most: enough rows for matmuls at full rate."""

MOST_BYTES_A_LOGIT = 32
"""More than what all tensors of a whole loss, and what is reserved beside them, take."""

LEAST_PIECE_TOKENS = 128
"""Of a piece at the least: with fewer, kernels are started more often than they are worth."""

MANY_LOSSES_SCHEDULES = frozenset({"gpipe", "looped_bfs", *SPLIT_BACKWARD_SCHEDULES})
"""Schedules that have several losses waiting, each of which would hold a gradient of the head's
weight."""


def piece_counts(layout: Layout, *, training: Training, pins: Pins) -> tuple[int, ...]:
    """Numbers of pieces that the loss of `layout` can have, ascending; none where it cannot be cut,
    or the user has fixed them."""
    if pins.loss_chunks is not None or next(_refusals(layout, training), None):
        return ()
    tokens = local_tokens(training=training, layout=layout)
    powers = {2**n for n in range(1, max(1, tokens // LEAST_PIECE_TOKENS).bit_length())}
    return tuple(sorted(n for n in {*powers, usual_pieces(layout, training)} if n <= tokens))


def usual_pieces(layout: Layout, training: Training) -> int:
    """Pieces that are large enough for matmuls at full rate, and no larger."""
    return max(2, -(-local_tokens(training=training, layout=layout) // PIECE_TOKENS))


def in_pieces(layout: Layout, *, training: Training, pins: Pins) -> Layout | None:
    """`layout` with its loss in the usual pieces; None where it cannot be, or the user has fixed
    them."""
    usual = usual_pieces(layout, training)
    if usual not in piece_counts(layout, training=training, pins=pins):
        return None
    return replace(layout, loss_chunks=usual)


def most_saved_bytes(case: Case) -> int:
    """What pieces can spare at the most: logits, and the head as autocast keeps it beside them."""
    model, layout = case.model, case.layout
    tokens = local_tokens(training=case.training, layout=layout)
    head = 0 if layout.sharding == "fsdp" else DTYPE_BYTES["fp32"] * model.hidden
    return (MOST_BYTES_A_LOGIT * tokens + head) * (model.vocab_rows(layout.tp) // layout.tp)


def pieces_problems(*, layout: Layout, training: Training) -> Iterator[Problem]:
    """What is wrong with the number of pieces."""
    if layout.loss_chunks == 1:
        return
    yield from _refusals(layout, training)
    tokens = local_tokens(training=training, layout=layout)
    if layout.loss_chunks > tokens:
        yield Problem(
            reason="more pieces of the loss than tokens",
            sentence=f"{tokens} tokens a micro-batch and rank do not split into "
            f"{layout.loss_chunks} pieces; use a --loss-chunks of at most {tokens}",
        )


def _refusals(layout: Layout, training: Training) -> Iterator[Problem]:
    """Why the loss cannot be cut, into however many pieces."""
    if training.runtime != "fsdp2":
        yield Problem(
            reason="a loss in pieces with another runtime",
            sentence=f"runtime {training.runtime} has a loss of its own, not one in "
            f"{layout.loss_chunks} pieces; leave --loss-chunks out, or use --runtime fsdp2",
        )
    program = program_named(training.program)
    if not program.knows_blocks:
        yield loss_problem(layout, program)
    if layout.schedule in MANY_LOSSES_SCHEDULES:
        yield Problem(
            reason="a loss in pieces with a schedule that has many waiting",
            sentence=f"schedule {layout.schedule} has losses of several micro-batches waiting, and "
            "in pieces each holds a gradient of the head's weight; use --schedule 1f1b or "
            "interleaved_1f1b, or --loss-chunks 1",
        )
