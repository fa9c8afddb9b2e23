"""What all tests share."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fsdpplan.cli import working

# How long an example takes says how busy the machine is.
_NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails is what was changed. `--whole` draws new ones.
settings.register_profile("sampled", _NO_CLOCK, max_examples=12, derandomize=True)
settings.register_profile("whole", _NO_CLOCK, max_examples=200, derandomize=False)
settings.load_profile("sampled")

ONE_AT_A_TIME = ("gloo", "slurm", "gpu")
"""Marks of tests that load the whole machine."""

TESTS = Path(__file__).parent
TRAINING = TESTS / "trainer"
"""Tests of the trainer start process groups, too, but time nothing."""

FEW = 5
"""Cases of every matrix with --few."""

EARLY = ("slurm", "test_docs", "trainer", "validate", "ground_truth", "machine", "search")
"""Groups, and folders whose files take long, that therefore begin early: Slurm, which cannot be
shared out, first; what starts process groups when Slurm is nearly done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whole matrices, and which cases stand for them otherwise."""
    parser.addoption(
        "--whole", action="store_true", help="all cases of sampled matrices, many of each property"
    )
    parser.addoption("--few", action="store_true", help="five cases of every matrix")
    parser.addoption("--sample-seed", type=int, default=0, help="which cases are sampled")


def pytest_configure(config: pytest.Config) -> None:
    """Let an interrupt reach what tests start: a shell lets what it runs in the background ignore
    it, and children inherit that."""
    config.addinivalue_line(
        "markers",
        "sampled(cases): so many of the cases, by a seed, unless --whole asks for all; tests of one"
        " file that have the same cases get the same, which may be measured together",
    )
    config.addinivalue_line(
        "markers", "together(name): one worker has all tests of that name, and what they cache"
    )
    if config.getoption("--whole"):
        settings.load_profile("whole")
    # The tiny step before each job has tests of its own, which ask for it.
    os.environ.setdefault("FSDPPLAN_NUMBERS", "0")
    # Nor does a busy machine change what a command says.
    working.QUIET_SECONDS = 3600.0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give all tests that start process groups to one worker, so that no two run at once, and those
    of Slurm, which mostly wait, to another; those of the trainer, and all others, stay together by
    file, with what their fixtures and caches hold."""
    if not config.getoption("--whole"):
        _leave_out(config, items)
    for item in items:
        loads = any(item.get_closest_marker(mark) for mark in ONE_AT_A_TIME)
        alone = loads and not item.path.is_relative_to(TRAINING)
        by_file = item.path.relative_to(TESTS).with_suffix("").as_posix()
        if mark := item.get_closest_marker("together"):
            by_file = mark.args[0]
        shared = "slurm" if item.get_closest_marker("slurm") else "machine"
        item.add_marker(pytest.mark.xdist_group(shared if alone else by_file))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


gc.disable()
"""Until all is imported and collected, which stays."""


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks through it again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # tests end soon: to look for garbage often takes a twentieth
    gc.enable()


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All but some cases of each matrix, the same on every worker and for all tests of a file."""
    seed = config.getoption("--sample-seed")

    def chance(item: pytest.Item) -> bytes:
        case = item.nodeid.partition("[")[2].partition("]")[0]
        return hashlib.sha256(f"{seed} {item.path.name} {case}".encode()).digest()

    matrices: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        for mark in item.iter_markers("sampled"):
            matrices[name, mark.args[0]].append(item)
        if config.getoption("--few"):
            matrices[name, FEW].append(item)
    left_out = set[pytest.Item]()
    for (_, number), cases in matrices.items():
        left_out.update(sorted(cases, key=chance)[number:])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Callable[[str], set[Any]]:
    """Values that a parameter has among this file's tests of the session: what is to be measured
    where one set of processes measures for all of them."""

    def values(parameter: str) -> set[Any]:
        return {
            item.callspec.params[parameter]
            for item in request.session.items
            if item.path == request.path and hasattr(item, "callspec")
            if parameter in item.callspec.params
        }

    return values


def _turn(item: pytest.Item) -> int:
    """When a worker takes an item."""
    group: str = item.get_closest_marker("xdist_group").args[0]  # type: ignore[union-attr]
    place = group.partition("/")[0]
    return EARLY.index(place) if place in EARLY else len(EARLY)


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
