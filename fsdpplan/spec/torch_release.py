"""Torch release: the PyTorch that a job trains with, as far as a plan depends on it: 2.9, 2.13.

Major and minor decide. A pre-release counts as the release that it leads to: NVIDIA's images hold
such builds, `2.10.0a0+b558c986e8.nv25.11`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.errors import SpecError

_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:[.+a-z_-][0-9A-Za-z.+_-]*)?", re.ASCII)
_IMAGE = re.compile(r"(?P<name>[^:@]+):(?P<tag>[^:@]+)(?:@.*)?")


@dataclass(frozen=True, slots=True, order=True)
class TorchRelease:
    """A release of PyTorch, by the two numbers that decide what it can do."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST = TorchRelease(2, 8)
"""The first release under which the trainer runs."""
NEWEST_TESTED = TorchRelease(2, 15)
"""The last release that the trainer was tested under; newer ones are tried, and said to be new."""

NVIDIA_IMAGES: dict[str, TorchRelease] = {
    **dict.fromkeys(("25.05", "25.06", "25.08"), TorchRelease(2, 8)),
    **dict.fromkeys(("25.09", "25.10"), TorchRelease(2, 9)),
    **dict.fromkeys(("25.11", "25.12", "26.01"), TorchRelease(2, 10)),
    **dict.fromkeys(("26.02", "26.03"), TorchRelease(2, 11)),
    **dict.fromkeys(("26.04", "26.05"), TorchRelease(2, 12)),
    **dict.fromkeys(("26.06", "26.07"), TorchRelease(2, 13)),
    "26.08": TorchRelease(2, 14),
}
"""Release in each image nvcr.io/nvidia/pytorch:YY.MM-py3. Source: `torch.__version__` in it, which
ends in the image's own name (2.9.0a0+145a3a7bda.nv25.10); the same stand in its release notes,
docs.nvidia.com/deeplearning/frameworks/pytorch-release-notes/rel-25-12.html."""


@lru_cache(maxsize=64)
def torch_release(version: str) -> TorchRelease:
    """The release of a version: `2.9`, `2.9.1`, `2.13.0+cu128`, `2.10.0a0+git.nv25.11`."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise SpecError(
            f"torch {version!r} is no version of PyTorch: write it as 2.9 or 2.9.1, or as "
            "torch.__version__ prints it"
        )
    return TorchRelease(int(found[1]), int(found[2]))


def require_supported(release: TorchRelease) -> None:
    """Raise SpecError where the trainer does not run under `release`."""
    if release < OLDEST:
        raise SpecError(
            f"torch {release} is older than {OLDEST}, the oldest that the trainer runs under: "
            f"pip install 'torch>={OLDEST}', or take an image with it, such as {image_with(OLDEST)}"
        )


def image_with(release: TorchRelease) -> str:
    """A public image that has `release` or, where none is known, the newest known one."""
    months = [month for month, has in NVIDIA_IMAGES.items() if has == release]
    return f"nvcr.io/nvidia/pytorch:{max(months or NVIDIA_IMAGES)}-py3"


def release_of_image(image: str) -> TorchRelease | None:
    """What a public image holds, by its name; None of one that is not known.

    Images of the PyTorch project name the version in their tag: `pytorch/pytorch:2.9.1-cuda12.8-
    cudnn9-runtime`.
    """
    found = _IMAGE.fullmatch(image.removeprefix("docker://").replace("#", "/"))
    if found is None:
        return None
    name, tag = found["name"].removeprefix("docker.io/"), found["tag"]
    if name == "nvcr.io/nvidia/pytorch":
        return NVIDIA_IMAGES.get(tag.partition("-")[0])
    version = tag.partition("-")[0]
    is_ours = name == "pytorch/pytorch" and _VERSION.fullmatch(version) is not None
    return torch_release(version) if is_ours else None
