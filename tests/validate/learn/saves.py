"""Rows of a ledger whose runs have saved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fsdpplan.spec.ledger import LedgerRow
from tests.ledgers import rows_of_a_slow_cluster


@cache
def a_row(gpus: int) -> LedgerRow:
    """A run on so many GPUs."""
    return next(row for row in rows_of_a_slow_cluster(12) if row.machines.gpus == gpus)


def with_saves(row: LedgerRow, *, seconds: float, blocking: float) -> LedgerRow:
    """The same run, with saves that took so long and stopped training for a part of it."""
    observed = replace(
        row.observed,
        checkpoints=4,
        checkpoint_seconds=seconds,
        checkpoint_blocking_seconds=blocking,
    )
    return replace(row, observed=observed)
