"""Weight gradients: bytes of the unsharded gradients of one block's matrices on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdpplan.cost.model.params import block_tensors
from fsdpplan.spec.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """Bytes of the unsharded weight gradients of one block, in the compute dtype."""

    down: int = 0
    gate: int = 0
    up: int = 0
    output: int = 0
    query: int = 0
    key: int = 0
    value: int = 0
    other: int = 0
    """Router, and the halves of latent projections that read the residual stream."""

    @property
    def total(self) -> int:
        """All matrices of the block."""
        return (
            self.down
            + self.gate
            + self.up
            + self.output
            + self.query
            + self.key
            + self.value
            + self.other
        )


_PART_OF_MATRIX = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "wo": "output",
    "wq": "query",
    "wq_b": "query",
    "wk": "key",
    "wkv_b": "key",
    "wv": "value",
}


@lru_cache(maxsize=1024)
def weight_gradient_bytes(
    *, model: Model, tp: int, element_bytes: int, ep: int = 1
) -> WeightGradients:
    """Unsharded gradients of the matrices of one block on one rank, routed experts together."""
    parts: dict[str, int] = {}
    for tensor in block_tensors(model):
        if tensor.is_matrix:
            matrix = tensor.name.removesuffix(".weight").rpartition(".")[2]
            part = _PART_OF_MATRIX.get(matrix, "other")
            size = prod(tensor.local_shape(tp, ep)) * element_bytes
            parts[part] = parts.get(part, 0) + size
    return WeightGradients(**parts)
