"""Runtimes: how the software named in a row reduces gradients, where not as PyTorch does.

Each entry is a fact of that software with its source, never a number fitted to a table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpplan.spec.layout import DDP_BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a software reduces the gradients of replicated parameters."""

    name: str
    half_gradients: tuple[str, ...] = ()
    """Number formats whose gradients are reduced as they are; others are reduced in fp32."""
    ddp_bucket_bytes: int | None = DDP_BUCKET_BYTES
    """fp32 bytes of parameters whose gradients are reduced together; None: all that a rank has."""
    bucket_words: str = "buckets of 25 MiB"


PYTORCH = Runtime(name="PyTorch")
"""torch.nn.parallel.DistributedDataParallel with its defaults."""

RUNTIMES = (
    # One all-reduce of the gradient buffer after backward; the buffer is fp32 only with
    # accumulate-allreduce-grads-in-fp32, which Megatron sets by itself under bf16.
    # Source: Megatron-LM before Megatron Core, megatron/model/distributed.py and arguments.py.
    # DeepSpeed's pipeline engine likewise reduces after its last backward pass.
    (
        re.compile(r"^megatron-(lm|deepspeed)", re.I),
        Runtime(
            name="Megatron",
            half_gradients=("fp16",),
            ddp_bucket_bytes=None,
            bucket_words="one piece after backward",
        ),
    ),
    # Parameters and gradients stay in half precision, and a bucket has 512 Mi elements.
    # Source: InternEvo internlm/solver/optimizer/hybrid_zero_optim.py, configs/7B_sft.py.
    (
        re.compile(r"internevo", re.I),
        Runtime(
            name="InternEvo",
            half_gradients=("bf16", "fp16"),
            ddp_bucket_bytes=4 * 512 * 2**20,
            bucket_words="buckets of 512 Mi elements",
        ),
    ),
    # MixedPrecision reduces in bf16. Source: fms-fsdp, fms_fsdp/policies/mixed_precision.py.
    (re.compile(r"fms-fsdp", re.I), Runtime(name="fms-fsdp", half_gradients=("bf16",))),
)
"""Runtimes by the name of the framework, the first that matches."""


def runtime_of(framework: str) -> Runtime:
    """What is known of `framework`; PyTorch's own ways where nothing is."""
    return next((runtime for pattern, runtime in RUNTIMES if pattern.search(framework)), PYTORCH)
