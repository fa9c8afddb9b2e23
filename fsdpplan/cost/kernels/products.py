"""Products: seconds of matmuls, forward and backward.

Two products of backward stand behind each forward one: by input, and by weight, whose depth is the
rows.
"""

from __future__ import annotations

from fsdpplan.cost.block.products import Product
from fsdpplan.cost.kernels.rates import (
    aligned_fraction,
    has_tiles,
    matmul_seconds,
    memory_bytes_per_second,
)
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.training import DTYPE_BYTES

GROUP_ROWS = 128
"""Rows of a tile: a grouped matmul computes each expert's rows in whole tiles."""


def product_seconds(product: Product, *, dtype: str, device: Device) -> float:
    """Time of one product on its own.

    A grouped one computes whole tiles of rows for each group, and reads each group's weights.
    """
    share = _aligned_fraction(product, dtype=dtype, device=device)
    if product.groups == 1:
        rows = max(1, round(product.rows))
        return matmul_seconds(m=rows, n=product.n, k=product.k, dtype=dtype, device=device) / share
    tiles = -(-product.rows / product.groups // GROUP_ROWS)
    rows = round(
        max(tiles, 1.0) * GROUP_ROWS * product.groups if has_tiles(device) else product.rows
    )
    tiled = matmul_seconds(m=rows, n=product.n, k=product.k, dtype=dtype, device=device)
    operand = DTYPE_BYTES[dtype]
    traffic = product.weight_elements * operand + product.rows * (
        product.k * operand + product.n * 2
    )
    streamed = traffic / memory_bytes_per_second(device) + device.fit.matmul_start_seconds
    return max(tiled / share, streamed)


def _aligned_fraction(product: Product, *, dtype: str, device: Device) -> float:
    element_bytes = DTYPE_BYTES[dtype]
    return aligned_fraction(product.n, product.k, element_bytes=element_bytes, device=device)


def by_weight_seconds(product: Product, *, dtype: str, device: Device) -> float:
    """The gradient of the weights: (n x rows) @ (rows x k); grouped ones stand side by side."""
    rows = max(1, round(product.rows / product.groups))
    seconds = matmul_seconds(
        m=product.n * product.groups, n=product.k, k=rows, dtype=dtype, device=device
    )
    return seconds / _aligned_fraction(product, dtype=dtype, device=device)


def forward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the products in `shapes`, at the sustained rate."""
    seconds = sum(matmul_seconds(m=m, n=n, k=k, dtype=dtype, device=device) for m, n, k in shapes)
    return seconds / device.fit.sustained_fraction


def backward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the two products behind each forward one: by input and by weight."""
    by_input = tuple((m, k, n) for m, n, k in shapes)
    by_weight = tuple((k, n, m) for m, n, k in shapes)
    return forward_matmul_seconds(by_input + by_weight, dtype=dtype, device=device)
