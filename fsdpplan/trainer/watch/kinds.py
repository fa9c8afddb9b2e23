"""What the kernels, operators and collectives of a profiler's trace are, by their names.

The one table by which traces are read: the trainer's own windows, and overlays of a prediction.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

WorkKind = Literal["matmul", "attention", "copy", "optimizer", "elementwise", "collective", "host"]
"""What a kernel or operator does. `copy`: into and out of FSDP's flat buffers; `host`: what a
program does around its operators."""


class Pattern(NamedTuple):
    """Names of one kind."""

    kind: WorkKind
    names: str
    """A regular expression, found anywhere in a name, whatever its case."""
    source: str
    """Where such names come from."""


PATTERNS: Final = (
    Pattern(
        "collective",
        r"^nccl|^gloo:|^c10d::|^_c10d_functional",
        "torch 2.13 ProcessGroupNCCL, ProcessGroupGloo: profiling titles; NCCL's ncclDevKernel_*",
    ),
    Pattern(
        "copy",
        r"split_with_sizes_copy|chunk_cat|all_gather_copy_in|all_gather_copy_out|CatArrayBatched",
        "torch 2.13 fsdp/_fully_shard/_fsdp_collectives.py; aten native/cuda/Shape.cu",
    ),
    Pattern(
        "attention",
        r"flash|fmha|scaled_dot_product|cudnn.*sdpa|sdpa.*cudnn|mem_eff|attention",
        "flash-attn csrc/flash_attn; cuDNN's fused attention; aten transformers/attention.cpp",
    ),
    Pattern(
        "optimizer",
        r"multi_tensor_apply|fused_?adam|adamw?_step|^aten::_fused_adam|ScaleRoundedKernel",
        "aten native/cuda/MultiTensorApply.cuh and fused_adamw_impl.cu",
    ),
    Pattern(
        "matmul",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|^Cijk_|splitKreduce|s16816|"
        r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|_grouped_mm|einsum)$|"
        r"^(Mm|Addmm|Bmm|Linear)Backward",
        "cuBLAS and CUTLASS kernels (ampere_*, sm80_*, sm90_*, nvjet_* on Hopper), hipBLASLt's "
        "Cijk_*; aten LinearAlgebra.cpp",
    ),
    Pattern(
        "elementwise",
        r"^aten::|elementwise|reduce_kernel|triton_|layer_norm|rms_norm|RMSNorm|softmax|"
        r"vectorized|index|embedding|copy|fill|memset|memcpy|norm",
        "aten's element-wise and reduction kernels; torch.compile's triton_poi_*, _red_*, _per_*",
    ),
)
"""The first that a name has decides."""

_COMPILED = tuple((each.kind, re.compile(each.names, re.IGNORECASE)) for each in PATTERNS)

COMPUTED: tuple[WorkKind, ...] = ("matmul", "attention", "elementwise", "copy", "optimizer")
"""What keeps a device busy, collectives apart."""


def kernel_kind(name: str) -> WorkKind:
    """What a kernel of a device does; one that no pattern knows is element-wise, as most are."""
    return next((kind for kind, names in _COMPILED if names.search(name)), "elementwise")


def operator_kind(name: str) -> WorkKind:
    """What an operator on the host does; what no pattern knows is the program around it."""
    return next((kind for kind, names in _COMPILED if names.search(name)), "host")


def is_nccl(name: str) -> bool:
    """Whether it is a kernel of NCCL's."""
    return name.startswith("nccl")


NCCL_CARRIES: Final = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
"""What a kernel of NCCL's is, by a word of its name, whatever its case: ncclDevKernel_AllGather_*,
of older releases ncclKernel_AllGather_*."""


def nccl_collective(name: str) -> str | None:
    """What a kernel of NCCL's is; None: its name does not say."""
    plain = name.lower()
    return next((is_of for word, is_of in NCCL_CARRIES.items() if word in plain), None)


def is_gloo(name: str) -> bool:
    """Whether it is a collective on a thread of gloo's."""
    return name.startswith("gloo:")


GLOO_CARRIES: Final = {
    "_allgather_base_": ("all_gather", "all_gather"),
    "allgather_": ("all_gather", "all_gather"),
    "allgather_into_tensor_coalesced_": ("all_gather", "all_gather"),
    "_reduce_scatter_base_": ("all_reduce", "reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": ("all_reduce", "reduce_scatter"),
    "reduce_scatter_": ("all_reduce", "reduce_scatter"),
    "allreduce_": ("all_reduce", "all_reduce"),
    "allreduce_coalesced_": ("all_reduce", "all_reduce"),
    "alltoall_base_": ("all_to_all", "all_to_all"),
    "alltoall_": ("all_to_all", "all_to_all"),
    "broadcast_": ("broadcast", "broadcast"),
}
"""Operator `c10d::...` -> (how gloo's thread names it, what it is): torch's gloo backend reduces
whole where it is asked to scatter (torch 2.13 ProcessGroupGloo.cpp, `_reduce_scatter_base`)."""
