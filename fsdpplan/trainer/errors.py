"""Errors that a user of the trainer can meet: one line each, no traceback."""

from __future__ import annotations


class TrainerError(ValueError):
    """Something the user gave is impossible; `exit_code` is the process's exit code."""

    exit_code = 2


class RankError(TrainerError):
    """A mistake that not every rank sees, so each that does must say it."""


class OutOfMemory(RankError):
    """The device's memory ran out."""

    exit_code = 1


class DataWorkerLost(RankError):
    """A process that reads data for this rank has ended."""

    exit_code = 1


class Stopped(TrainerError):
    """A signal came where there is nothing to finish and nothing to save."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(
            f"signal {number} came while {what}: nothing was trained, start again when you like"
        )
        self.exit_code = 128 + number


class TrainingDiverged(TrainerError):
    """The loss is no longer a number."""

    exit_code = 1


class PreflightFailed(TrainerError):
    """These nodes cannot train the plan, or not together."""

    exit_code = 5


class WrongTorch(TrainerError):
    """The torch that is here cannot train the plan. (One that is too old for any: `floor`.)"""

    exit_code = 5
