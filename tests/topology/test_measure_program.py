"""The measuring program on real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.spec.plan import Collective
from tests.topology.measuring import (
    calls,
    children,
    finish,
    measured,
    start,
    wait_for_lines,
)

pytestmark = pytest.mark.gloo

SHORT = ("--device", "cpu", "--largest-bytes", str(2**20))
LONG = ("--device", "cpu", "--seconds", "100")


def test_one_process_alone_measures_what_it_computes_and_no_collectives(tmp_path: Path) -> None:
    kinds = {MeasuredLaunch, MeasuredMemory, MeasuredMatmul, MeasuredAttention}

    def is_whole(rows: Sequence[Measurement]) -> bool:
        return kinds <= {type(row) for row in rows}

    arguments = (*SHORT, "--dtypes", "fp32,fp8")
    machine, *rows = measured(tmp_path / "log.jsonl", *arguments, enough=is_whole)
    assert isinstance(machine, MeasuredMachine)
    assert (machine.world, machine.backend, machine.memory_bytes) == (1, "gloo", None)
    assert {type(row) for row in rows} == kinds
    assert {row.dtype for row in rows if isinstance(row, MeasuredMatmul)} == {"fp32", "fp8"}
    for row in rows:
        assert not isinstance(row, MeasuredMachine)
        assert len(row.seconds) >= 3
        assert all(seconds > 0 for seconds in row.seconds)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, ...]:
    """The rows of two processes."""
    log = tmp_path_factory.mktemp("two") / "log.jsonl"
    return measured(log, *SHORT, processes=2, enough=goes_around)


def goes_around(rows: Sequence[Measurement]) -> bool:
    """Whether every collective was called, and matmuls were come back to afterwards."""
    inside = [row for row in calls(rows) if row.group == "inside"]
    if {row.collective for row in inside} != set(get_args(Collective)):
        return False
    sizes = {row.gathered_bytes for row in inside}
    return sizes >= {2**10, 2**16} and any(
        isinstance(row, MeasuredMatmul) for row in rows[rows.index(calls(rows)[0]) :]
    )


def has_all_axes(rows: Sequence[Measurement]) -> bool:
    """Whether there was time for both groups of both axes, and for a pair."""
    groups = {(row.axis, row.first_rank) for row in calls(rows) if row.group == "axis"}
    return len(groups) == 4 and any(row.group == "pair" for row in calls(rows))


def test_the_first_row_says_what_was_measured_on(of_two: tuple[Measurement, ...]) -> None:
    machine = of_two[0]
    assert isinstance(machine, MeasuredMachine)
    assert (machine.world, machine.ranks_per_node, len(machine.hosts)) == (2, 2, 1)
    assert (machine.device_kind, machine.backend, machine.nccl) == ("cpu", "gloo", None)


def test_every_rank_has_rows_of_its_own(of_two: tuple[Measurement, ...]) -> None:
    assert {row.rank for row in of_two if isinstance(row, MeasuredMatmul)} == {0, 1}


def test_two_processes_measure_every_collective_between_them(
    of_two: tuple[Measurement, ...],
) -> None:
    inside = [row for row in calls(of_two) if row.group == "inside"]
    assert {row.collective for row in inside} == set(get_args(Collective))
    assert {row.gathered_bytes for row in inside} >= {2**10, 2**16}
    assert {(row.first_rank, row.ranks, row.stride, row.groups_at_once) for row in inside} == {
        (0, 2, 1, 1)
    }
    assert {row.collective for row in calls(of_two) if row.group == "pair"} == {"send_recv"}


def test_of_everything_there_is_something_before_there_is_all_of_anything(
    of_two: tuple[Measurement, ...],
) -> None:
    first_call = of_two.index(calls(of_two)[0])
    matmuls = [i for i, row in enumerate(of_two) if isinstance(row, MeasuredMatmul)]
    assert matmuls[0] < first_call < matmuls[-1]


def test_four_processes_measure_an_axis_of_a_mesh_in_all_its_groups_at_once(tmp_path: Path) -> None:
    axes = ("--axis", "dp_replicate:2:2", "--axis", "dp_shard:2:1", "--axis", "pp:2:4")
    rows = measured(tmp_path / "log.jsonl", *SHORT, *axes, processes=4, enough=has_all_axes)
    of_axis = {
        (row.axis, row.first_rank, row.ranks, row.stride, row.groups_at_once)
        for row in calls(rows)
        if row.group == "axis"
    }
    assert of_axis == {
        ("dp_replicate", 0, 2, 2, 2),
        ("dp_replicate", 1, 2, 2, 2),
        ("dp_shard", 0, 2, 1, 2),
        ("dp_shard", 2, 2, 1, 2),
    }
    # on a slow machine there may not be the time for every pair
    pairs = {row.first_rank: row.groups_at_once for row in calls(rows) if row.group == "pair"}
    assert pairs
    assert pairs.items() <= {0: 2, 1: 1, 2: 2}.items()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_ends_at_once_and_leaves_its_rows(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log.jsonl"
    process = start(log, *LONG)
    wait_for_lines(process, log, 3)
    process.send_signal(number)
    finish(process)
    assert process.returncode == -number  # which a shell shows as 130 or 143
    assert len(read_measurements(log)) >= 3


def test_a_rank_that_dies_ends_all_and_leaves_the_rows(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    process = start(log, *LONG, processes=2)
    wait_for_lines(process, log, 12)
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    finish(process)
    assert process.returncode not in (0, None)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert len(read_measurements(log)) >= 12


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--device", "cuda"), 5, "has no GPU, torch finds 0"),
        (("--device", "tpu"), 2, "the measuring program was started wrongly"),
    ],
)
def test_what_cannot_begin_says_why_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    process = start(tmp_path / "log.jsonl", *arguments)
    said = finish(process).strip()
    assert (process.returncode, said.count("\n")) == (code, 0)
    assert said.startswith("measure: ")
    assert message in said


def test_a_log_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    process = start(tmp_path, *SHORT)
    said = finish(process)
    assert process.returncode == 5
    assert "cannot be written: Is a directory" in said
