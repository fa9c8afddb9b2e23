"""What all tests share."""

from __future__ import annotations

import pytest

ONE_AT_A_TIME = ("gloo", "slurm", "gpu")
"""Marks of tests that load the whole machine."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that start process groups to one worker, so that no two run at once."""
    for item in items:
        if any(item.get_closest_marker(mark) for mark in ONE_AT_A_TIME):
            item.add_marker(pytest.mark.xdist_group("machine"))
