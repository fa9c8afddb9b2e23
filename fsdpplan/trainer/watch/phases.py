"""Which part of a step some code belongs to, read off the functions that are under way."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple


class Called(NamedTuple):
    """A function that is under way."""

    path: str
    function: str
    line: int


_BACKWARD = {"backward_one_chunk", "backward_weight_one_chunk", "_engine_run_backward"}
_OPTIMIZER_FILES = {"optimizer.py", "muon.py", "clip.py", "scaler.py"}
_INITIALIZATION = {"set_up", "assemble", "make_optimizer"}
_DATA_FILES = {
    *("data.py", "feed.py", "index.py", "mixture.py", "packing.py", "stream.py"),
    *("token_file.py", "worker.py"),
}


def phase_of(calls: Sequence[Called]) -> str:
    """initialization, data, forward, loss, backward, optimizer, checkpoint, end of step or between
    steps; `calls` are outermost first."""
    for call in reversed(calls):
        phase = _phase(call)
        if phase is not None:
            return phase
    return "between steps"


def _phase(call: Called) -> str | None:
    path = PurePath(call.path)
    name, folder = path.name, path.parent.name
    if folder == "checkpoint" or (name.startswith("checkpoint") and folder != "utils"):
        return "checkpoint"
    if call.function in _BACKWARD or (folder == "autograd" and call.function == "backward"):
        return "backward"
    if folder in ("optim", "_muon") or name in _OPTIMIZER_FILES:
        return "initialization" if call.function == "make_optimizer" else "optimizer"
    by_function = {
        "settle": "end of step",
        "hear": "end of step",
        "tell": "end of step",
        "forward_backward": "forward",
    }
    if call.function in by_function:
        return by_function[call.function]
    if call.function in _INITIALIZATION:
        return "initialization"
    if name in ("loss.py", "chunked_loss.py") and folder != "nn":
        return "loss"
    return "data" if name in _DATA_FILES and folder != "utils" else None


def calls_of_error(error: BaseException) -> list[Called]:
    """The functions that `error` came through, outermost first."""
    summary = traceback.extract_tb(error.__traceback__)
    return [Called(each.filename, each.name, each.lineno or 0) for each in summary]


def calls_of_thread(identity: int) -> list[Called]:
    """The functions that a thread is in, outermost first; none for a thread that has ended."""
    frame = sys._current_frames().get(identity)
    summary = [] if frame is None else traceback.extract_stack(frame)
    return [Called(each.filename, each.name, each.lineno or 0) for each in summary]
