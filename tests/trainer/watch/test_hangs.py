"""The watchdog's words and limits; that it ends a job is in test_watch.py."""

from __future__ import annotations

from typing import Any

from fsdpplan.trainer.rehearse.counting import Axis
from fsdpplan.trainer.watch.hangs import (
    LEAST_SECONDS,
    UNKNOWN_SECONDS,
    hang_words,
    step_limit_seconds,
    waits_for,
)

AXES = [Axis("dp_shard", "3", frozenset({0, 2})), Axis("tp", "5", frozenset({0, 1}))]


def record(number: int, group: tuple[str, str], name: str, *, retired: bool) -> dict[str, Any]:
    return {
        "record_id": number,
        "process_group": list(group),
        "profiling_name": name,
        "collective_seq_id": number + 10,
        "p2p_seq_id": 0,
        "retired": retired,
    }


def test_the_first_collective_that_has_not_ended_is_what_hangs() -> None:
    records = [
        record(9, ("5", "mesh_tp"), "nccl:all_reduce", retired=False),
        record(8, ("3", "mesh_dp_shard"), "nccl:_all_gather_base", retired=False),
        record(7, ("5", "mesh_tp"), "nccl:all_reduce", retired=True),
    ]
    assert waits_for(records, AXES) == {
        "axis": "dp_shard",
        "ranks": [0, 2],
        "collective": "_all_gather_base",
        "call": 18,
    }


def test_the_group_of_all_ranks_is_no_axis() -> None:
    found = waits_for([record(1, ("0", "default_pg"), "gloo:all_reduce", retired=False)], AXES)
    assert found is not None
    assert found["axis"] == "all ranks"


def test_a_rank_that_waits_for_no_collective_says_where_it_is() -> None:
    assert waits_for([record(1, ("0", ""), "gloo:all_reduce", retired=True)], AXES) is None
    hang = {"rank": 1, "host": "n03", "seconds": 60.0, "step": 4, "phase": "data"}
    words = hang_words({**hang, "axis": None, "collective": None})
    assert words.startswith("[rank 1 on n03] error: no step has ended for 60 s after step 4")
    assert "in no collective, but in: data" in words


def test_many_ranks_are_not_all_listed() -> None:
    hang = {"rank": 1, "host": "n03", "seconds": 60.0, "step": 4, "phase": "forward", "call": 2}
    words = hang_words({**hang, "axis": "tp", "collective": "all_reduce", "ranks": list(range(64))})
    assert "over tp (ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more), call 2" in words


def test_the_limit_follows_the_steps_unless_it_is_given() -> None:
    assert step_limit_seconds([500.0], None) == UNKNOWN_SECONDS  # it may have compiled
    assert step_limit_seconds([500.0, 1.0, 1.0], None) == LEAST_SECONDS
    assert step_limit_seconds([500.0, 20.0, 20.0], None) == 200.0
    assert step_limit_seconds([500.0, 20.0, 20.0], 7.0) == 7.0
    # which the host may have to wait for, too, where their numbers are not read
    assert step_limit_seconds([500.0, 20.0, 20.0], None, unread_steps=9) == 380.0
    assert step_limit_seconds([500.0, 20.0, 20.0], 7.0, unread_steps=9) == 187.0
