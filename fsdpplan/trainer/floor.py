"""The oldest torch that works here. Importing this ends the process under an older one, with exit
code 5 and what helps: the other modules import what such a torch has not."""

from __future__ import annotations

import os
import re
import sys

import torch

OLDEST = (2, 8)
"""The first release under which this trainer runs."""
IMAGE = "nvcr.io/nvidia/pytorch:25.08-py3"
"""A public image that has it."""
WRONG_TORCH_EXIT_CODE = 5


def release_of(version: str) -> tuple[int, int]:
    """Major and minor of a version, which decide: 2.10 of `2.10.0a0+b558c986e8.nv25.11`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def release_words(release: tuple[int, int]) -> str:
    """`2.10`."""
    return f"{release[0]}.{release[1]}"


def newer_words(oldest: tuple[int, int], *, what: str) -> str:
    """What needs `oldest`, and where to have it from."""
    image = f", such as {IMAGE}" if oldest == OLDEST else ""
    return (
        f"this is torch {torch.__version__}, and {what} needs {release_words(oldest)} or newer: "
        f"pip install 'torch>={release_words(oldest)}', or take an image that has it{image}"
    )


if release_of(torch.__version__) < OLDEST:
    if os.environ.get("RANK", "0") == "0":
        said = newer_words(OLDEST, what="this trainer")
        print(f"error: {said}", file=sys.stderr, flush=True)
    sys.exit(WRONG_TORCH_EXIT_CODE)
