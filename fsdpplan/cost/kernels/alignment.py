"""Alignment: what matmuls lose whose rows do not begin at multiples of sixteen bytes."""

from __future__ import annotations

from fsdpplan.spec.cluster import Device

ALIGNED_BYTES = 16
"""Rows of a matrix that start at multiples of this are loaded sixteen bytes at a time; others one
element at a time, by kernels of an older kind. Source: cuBLAS documentation, tensor core usage."""


def aligned_fraction(*, width: int, element_bytes: int, device: Device) -> float:
    """Rate of a matmul with rows of `width` elements as a share of an aligned one's."""
    aligned = width * element_bytes % ALIGNED_BYTES == 0
    return 1.0 if aligned else device.fit.unaligned_fraction
