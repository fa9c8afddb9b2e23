"""Which torch an environment has: this one, another Python's, or that of an image file. Torch
itself is never imported: that takes seconds, and a login node may not be able to."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.spec.torch_release import TorchRelease, release_of_image, torch_release
from fsdpplan.topology.probe import run_command

ASK = (
    "import importlib.metadata as have\n"
    "try: print(have.version('torch'))\n"
    "except have.PackageNotFoundError: print('none')"
)
IMAGE_SECONDS = 120.0
"""An image of 20 GB on a busy file system."""
IMAGE_PLACES = (
    "usr/local/lib/python3*/*-packages/torch-*.dist-info",
    "usr/lib/python3*/*-packages/torch-*.dist-info",
    "opt/*/lib/python3*/site-packages/torch-*.dist-info",
    "opt/*/*/lib/python3*/site-packages/torch-*.dist-info",
    "*/lib/python3*/site-packages/torch-*.dist-info",
)
"""Where images have their packages: NVIDIA's, the PyTorch project's (conda), virtual environments
in /opt and at the top."""

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_FOLDER = re.compile(r"/torch-([^/]+)\.dist-info$", re.MULTILINE)


def installed_torch() -> TorchRelease | None:
    """The torch beside this program; None where there is none, or it does not say."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    version = _VERSION.search(text)
    return None if version is None else _release(version[1], where="the torch installed here")


def torch_of_python(python: str) -> TorchRelease:
    """The torch of another Python. Raises ProbeError where it does not answer, SpecError where it
    has none."""
    if Path(python) == Path(sys.executable) and (here := installed_torch()) is not None:
        return here
    try:
        said = run_command([python, "-c", ASK]).strip()
    except ProbeError as error:
        why = str(error).partition(ASK)[2].lstrip(": ") or str(error)
        raise ProbeError(
            f"{python} does not say which torch it has ({why}): correct --python, or give the "
            "release by --torch 2.9"
        ) from error
    if said == "none":
        raise SpecError(
            f"{python} has no torch: name the Python that the job runs by --python, or give the "
            "release by --torch 2.9"
        )
    return _release(said, where=python)


def torch_of_image(image: str) -> TorchRelease | None:
    """The torch of an image: read in a file that is here, known by the name of a public one, or
    None."""
    file = Path(image)
    if file.is_file() and file.suffix in (".sqsh", ".squashfs") and shutil.which("unsquashfs"):
        found = set(_FOLDER.findall(_answer(["unsquashfs", "-l", image, *IMAGE_PLACES], image)))
        return _release(found.pop(), where=image) if len(found) == 1 else None
    if file.is_file() and file.suffix == ".sif" and shutil.which("apptainer"):
        said = _answer(["apptainer", "exec", image, "python3", "-c", ASK], image).strip()
        return None if said == "none" else _release(said, where=image)
    return release_of_image(image)


def _answer(command: list[str], image: str) -> str:
    try:
        return run_command(command, timeout_seconds=IMAGE_SECONDS)
    except ProbeError as error:
        raise ProbeError(
            f"{image} does not say which torch it has ({command[0]} failed): give the release by "
            "--torch 2.9"
        ) from error


def _release(version: str, *, where: str) -> TorchRelease:
    try:
        return torch_release(version)
    except SpecError as error:
        raise ProbeError(f"{where}: {error}; give the release by --torch 2.9") from error
