"""Compute: seconds of one block on one rank, communication apart.

    block = max(matmuls + attention + element-wise traffic + kernel starts, what the host needs)

Matmuls by shape (`products`), attention by its tiles at its own efficiency (`attention`),
element-wise work by bytes over the memory bandwidth (`elementwise`, `experts`, `fp8`), and a floor
for small shapes: an eager program cannot start operators faster than the host dispatches them
(`dispatch`). Head, loss and embedding are in `head`, the optimizer in `optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.dispatch import (
    CHECKPOINT_OPERATORS,
    element_wise_kernels,
    host_seconds,
)
from fsdpplan.cost.kernels.elementwise import element_wise_bytes
from fsdpplan.cost.kernels.fp8 import fp8_cast_bytes
from fsdpplan.cost.kernels.products import (
    backward_products_seconds,
    block_products,
    forward_product_seconds,
)
from fsdpplan.cost.kernels.recomputed import repeated_products
from fsdpplan.cost.kernels.work import BlockSeconds, BlockWork, memory_bytes_per_second
from fsdpplan.spec.cluster import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """Seconds of the device for one direction of a block, by part."""

    matmuls: float
    attention: float
    element_wise: float
    """Traffic of norms, additions, rotations, activations, casts and routing, and the time that
    its kernels take to start."""

    @property
    def total(self) -> float:
        """All parts, one behind the other on one stream."""
        return self.matmuls + self.attention + self.element_wise


def device_parts(work: BlockWork, device: Device) -> tuple[DeviceParts, DeviceParts]:
    """What the device does in a block's (forward, backward), recomputation apart."""
    return _device_parts(_on_device(work), device)


def _on_device(work: BlockWork) -> BlockWork:
    """`work` without what only the host has to do with, and what backward recomputes: all blocks
    that differ in these alone do the same."""
    return replace(work, mode="none", wrapper_operators=0.0)


@lru_cache(maxsize=8192)
def _device_parts(work: BlockWork, device: Device) -> tuple[DeviceParts, DeviceParts]:
    memory = memory_bytes_per_second(device)
    streamed = element_wise_bytes(work)
    cast = fp8_cast_bytes(work)
    weight_cast = autocast_bytes(work)
    kernels = element_wise_kernels(work)
    start = device.fit.matmul_start_seconds
    forward, backward = (
        (s + c + weight_cast) / memory + k * start
        for s, c, k in zip(streamed, cast, kernels, strict=True)
    )
    return (
        DeviceParts(
            matmuls=sum(forward_product_seconds(work, device).values())
            / device.fit.sustained(work.family),
            attention=attention_forward_seconds(work, device),
            element_wise=forward,
        ),
        DeviceParts(
            matmuls=backward_products_seconds(work, device),
            attention=attention_backward_seconds(work, device),
            element_wise=backward,
        ),
    )


@lru_cache(maxsize=8192)
def block_seconds(work: BlockWork, device: Device) -> BlockSeconds:
    """Seconds of one block for one micro-batch on one rank, communication apart."""
    on_device = _on_device(work)
    parts = _device_parts(on_device, device)
    forward, backward = parts[0].total, parts[1].total
    recompute = _recompute_seconds(work, parts[0], on_device, device)
    launch = device.fit.kernel_launch_seconds
    forward_host, backward_host = host_seconds(work, kernel_launch_seconds=launch)
    again_host = forward_host * _repeated_share(work)
    if work.mode in ("op", "full") and not work.compiled:
        again_host += CHECKPOINT_OPERATORS * launch
    slower_forward = max(forward, forward_host)
    # the host dispatches recomputation and backward as one stretch
    slower_backward = max(recompute + backward, again_host + backward_host)
    plain_backward = max(backward, backward_host)
    return BlockSeconds(
        forward_seconds=slower_forward,
        recompute_seconds=max(0.0, slower_backward - plain_backward),
        backward_seconds=plain_backward,
        forward_host_seconds=forward_host,
        recompute_host_seconds=again_host,
        backward_host_seconds=backward_host,
        forward_device_seconds=forward,
        recompute_device_seconds=recompute,
        backward_device_seconds=backward,
    )


def autocast_bytes(work: BlockWork) -> float:
    """Autocast copies each fp32 weight to the compute dtype in forward, and its gradient back."""
    if not work.autocast or work.precision == "fp32":
        return 0.0
    weights = sum(product.weight_elements for product in block_products(work))
    return float(weights * (4 + work.element_bytes))


def _recompute_seconds(
    work: BlockWork, forward: DeviceParts, on_device: BlockWork, device: Device
) -> float:
    """Forward work that the device repeats in backward, by mode.

    none: nothing, but what a software makes again of latents whatever the mode; full: all but the
    products that are not repeated (`recomputed`); op: the products that are, and
    what is element-wise; attention: the scores, their softmax and the values' sums.
    """
    if work.mode in ("none", "attention"):
        made_again = _latents_seconds(work, on_device, device) if work.remakes_latents else 0.0
        return made_again + (forward.attention if work.mode == "attention" else 0.0)
    if work.mode == "full" and work.repeats_whole_block:
        return forward.total
    each = forward_product_seconds(on_device, device)
    again = sum(each[product.name] for product in repeated_products(work))
    again /= device.fit.sustained(work.family)
    if work.mode == "op":
        return again + forward.element_wise
    return max(0.0, forward.total - (forward.matmuls - again))


def _latents_seconds(work: BlockWork, on_device: BlockWork, device: Device) -> float:
    """The products that make queries, keys and values of latents; their norms are left out."""
    each = forward_product_seconds(on_device, device)
    again = sum(each.get(name, 0.0) for name in ("wq_b", "wkv_b"))
    return again / device.fit.sustained(work.family)


def _repeated_share(work: BlockWork) -> float:
    """Share of forward's operators that recomputation dispatches again."""
    match work.mode:
        case "none":
            return 0.0
        case "attention":
            return 0.1
        case "op":
            return 0.8
        case "full":
            return 1.0
