from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.spec.training import TorchRelease, torch_release
from fsdpplan.topology.probe import installed_torch, torch_of_image, torch_of_python

HERE = torch_release(torch.__version__)


def python_with(folder: Path, version: str | None) -> str:
    """A Python that finds torch of that version, or no packages at all."""
    packages = folder / "packages"
    packages.mkdir()
    if version is not None:
        info = packages / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_the_torch_beside_this_program_is_known_without_importing_it() -> None:
    assert installed_torch() == HERE
    assert torch_of_python(sys.executable) == HERE
    asks = "from fsdpplan.topology.probe import installed_torch as ask; import sys; ask()"
    loaded = subprocess.run(
        [sys.executable, "-c", f"{asks}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "False\n"


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0a0+b558c986e8.nv25.11"])
def test_another_python_is_asked(tmp_path: Path, version: str) -> None:
    assert torch_of_python(python_with(tmp_path, version)) == torch_release(version)


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no torch: name the Python that the job runs"):
        torch_of_python(python_with(tmp_path, None))


def test_a_version_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"no version of PyTorch.*--torch 2\.9"):
        torch_of_python(python_with(tmp_path, "next"))


def test_a_python_that_is_not_there_is_said() -> None:
    with pytest.raises(ProbeError) as failed:
        torch_of_python("/no/such/python")
    assert str(failed.value).startswith("/no/such/python does not say which torch it has (not fou")
    assert len(str(failed.value).splitlines()) == 1


def test_a_public_image_is_known_by_its_name() -> None:
    assert torch_of_image("nvcr.io#nvidia/pytorch:25.09-py3") == TorchRelease(2, 9)
    assert torch_of_image("/not/here/team.sqsh") is None


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="makes an image by mksquashfs")
@pytest.mark.parametrize(
    "place", ["usr/local/lib/python3.12/dist-packages", "opt/conda/lib/python3.11/site-packages"]
)
def test_an_image_file_is_looked_into(tmp_path: Path, place: str) -> None:
    info = tmp_path / "root" / place / "torch-2.10.0a0+b558c986e8.nv25.11.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: torch\n")
    image = tmp_path / "team.sqsh"
    subprocess.run(
        ["mksquashfs", tmp_path / "root", image, "-quiet"], check=True, capture_output=True
    )
    assert torch_of_image(str(image)) == TorchRelease(2, 10)
    image.write_bytes(b"no image")
    with pytest.raises(ProbeError, match=r"team\.sqsh does not say which torch"):
        torch_of_image(str(image))
