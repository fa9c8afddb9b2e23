"""Torch traits: where bytes depend on the release of PyTorch that will run."""

from __future__ import annotations

from fsdpplan.spec.torch_release import TorchRelease
from fsdpplan.spec.training import Training

LEAN_PIPELINES = TorchRelease(2, 15)


def has_lean_pipelines(training: Training) -> bool:
    """Whether pipeline stages make room for a message when it comes, and let go of what has been
    sent and of weights' gradients that have been added up.

    Before torch 2.15 a rank has a buffer for each message of a step, and under schedules that split
    backward the latest gradients of weights beside their sums. So it is priced where no release is
    said. Source: torch/distributed/pipelining/stage.py of both, and the peaks of their schedules
    under a fake process group (tests/ground_truth/test_pipeline.py).
    """
    release = training.torch_release
    return release is not None and release >= LEAN_PIPELINES
