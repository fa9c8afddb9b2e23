"""Attention kernel: which of PyTorch's the trainer's attention is given, and what that computes.

PyTorch's kernel of windows and documents looks at a window's tiles only. Where there is none, the
trainer adds a mask to the scores, and the whole square is computed; of packed documents, which then
go one by one, pieces of as many queries as the window, with the keys that they see.

Source: fsdpplan/trainer/model/attention.py, `takes_windows` and `make_masks`, documents.py; tests
hold both together (tests/trainer/model/test_attention_kernel.py).
"""

from __future__ import annotations

from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.torch_features import WINDOWED_KERNEL
from fsdpplan.spec.training import Training

EXTRA_WIDTH = 8
"""Columns that ALiBi adds to a head, and sinks: kernels take widths that 8 divides."""

WIDEST_HEAD, WIDTH_STEP = 256, 8
"""Heads that the kernel takes: torch 2.13 aten/src/ATen/native/transformers/cuda/flash_attn."""

OLDEST_DEVICE = 8
"""CUDA's major compute capability: Ampere."""


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
    capability = device.compute_capability
    return capability is None or int(capability.partition(".")[0]) >= OLDEST_DEVICE


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
