"""What one forward pass is given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

IGNORED = -100
"""A target that no loss counts."""


class MicroBatch(NamedTuple):
    """Some sequences, or under context parallelism this rank's part of each."""

    tokens: Tensor
    """(B, T), int64."""
    targets: Tensor
    """(B, T), int64: the token that follows each, or IGNORED."""
    positions: Tensor | None = None
    """(B, T), int64: where in its document each token stands; None: 0, 1, 2 ..."""
    documents: Tensor | None = None
    """(B, whole T), int32: which document each token of the sequence belongs to; None: one."""
