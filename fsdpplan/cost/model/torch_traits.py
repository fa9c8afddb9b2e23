"""Torch traits: where bytes depend on the release of PyTorch that will run."""

from __future__ import annotations

from fsdpplan.spec.torch_release import TorchRelease
from fsdpplan.spec.training import Training

LEAN_PIPELINES = TorchRelease(2, 15)
GRADIENTS_IN_REDUCE_DTYPE = TorchRelease(2, 15)
LEAN_UNITS = TorchRelease(2, 15)
PARTIAL_PRODUCTS = TorchRelease(2, 11)
WINDOWED_KERNEL = TorchRelease(2, 12)
REDUCTIONS_KEPT, REDUCTIONS_LET_GO = TorchRelease(2, 12), TorchRelease(2, 13)


def _runs_since(release: TorchRelease, training: Training) -> bool:
    """Whether `release` or a newer one will run; not where none is said."""
    planned = training.torch_release
    return planned is not None and planned >= release


def has_lean_pipelines(training: Training) -> bool:
    """Whether pipeline stages make room for a message when it comes, and let go of what has been
    sent and of weights' gradients that have been added up; and reduce gradients of embedding and
    head after those of their blocks.

    Before torch 2.15 a rank has a buffer for each message of a step, and under schedules that split
    backward the latest gradients of weights beside their sums, and reduces the root's first. So it
    is priced where no release is said. Source: torch/distributed/pipelining/stage.py of both, and
    the peaks of their schedules under a fake process group (tests/ground_truth/test_pipeline.py).
    """
    return _runs_since(LEAN_PIPELINES, training)


def sums_in_reduce_dtype(training: Training) -> bool:
    """Whether FSDP2's gradients that add up over micro-batches are cast to the reduce dtype one by
    one, and are so when tensor-parallel ranks sum them, and where a loss in pieces makes them
    outside of any unit; before, a whole unit's were together in the compute dtype first.

    Source: `grad_dtype` of torch 2.15's torch/distributed/fsdp/_fully_shard/_fsdp_param.py and
    `_set_unsharded_grad_dtypes` of _fsdp_param_group.py; counts and peaks under a fake process
    group (tests/ground_truth).
    """
    return _runs_since(GRADIENTS_IN_REDUCE_DTYPE, training)


def has_lean_units(training: Training) -> bool:
    """Whether FSDP2 lets go of the flat buffer of a forward gather before the next unit's copy-out,
    and of a gradient before what its reduction returns; before torch 2.15 they overlapped. Seen in
    the peaks of its steps under fake tensors (tests/ground_truth/test_memory.py).
    """
    return _runs_since(LEAN_UNITS, training)


def keeps_reduction_behind(training: Training) -> bool:
    """Whether FSDP2 still has the buffer that a unit's gradients were reduced from while it reduces
    those of the next: torch 2.12 alone, where a loop's variable refers to it to the end of
    `FSDPParamGroup.post_backward`. Seen in the peaks of its steps (tests/ground_truth).
    """
    release = training.torch_release
    return release is not None and REDUCTIONS_KEPT <= release < REDUCTIONS_LET_GO


def sums_before_products(training: Training) -> bool:
    """Whether DTensor sums a gradient of which ranks have parts before it is multiplied, and not
    what comes of it: before torch 2.11 so. Counted with latent attention under tensor parallelism
    (tests/trainer/test_parallel_layouts.py).
    """
    release = training.torch_release
    return release is not None and release < PARTIAL_PRODUCTS


def has_windowed_kernel(training: Training) -> bool:
    """Whether PyTorch has a fused kernel of sliding windows: since torch 2.12, and so it is priced
    where no release is said. Source: torch/nn/attention/varlen.py, `varlen_attn`."""
    release = training.torch_release
    return release is None or release >= WINDOWED_KERNEL
