"""The rules of trace-event JSON, as far as they can be checked without a viewer.

Source: "Trace Event Format" (Google, 2016), and what torch 2.13's kineto writes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"id", "name", "cat", "pid", "tid", "ts"},
    "f": {"id", "name", "cat", "pid", "tid", "ts", "bp"},
}
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
ROUNDING_US = 1e-3


def problems(document: dict[str, Any]) -> list[str]:
    """What a trace breaks; empty: nothing."""
    json.dumps(document, allow_nan=False)  # raises for what no JSON is
    found: list[str] = []
    events = document["traceEvents"]
    named: set[tuple[Any, Any]] = set()
    processes: set[Any] = set()
    spans: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[tuple[Any, Any], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if missing := REQUIRED.get(event["ph"], {"ph unknown"}) - event.keys():
            found.append(f"{event} lacks {missing}")
            continue
        match event["ph"]:
            case "M":
                if METADATA.get(event["name"]) not in event["args"]:
                    found.append(f"metadata {event}")
                if event["name"] == "thread_name":
                    named.add((event["pid"], event["tid"]))
                if event["name"] == "process_name":
                    processes.add(event["pid"])
            case "C":
                if not all(isinstance(value, int | float) for value in event["args"].values()):
                    found.append(f"counter {event}")
            case "s" | "f":
                arrows[event["cat"], event["id"]][event["ph"]] = event
            case "X":
                if event["dur"] < 0:
                    found.append(f"negative {event}")
                spans[event["pid"], event["tid"]].append(event)
    for key, own in spans.items():
        if key not in named or key[0] not in processes:
            found.append(f"no name for row {key}")
        found += _nesting(own)
    for key, ends in arrows.items():
        if ends.keys() != {"s", "f"} or ends["f"]["ts"] < ends["s"]["ts"] - ROUNDING_US:
            found.append(f"arrow {key} has no end, or ends before it begins")
    return found


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """Spans of one row lie in one another or apart."""
    open_ends: list[float] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= start + ROUNDING_US:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + ROUNDING_US:
            return [f"{event['name']} at {start} ends behind what it lies in"]
        open_ends.append(end)
    return []
