"""Parts that a script of one file carries packed, behind what is its own: they are the same in
every job, and whoever reads the script reads them by the command that it says."""

from __future__ import annotations

import gzip
from base64 import b64decode, b64encode
from binascii import Error
from collections.abc import Iterator

DELIMITER = "FSDPPLAN_PARTS_END"
"""Ends the packed text; base64 has no underlines."""
_BEGIN = f"packed() {{ cat <<'{DELIMITER}'"
_COLUMNS = 2000
_READ = f"sed '1,/^ *packed()/d; /^ *{DELIMITER}/,$d' THIS_FILE | base64 -di | gzip -dc"


def packed_lines(text: str, *, contents: list[str]) -> list[str]:
    """Bash that runs `text`, which it carries packed; `contents` says what is in it, by lines."""
    return [
        "# The parts, the same in every job and so packed. To read them:",
        f"#   {_READ}",
        *(f"# {line}" for line in contents),
        _BEGIN,
        *_rows(b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()),
        DELIMITER,
        "}",
        "parts=$(packed | base64 -d | gzip -dc) ||",
        '  refuse "this script was cut off or changed: emit it again"',
        'eval "$parts"',
    ]


def unpacked(script: str) -> str | None:
    """The text that a script carries packed; None where there is none."""
    _, begin, rest = script.partition(_BEGIN)
    if not begin:
        return None
    rows, _, _ = rest.partition(DELIMITER)
    try:
        return gzip.decompress(b64decode("".join(rows.split()))).decode()
    except (Error, OSError, EOFError):
        return None


def _rows(text: str) -> Iterator[str]:
    for start in range(0, len(text), _COLUMNS):
        yield text[start : start + _COLUMNS]
