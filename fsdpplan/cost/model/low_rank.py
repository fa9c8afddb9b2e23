"""Low rank: what PowerSGD makes of the gradients of a bucket.

A matrix M of n x m that is worth it is sent as P = M Q (n x r) and Q = Mᵀ P (m x r); vectors, and
matrices that would hardly shrink, are sent as they are, together. What P Qᵀ lacks of M is added to
the next step's gradient (error feedback).

Source: Vogels et al., "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2; torch 2.13
torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `powerSGD_hook`, `_should_compress`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

LEAST_COMPRESSION = 2
"""torch's `min_compression_rate`: P and Q together are less than this part of M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Elements of a bucket, by how they are sent."""

    whole: int = 0
    """Sent as they are."""
    compressed: int = 0
    """Of matrices that are not sent."""
    p: int = 0
    q: int = 0
    matrices: int = 0
    """How many are compressed."""


def low_rank(shapes: Iterable[tuple[int, ...]], rank: int) -> LowRank:
    """What becomes of gradients of `shapes`, each seen as rows x all the rest.

    M is compressed if 2 r (n + m) < n m, with r = min(n, m, rank).
    """
    whole = compressed = p = q = matrices = 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        r = min(n, m, rank)
        if LEAST_COMPRESSION * r * (n + m) < n * m:
            compressed, p, q, matrices = compressed + n * m, p + n * r, q + m * r, matrices + 1
        else:
            whole += n * m
    return LowRank(whole=whole, compressed=compressed, p=p, q=q, matrices=matrices)


TRAFFIC_BYTES_PER_ELEMENT = 44
"""fp32: the error is added (12), the bucket copied (8), read for P, then for Q (8), written from
both (4), and what is lacking subtracted (12). What is sent as it is moves as much, near enough."""

KERNELS_PER_MATRIX = 3
"""Three batched products."""

KERNELS_PER_COLUMN = 12
"""Gram-Schmidt of P and of Q: norm and division of each column, then product, sum, product and
difference over those that are left. Above rank 2 torch takes a QR, priced the same."""
