"""Reduction: what DDP's and ZeRO's collectives add to a step, bucket by bucket.

Gradients are reduced beside the backward pass that makes them, or after it; ZeRO-1 and ZeRO-2 then
gather the updated parameters, beside the next forward pass or before it. One communicator takes
its buckets one after another.
"""

from __future__ import annotations


def ddp_exposed_seconds(
    *, bucket_seconds: tuple[float, ...], bucket_bytes: tuple[int, ...], backward_seconds: float
) -> float:
    """What DDP's all-reduces add after backward.

    A bucket is ready when backward has finished its parameters, taken as proportional to bytes;
    buckets are reduced one after another. Source: torch 2.13's reducer launches its buckets in
    order.
    """
    total_bytes = sum(bucket_bytes)
    done_bytes, clock = 0, 0.0
    for seconds, size in zip(bucket_seconds, bucket_bytes, strict=True):
        done_bytes += size
        ready = backward_seconds * done_bytes / total_bytes
        clock = max(clock, ready) + seconds
    return max(0.0, clock - backward_seconds)


def gather_exposed_seconds(
    *, bucket_seconds: tuple[float, ...], bucket_bytes: tuple[int, ...], forward_seconds: float
) -> float:
    """What gathering updated parameters adds to the forward pass that it runs beside.

    Buckets are gathered one after another from the start, in the order in which forward needs
    them; the part of forward that needs a bucket, taken as proportional to bytes, waits for it.
    Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py, `start_param_sync` of
    the next bucket in `finish_param_sync` of each.
    """
    total_bytes = sum(bucket_bytes)
    gathered = clock = 0.0
    for seconds, size in zip(bucket_seconds, bucket_bytes, strict=True):
        gathered += seconds
        clock = max(clock, gathered) + forward_seconds * size / total_bytes
    return max(0.0, clock - forward_seconds)
