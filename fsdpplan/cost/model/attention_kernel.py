"""Attention kernel: which one attention is computed by, and what that computes.

    cudnn       for the asynchronous tensor cores of Hopper and Blackwell; FlashAttention-3 is as
                fast. Megatron Core's, and torch's first choice there since 2.11
    flash       FlashAttention-2: 16 bits, since Ampere, no mask
    efficient   fused, for fp32, masks and devices before Ampere
    scores      plain scores in memory, T x T

torch tries cuDNN's, FlashAttention-2, the memory-efficient kernel and plain scores in that order,
and takes the first that knows the call (`TORCH_KERNELS`).

Sources: torch 2.13 and 2.14 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `priority_order`,
`check_prefer_cudnn_attention`, `check_cudnn_tensor_shapes`, `can_use_flash_attention`,
`can_use_mem_efficient_attention`; the kernels' names in profiles of torch 2.11 on an H100; 2.9.1
begins with FlashAttention.

PyTorch's kernel of windows and documents looks at a window's tiles only. Where there is none, the
trainer adds a mask to the scores, and the whole square is computed; of packed documents, which then
go one by one, pieces of as many queries as the window, with the keys that they see.

Source: fsdpplan/trainer/model/attention.py, `takes_windows` and `make_masks`, documents.py; tests
hold both together (tests/trainer/model/test_attention_kernel.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.torch_features import WINDOWED_KERNEL
from fsdpplan.spec.training import TorchRelease, Training

AttentionKernel = Literal["cudnn", "flash", "efficient", "scores"]
"""What computes softmax attention."""

CUDNN_FIRST = TorchRelease(2, 11)
"""Since when torch tries cuDNN's kernel first on Hopper and Blackwell."""

ASYNCHRONOUS = (9, 10)
"""CUDA's major compute capabilities with asynchronous tensor cores: Hopper, Blackwell of data
centres. Not those of workstations, 12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """Calls that one of torch's kernels takes."""

    kernel: AttentionKernel
    majors: tuple[int, ...] | None
    """CUDA's major compute capabilities; None: from `oldest` on."""
    oldest: int
    widest_head: int
    takes_fp32: bool = False
    takes_masks: bool = False
    """Any mask but the causal one."""
    since: TorchRelease | None = None
    """The release from which it is tried first; None: all that are supported have it."""


TORCH_KERNELS = (
    KernelRule(
        kernel="cudnn",
        majors=ASYNCHRONOUS,
        oldest=9,
        widest_head=128,
        takes_masks=True,
        since=CUDNN_FIRST,
    ),
    KernelRule(kernel="flash", majors=None, oldest=8, widest_head=256),
    KernelRule(
        kernel="efficient",
        majors=None,
        oldest=5,
        widest_head=65536,
        takes_fp32=True,
        takes_masks=True,
    ),
)
"""In the order in which torch tries them; plain scores behind all. (cuDNN's takes heads of up to
256 on Hopper from cuDNN 9.10 on: left out.)"""

EXTRA_WIDTH = 8
"""Columns that ALiBi adds to a head, and sinks: kernels take widths that 8 divides."""

WIDEST_HEAD, WIDTH_STEP = 256, 8
"""Heads that the kernel takes: torch 2.13 aten/src/ATen/native/transformers/cuda/flash_attn."""

OLDEST_DEVICE = 8
"""CUDA's major compute capability: Ampere."""


def has_asynchronous_cores(device: Device) -> bool:
    """Whether kernels such as cuDNN's are written for the device."""
    if device.kind != "cuda" or device.vendor != "nvidia":
        return False
    return _major(device) in ASYNCHRONOUS


def attention_kernel(*, model: Model, training: Training, device: Device) -> AttentionKernel:
    """The kernel of the model's attention, masks of windows apart (`masked_share`)."""
    traits = training.traits
    if not traits.flash_attention:
        return "scores"
    if traits.native_attention:
        is_half = training.activation_dtype != "fp32"
        return "cudnn" if has_asynchronous_cores(device) and is_half else "flash"
    if not traits.reference_decoder or device.kind == "cpu":
        return "flash"
    is_narrow = 0 < model.sliding_window < training.seq_len
    if (is_narrow or training.packed) and takes_windows(
        model=model, training=training, device=device
    ):
        return "flash"  # of windows and documents
    return torch_kernel(
        width=model.head_dim + added_width(model),
        is_masked=False,
        training=training,
        device=device,
    )


def torch_kernel(
    *, width: int, is_masked: bool, training: Training, device: Device
) -> AttentionKernel:
    """The first of torch's that takes heads of that width."""
    if device.vendor != "nvidia":
        return "flash"
    major, is_fp32 = _major(device), training.activation_dtype == "fp32"
    for rule in TORCH_KERNELS:
        is_made_for = major in rule.majors if rule.majors else major >= rule.oldest
        if (
            is_made_for
            and width <= rule.widest_head
            and (rule.takes_masks or not is_masked)
            and (rule.takes_fp32 or not is_fp32)
            and (rule.takes_fp32 or width % WIDTH_STEP == 0)
            and (rule.since is None or _is_of(training, rule.since))
        ):
            return rule.kernel
    return "scores"


def _is_of(training: Training, since: TorchRelease) -> bool:
    """Where no release is said, it is the newest; of a software before fused norms an old one."""
    release = training.torch_release
    if release is None:
        return not training.traits.composite_norms
    return release >= since


def _major(device: Device) -> int:
    """CUDA's major compute capability; of a GPU that does not say it, Ampere's."""
    capability = device.compute_capability
    return OLDEST_DEVICE if capability is None else int(capability.partition(".")[0])


def added_width(model: Model) -> int:
    """Columns that the trainer adds to queries and keys for what no kernel knows; values are made
    as wide."""
    return EXTRA_WIDTH * ((model.positions == "alibi") + model.attention_sinks)


def takes_windows(*, model: Model, training: Training, device: Device) -> bool:
    """Whether PyTorch's kernel of windows and documents is given the model's attention: since torch
    2.12, on NVIDIA's devices since Ampere, in 16 bits, without sinks and dropout."""
    width = model.head_dim + EXTRA_WIDTH * (model.positions == "alibi")
    fits = width <= WIDEST_HEAD and width % WIDTH_STEP == 0
    has_kernel = _has_kernel(training) and _is_recent(device)
    knows = not model.attention_sinks and not training.dropped.attention
    return has_kernel and fits and knows and training.activation_dtype != "fp32"


def _has_kernel(training: Training) -> bool:
    """Where no release is said, it is one that has it."""
    release = training.torch_release
    return release is None or release >= WINDOWED_KERNEL.since


def _is_recent(device: Device) -> bool:
    """Where nothing is said of an NVIDIA GPU, it is."""
    if device.kind != "cuda" or device.vendor != "nvidia":
        return False
    return _major(device) >= OLDEST_DEVICE


def masked_share(*, model: Model, training: Training, device: Device) -> float:
    """Share of the model's blocks whose attention is given a mask."""
    is_narrow = 0 < model.sliding_window < training.seq_len
    if not (is_narrow and training.traits.reference_decoder):
        return 0.0
    if takes_windows(model=model, training=training, device=device):
        return 0.0
    return model.windowed_blocks / model.layers


def documents_one_by_one(*, model: Model, training: Training, device: Device) -> bool:
    """Whether packed documents go through attention one after the other."""
    return training.packed and not takes_windows(model=model, training=training, device=device)
