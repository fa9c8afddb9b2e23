"""What torchrun says of the first rank that failed, in one sentence."""

from __future__ import annotations

import re

_BEGIN = re.compile(r"Root Cause \(first observed failure\):")
_FIELD = re.compile(r"\s*(host|rank|exitcode)\s+: (-?[\w.-]+)(?:.*\((SIG[A-Z0-9]+)\))?")


class RootCause:
    """Hears the lines of a log, and knows the end of torchrun's report when it comes.

    Source of the format: torch.distributed.elastic.multiprocessing.errors, ChildFailedError.
    """

    def __init__(self) -> None:
        self._fields: dict[str, str] | None = None

    def hear(self, line: str) -> str | None:
        """One line, without the label of its node: the sentence, once its last field is there."""
        if _BEGIN.search(line):
            self._fields = {}
        if self._fields is None or not (found := _FIELD.match(line)):
            return None
        self._fields[found[1]] = found[2]
        if found[1] != "exitcode":
            return None
        rank, host = self._fields.get("rank", "?"), self._fields.get("host", "?")
        self._fields = None
        how = f"was ended by {found[3]}" if found[3] else f"ended with exit code {found[2]}"
        return f"rank {rank} on {host} {how}"
