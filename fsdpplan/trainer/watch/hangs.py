"""A watchdog: where no step ends any more, each rank says what it waits for, and ends.

What a rank waits for is the first collective of torch's flight recorder that has not ended, on gloo
and on NCCL. NCCL's own watchdog ends a job, too, but after ten minutes or more, and names groups by
numbers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..pace import VOTES
from ..private_torch import flight_record_file, flight_records
from ..rehearse.counting import Axis
from .phases import calls_of_thread, phase_of

LEAST_SECONDS = 60.0
USUAL_STEPS = 10.0
"""A step that takes so many times the median hangs."""
UNKNOWN_SECONDS = 1800.0
"""For a first step, which compiles, and for a checkpoint: nobody knows how long they take."""
POLL_SECONDS = 0.5
HANG_EXIT_CODE = 1


class HangWatch:
    """Ends the process when no step ends. `said` hears of it first."""

    def __init__(
        self,
        axes: Sequence[Axis],
        *,
        limit_seconds: float | None,
        said: Callable[[dict[str, Any]], None],
        unread_steps: int = 0,
    ) -> None:
        """`unread_steps`: how many steps the host may be ahead of the device, and then wait for."""
        self._axes = axes
        self._unread_steps = unread_steps
        self._limit_seconds = limit_seconds
        self._said = said
        self._main = threading.get_ident()
        self._step = 0
        self._seconds: list[float] = []
        self._deadline = time.monotonic() + UNKNOWN_SECONDS
        self._waits_seconds = UNKNOWN_SECONDS
        self._over = threading.Event()

    def start(self, step: int) -> None:
        """Begin to watch, before the first step."""
        self._step = step
        threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def ended(self, step: int) -> None:
        """The host has come to the end of a step."""
        self._step = step
        self._allow(
            step_limit_seconds(self._seconds, self._limit_seconds, unread_steps=self._unread_steps)
        )

    def took(self, seconds: float) -> None:
        """How long a step took, which may be one before."""
        self._seconds = [*self._seconds[-99:], seconds]

    def not_a_step(self) -> None:
        """Something else begins, such as a checkpoint."""
        self._allow(UNKNOWN_SECONDS)

    def stop(self) -> None:
        """The run has ended."""
        self._over.set()

    def _allow(self, seconds: float) -> None:
        self._waits_seconds = seconds
        self._deadline = time.monotonic() + seconds

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            if time.monotonic() > self._deadline:
                self._end()

    def _end(self) -> None:
        """Say what is known, then leave by the shortest way: nothing here may wait, too."""
        waiting = waits_for(flight_records(only_active=True), self._axes)
        phase = phase_of(calls_of_thread(self._main))
        hang = {
            "step": self._step,
            "seconds": self._waits_seconds,
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "phase": phase,
            **(waiting or {"axis": None, "collective": None}),
        }
        print(hang_words(hang), file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self._said(hang)
        with contextlib.suppress(Exception):
            write_flight_record()
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(HANG_EXIT_CODE)


def step_limit_seconds(
    steps: Sequence[float], limit_seconds: float | None, *, unread_steps: int = 0
) -> float:
    """How long the host may take until the end of the next step, in which it may wait for
    `unread_steps` more. The first one of a process may have compiled."""
    counted = steps[1:]
    usual = statistics.median(counted) if counted else 0.0
    if limit_seconds is not None:
        return limit_seconds + unread_steps * usual
    if not counted:
        return UNKNOWN_SECONDS
    return max(LEAST_SECONDS, USUAL_STEPS * usual) + unread_steps * usual


def waits_for(records: Sequence[dict[str, Any]], axes: Sequence[Axis]) -> dict[str, Any] | None:
    """The first collective that has not ended: what it is, over which axis, the how manieth of its
    group. None where the rank waits for none."""
    active = [record for record in records if not record.get("retired")]
    if not active:
        return None
    # hosts' own messages are waited for late: whoever waits for one hangs in no other
    others = [record for record in active if VOTES not in record["process_group"]]
    first = min(others or active, key=lambda record: int(record["record_id"]))
    name, description = (*first["process_group"], "", "")[:2]
    axis = next((axis for axis in axes if axis.group_name == name), None)
    return {
        "axis": _axis_words(description) if axis is None else axis.name,
        "ranks": None if axis is None else sorted(axis.ranks),
        "collective": str(first["profiling_name"]).partition(":")[2],
        "call": int(first["collective_seq_id"] or first["p2p_seq_id"]),
    }


def _axis_words(description: str) -> str:
    """A group that is no axis: all ranks, or what its maker called it."""
    return "all ranks" if description in ("default_pg", "") else description


def hang_words(hang: dict[str, Any]) -> str:
    """One line for people."""
    where = f"it is in no collective, but in: {hang['phase']}"
    if hang["collective"] is not None:
        ranks = hang.get("ranks")
        among = "" if ranks is None else f" (ranks {_ranks_words(ranks)})"
        where = (
            f"it waits in {hang['collective']} over {hang['axis']}{among}, call {hang['call']} of "
            f"that group, in: {hang['phase']}"
        )
    return (
        f"[rank {hang['rank']} on {hang['host']}] error: no step has ended for "
        f"{hang['seconds']:.0f} s after step {hang['step']}: {where}; a rank that does not say so, "
        "or waits elsewhere, is the one that the others wait for"
    )


def _ranks_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def write_flight_record() -> None:
    """Write NCCL's record where it would after its own timeout, for torchfrtrace."""
    place = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    record = flight_record_file()
    if place and record:
        Path(f"{place}{dist.get_rank()}").write_bytes(record)
