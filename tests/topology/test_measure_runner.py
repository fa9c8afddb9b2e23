"""The runner measures what it can, in a useful order, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fsdpplan.spec.measurement import MeasuredLaunch, Measurement
from fsdpplan.topology.measure import clock, runner
from fsdpplan.topology.measure.clock import Call
from fsdpplan.topology.measure.ranks import Ranks
from fsdpplan.topology.measure.runner import FEWEST, MOST, Cell, Runner, Seconds

pytestmark = pytest.mark.usefixtures("made_up_time")


class MadeUpTime:
    """Passes where something sleeps, and a little with each look: how busy this machine is changes
    nothing."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        self._now += 1e-6
        return self._now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._now += seconds


time = MadeUpTime()


@pytest.fixture
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clock, runner):
        monkeypatch.setattr(module, "time", time)


ALONE = Ranks(rank=0, world=1, ranks_per_node=1, device=torch.device("cpu"))


class Remembered:
    """A log that remembers."""

    def __init__(self) -> None:
        self.rows: list[Measurement] = []

    def write(self, row: Measurement) -> None:
        self.rows.append(row)


def cell(number: int, call: Call = int, **more: Any) -> Cell:
    """A thing to measure whose row shows its number."""

    def rows(seconds: Seconds) -> Iterator[Measurement]:
        yield MeasuredLaunch(rank=0, kernels=number, seconds=tuple(seconds[0]))

    common: dict[str, Any] = {
        "name": f"thing {number}",
        "series": "things",
        "work": float(number),
        "needed_bytes": 1,
        "prepare": lambda: call,
        "rows": rows,
    }
    return Cell(**(common | more))


def run(*cells: Cell, seconds: float = 20.0, room_bytes: float = 10.0) -> list[MeasuredLaunch]:
    log = Remembered()
    runner = Runner(ranks=ALONE, log=log, seconds=seconds, began=time.monotonic())  # type: ignore[arg-type]
    runner.run(cells, room_bytes=room_bytes)
    return [row for row in log.rows if isinstance(row, MeasuredLaunch)]


def numbers(rows: list[MeasuredLaunch]) -> list[int]:
    return [row.kernels for row in rows]


OTHER = cell(2, series="others")


def slow(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def test_coarse_things_come_first() -> None:
    assert numbers(run(cell(1), cell(2, is_coarse=True), cell(3))) == [2, 1, 3]


def test_quick_things_are_repeated_often_and_slow_ones_seldom() -> None:
    quick, slower = run(cell(1), cell(2, slow(0.2), series="slow"), seconds=2.0)
    assert len(quick.seconds) == MOST
    assert FEWEST <= len(slower.seconds) < MOST
    assert min(slower.seconds) >= 0.2


def test_a_thing_that_fails_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> Call:
        raise RuntimeError("out of memory\nmore about it")

    assert numbers(run(cell(1, prepare=fail), cell(2))) == [2]
    assert (
        "measure: thing 1 is not measured: rank 0 says out of memory\n" in capsys.readouterr().err
    )


def test_a_thing_that_needs_too_much_memory_is_left_out_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert numbers(run(cell(1, needed_bytes=11), cell(2))) == [2]
    assert "1 are not measured, since they need more memory" in capsys.readouterr().err


def test_a_thing_that_would_take_too_long_is_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    begun = []
    # the first takes 10 ms, so the second is expected to take 1000 s
    rows = run(cell(1, slow(0.01)), cell(100_000, lambda: begun.append(1)), OTHER, seconds=2.0)
    assert numbers(rows) == [1, 2]
    assert not begun
    assert "1 are not measured, since they do not fit into 2 s: thing 100000" in (
        capsys.readouterr().err
    )


def test_what_had_to_wait_is_measured_when_time_is_left() -> None:
    # a fifth of the time is for coarse things: too little for the second one
    rows = run(
        cell(1, slow(0.01), is_coarse=True), cell(10, slow(0.1), is_coarse=True), seconds=2.0
    )
    assert numbers(rows) == [1, 10]


def test_nothing_is_begun_when_the_time_is_over() -> None:
    assert run(cell(1), cell(2), seconds=1e-9) == []


def test_of_a_thing_that_lasts_every_repeat_is_logged() -> None:
    (row,) = run(cell(1, slow(0.001), lasts=True), seconds=5.0)
    assert len(row.seconds) > MOST


def test_progress_counts_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    run(cell(1), cell(2))
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(":")[0] for line in said] == [
        "measure: 1/2 thing 1",
        "measure: 2/2 thing 2",
    ]
