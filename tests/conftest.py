"""What all tests share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ONE_AT_A_TIME = ("gloo", "slurm", "gpu")
"""Marks of tests that load the whole machine."""

TRAINING = Path(__file__).parent / "trainer"
"""Tests of the trainer start process groups, too, but time nothing."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that start process groups to one worker, so that no two run at once; those of
    the trainer stay together by file, each with the processes that its fixture started."""
    for item in items:
        if any(item.get_closest_marker(mark) for mark in ONE_AT_A_TIME):
            trains = item.path.is_relative_to(TRAINING)
            item.add_marker(pytest.mark.xdist_group(item.path.stem if trains else "machine"))


def _ledger_at(place: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDPPLAN_LEDGER", str(place / f"{uuid.uuid4().hex}.sqlite"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _nobodys_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No fixture reads or writes the runs of whoever tests."""
    yield from _ledger_at(tmp_path_factory.getbasetemp() / "ledgers")


@pytest.fixture(autouse=True)
def _a_ledger_of_its_own(
    _nobodys_ledger: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No test sees the runs of another one."""
    yield from _ledger_at(tmp_path_factory.getbasetemp() / "ledgers")
