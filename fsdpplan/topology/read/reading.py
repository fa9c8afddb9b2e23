"""Reading: texts of a host become numbers, or None where they do not say one."""

from __future__ import annotations

import re

MOST_LISTED = 65536
"""Numbers of a list: no kernel counts more cores or nodes."""


def whole_number(text: str | None) -> int | None:
    """`text` as a number of at most 18 digits, not negative: drivers say -1 for unknown."""
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"[0-9]{1,18}", stripped) else None


def first_line(text: str | None) -> str | None:
    """The first line without spaces around it, if there is anything in it."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip() if lines and lines[0].isprintable() else None


def is_name(text: str) -> bool:
    """`text` may name a device: the kernel takes anything but space and slash, a terminal does
    not."""
    return re.fullmatch(r"[!-.0-~]{1,64}", text) is not None


def labelled(text: str | None, label: str) -> str | None:
    """What follows `label:` in the first line that starts so, as in /proc/meminfo."""
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == label and value.strip():
            return value.strip()
    return None


def numbers_in_list(text: str | None) -> frozenset[int] | None:
    """The numbers of a kernel list, such as `0-3,8`; None for an empty or malformed one.

    Source: Linux, Documentation/admin-guide/kernel-parameters.rst, cpu lists.
    """
    found: set[int] = set()
    listed = 0
    for part in (text or "").strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None:
            return None
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        listed += len(numbers)
        if listed > MOST_LISTED:
            return None
        found |= set(numbers)
    return frozenset(found) or None
