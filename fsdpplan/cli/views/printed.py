"""What `logs --json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fsdpplan.run.logs import JobLog


def printed_json(log: JobLog, lines: Sequence[str]) -> str:
    """The lines, and where they are from."""
    return json.dumps(
        {
            "run": log.run.shown_id,
            "job": log.job_id,
            "log": None if log.path is None else str(log.path),
            "hosts": list(log.hosts),
            "lines": list(lines),
        },
        indent=2,
    )
