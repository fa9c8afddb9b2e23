"""Every error that a user can meet, and the exit code each one becomes.

    FsdpPlanError
      SpecError(ValueError)   a value the user gave is impossible        2
        ProfileNotFound       no such hardware profile or model          2
      NoFeasibleLayout        nothing fits; carries counts by reason     3
      ProbeError              a machine command is missing or unread     4
      LaunchError             the job could not be started               5
      GateFailed              a measured value is past its limit         6

A message says what was wrong with the values, what would be right, and what to type next.
"""

from __future__ import annotations

from collections.abc import Mapping


class FsdpPlanError(Exception):
    """Base of all errors that are the user's to read; `exit_code` is the process's exit code."""

    exit_code = 1


class SpecError(FsdpPlanError, ValueError):
    """A value that the user gave is impossible, or contradicts another one."""

    exit_code = 2


class ProfileNotFound(SpecError):
    """No hardware profile or catalogue model has this name."""


class NoFeasibleLayout(FsdpPlanError):
    """No layout fits. `rejected` counts the layouts by reason."""

    exit_code = 3

    def __init__(self, message: str, *, rejected: Mapping[str, int]) -> None:
        super().__init__(message)
        self.rejected = dict(rejected)


class ProbeError(FsdpPlanError):
    """A command or interface of the machine is missing, or said something unreadable."""

    exit_code = 4


class LaunchError(FsdpPlanError):
    """The job could not be started."""

    exit_code = 5


class GateFailed(FsdpPlanError):
    """A measured value is past its limit."""

    exit_code = 6
