"""Lines of a job's pods, each once, as `kubectl logs` gives them again and again.

Source: what kubectl 1.32 prints for `logs --prefix --timestamps`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from fsdpplan.run.engines.kubernetes_text import pod_index

_LOG_LINE = re.compile(r"\[pod/(?P<pod>[^/\]]+)/[^\]]+\] (?P<time>\S+)(?: (?P<text>.*))?")


@dataclass(slots=True)
class Seen:
    """How far the logs of one job have been read."""

    newest: datetime | None = None
    """Of any pod, when they were last read."""
    pods: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    """Pod -> the time of its last line, and how many lines it has of that time."""
    is_single: bool = False
    """The job has one pod, whose lines need no number."""


def new_lines(lines: Sequence[str], seen: Seen) -> list[str]:
    """Lines of `kubectl logs --prefix --timestamps` that were not `seen` yet, as `NUMBER: TEXT`
    with the pod's number, where there are several; `seen` then knows them."""
    found, counted = [], dict[str, tuple[datetime, int]]()
    for line in lines:
        match = _LOG_LINE.fullmatch(line)
        when = None if match is None else _time(match["time"])
        index = None if match is None else pod_index(match["pod"])
        if match is None or when is None or index is None:
            continue
        pod = match["pod"]
        before = counted.get(pod)
        number = before[1] + 1 if before is not None and before[0] == when else 1
        counted[pod] = (when, number)
        if (when, number) > seen.pods.get(pod, (when, 0)):
            seen.pods[pod] = (when, number)
            label = "" if seen.is_single else f"{index}: "
            found.append((when, label + (match["text"] or "")))
        if seen.newest is None or when > seen.newest:
            seen.newest = when
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def _time(text: str) -> datetime | None:
    """With the zone of the node, to the microsecond."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else None
