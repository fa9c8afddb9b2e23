"""What every refusal promises, whatever was wrong."""

from __future__ import annotations


def check_one_line(refusal: Exception) -> None:
    """The message is one line, short enough to read."""
    assert len(str(refusal).splitlines()) == 1
    assert len(str(refusal)) < 600
