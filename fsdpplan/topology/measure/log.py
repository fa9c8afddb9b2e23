"""The log: one JSON object a row, on disk as soon as it is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdpplan.errors import LaunchError
from fsdpplan.spec.measurement import Measurement

DIGITS = 6
"""Of seconds: the clocks are no better."""


def row_document(row: Measurement) -> dict[str, Any]:
    """`row` as the log has it: `kind` (MeasuredMatmul is `matmul`), then its fields."""
    document = {"kind": type(row).__name__.removeprefix("Measured").lower(), **asdict(row)}
    if "seconds" in document:
        document["seconds"] = [float(f"{one:.{DIGITS}g}") for one in document["seconds"]]
    return document


class Log:
    """A log being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.write_text("", encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the log {path} cannot be written: {error.strerror}: choose a folder that every "
                "node sees and you may write to"
            ) from error

    def write(self, row: Measurement) -> None:
        """Append a row; a process that is ended here leaves at most one line cut short."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row_document(row)) + "\n")
