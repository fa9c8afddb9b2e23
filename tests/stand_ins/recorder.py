"""Writes down what stand-ins are called with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def record(library: str, call: str, **given: Any) -> None:
    """One line; a library named by FSDPPLAN_TESTS_BROKEN raises, a slow one takes its time."""
    with Path(os.environ["FSDPPLAN_TESTS_CALLS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"library": library, "call": call, **given}) + "\n")
    if os.environ.get("FSDPPLAN_TESTS_BROKEN") == library:
        raise ConnectionError("the server is away")
    if os.environ.get("FSDPPLAN_TESTS_SLOW") == library:
        time.sleep(30)
