"""Editing profiles: the number and its source change, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import parse_profile, profile_names, profile_text
from fsdpplan.files.profiles.devices import PhysicsProfile
from fsdpplan.files.profiles.edit import number_text, with_numbers, with_source
from fsdpplan.files.profiles.nodes import NodeProfile


@given(st.floats(1e-9, 1e12))
def test_a_number_is_written_as_a_float_and_read_back(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=1e-11)
    assert set(number_text(value)) & set(".e")


@pytest.mark.parametrize("name", profile_names())
def test_nothing_to_change_changes_nothing(name: str) -> None:
    if "[fit]" in profile_text(name):
        assert with_numbers(profile_text(name), {}) == profile_text(name)


def test_a_number_of_the_fit_changes_alone() -> None:
    text = profile_text("physics")
    edited = with_numbers(text, {"fp8_fraction": 0.5})
    profile = parse_profile(edited, where="mine.toml")
    assert isinstance(profile, PhysicsProfile)
    assert dict(profile.fit)["fp8_fraction"] == 0.5
    changed = [
        new for old, new in zip(text.splitlines(), edited.splitlines(), strict=True) if old != new
    ]
    assert changed == ['fp8_fraction = { value = 0.5, source = "matmul_fit" }']


def test_a_number_of_one_level_leaves_the_other() -> None:
    edited = with_numbers(profile_text("dgx-h100"), {"base_seconds": 1e-3}, level="infiniband")
    profile = parse_profile(edited, where="mine.toml")
    assert isinstance(profile, NodeProfile)
    inside, between = (level.level.base_seconds for level in profile.levels)
    assert (inside < 1e-4, between) == (True, 1e-3)


def test_words_of_a_source_are_replaced_or_added() -> None:
    text = profile_text("physics")
    edited = with_source(text, "matmul_fit", {"how": "by hand", "date": "2026-01-02"})
    assert with_source(edited, "matmul_fit", {"how": "by hand"}) == edited
    profile = parse_profile(edited, where="mine.toml")
    assert "by hand" in dict(profile.sources)["cluster.device.fit.fp8_fraction"]


@pytest.mark.parametrize(
    ("values", "level"), [({"nothing": 1.0}, None), ({"base_seconds": 1.0}, "shm")]
)
def test_what_is_not_there_is_not_written(values: dict[str, float], level: str | None) -> None:
    with pytest.raises(SpecError):
        with_numbers(profile_text("physics"), values, level=level)
    with pytest.raises(SpecError):
        with_source(profile_text("physics"), "nothing", {"how": "x"})
