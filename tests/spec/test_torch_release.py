from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.spec.training import (
    NEWEST_TESTED,
    NVIDIA_IMAGES,
    OLDEST,
    TorchRelease,
    image_with,
    release_of_image,
    require_supported,
    torch_release,
)

ROOT = Path(__file__).resolve().parents[2]
releases = st.builds(TorchRelease, st.integers(1, 9), st.integers(0, 99))


@given(releases)
def test_a_release_is_read_back(release: TorchRelease) -> None:
    assert torch_release(str(release)) == release


@given(releases, releases)
def test_releases_are_in_the_order_of_their_numbers(one: TorchRelease, other: TorchRelease) -> None:
    assert (one < other) == ((one.major, one.minor) < (other.major, other.minor))


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.9", "2.9"),
        ("2.9.1", "2.9"),
        ("v2.9.1", "2.9"),
        ("2.13.0+cu128", "2.13"),
        ("2.14.1+cpu", "2.14"),
        ("2.10.0a0+git.nv25.11", "2.10"),
        ("2.10.0a0+b558c986e8.nv25.11", "2.10"),
        ("2.12.0.dev20260301+cu130", "2.12"),
        ("2.11.0rc3", "2.11"),
        ("2.11a0", "2.11"),
    ],
)
def test_major_and_minor_decide(version: str, release: str) -> None:
    assert str(torch_release(version)) == release


@pytest.mark.parametrize("text", ["", "2", "2.x", "torch 2.9", "2.9 ", "2..9", "-2.9", "2.9é"])
def test_other_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(SpecError, match=r"no version of PyTorch: write it as 2\.9"):
        torch_release(text)


def test_what_is_too_old_is_refused_with_what_helps() -> None:
    with pytest.raises(SpecError) as refused:
        require_supported(TorchRelease(2, 7))
    said = str(refused.value)
    assert f"torch 2.7 is older than {OLDEST}" in said
    assert f"pip install 'torch>={OLDEST}'" in said
    assert release_of_image(image_with(OLDEST)) == OLDEST
    assert image_with(OLDEST) in said
    require_supported(OLDEST)


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("nvcr.io/nvidia/pytorch:25.11-py3", "2.10"),
        ("nvcr.io#nvidia/pytorch:25.11-py3", "2.10"),
        ("docker://nvcr.io/nvidia/pytorch:25.08-py3-igpu", "2.8"),
        ("pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime", "2.9"),
        ("docker.io/pytorch/pytorch:2.8.0-cuda12.6-cudnn9-devel", "2.8"),
        ("nvcr.io/nvidia/pytorch:31.01-py3", None),
        ("nvcr.io/nvidia/nemo:25.11", None),
        ("pytorch/pytorch:latest", None),
        ("pytorch/pytorch", None),
        ("registry.example:5000/team/pytorch:2.9.1", None),
        ("team.sqsh", None),
    ],
)
def test_an_image_is_known_by_its_name_or_not_at_all(image: str, release: str | None) -> None:
    found = release_of_image(image)
    assert (None if found is None else str(found)) == release


def test_later_images_never_have_older_releases() -> None:
    found = [NVIDIA_IMAGES[month] for month in sorted(NVIDIA_IMAGES)]
    assert found == sorted(found)


def test_the_range_is_the_same_wherever_it_is_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={OLDEST}" in project["optional-dependencies"]["train"]
    page = (ROOT / "docs/reference/torch.md").read_text(encoding="utf-8")
    assert f"or, where none is, {NEWEST_TESTED}, the newest that was tested" in page
    said = f"torch {OLDEST} to {NEWEST_TESTED}"
    for page in ("README.md", "docs/reference/torch.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert said in " ".join(text.split()), page
        ranges = re.findall(r"torch (\d\.\d+) to (\d\.\d+)", text)
        assert set(ranges) <= {(str(OLDEST), str(NEWEST_TESTED))}, page
