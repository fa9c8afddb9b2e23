"""What a terminal may be shown of text that others wrote: a job's log, a name from a file.

A terminal obeys what it is sent: escape sequences of a log could change its title, hide lines or
answer into the shell's input. So none reaches it, nor a pipe, which often ends at a terminal.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, moves of the cursor
    # strings: titles, links, the clipboard
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*(?![\[\]PX^_])[0-~]"  # two characters, as to choose an alphabet
)
"""Source: ECMA-48, sections 5.4 and 5.6."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but line breaks and tabs, and what turns the direction of text."""


def printable(text: str) -> str:
    """`text` with whatever does not show written as an escape: `\\x1b`."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """`text` with control characters written as escapes, and all else as it is; quick."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def log_line(line: str) -> str:
    """A line of a log as it would stand on a terminal: what carriage returns overwrote is gone, and
    so are colours; what else could move the terminal is written as an escape."""
    return harmless(_SEQUENCE.sub("", line.rstrip("\r").rpartition("\r")[2]))
