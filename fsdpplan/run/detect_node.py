"""One node of `detect --nodes`: says on stdout what it is, in short lines that name the node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256

MARK = "fsdpplan-machine"
CHUNK_CHARACTERS = 900
"""Slurm passes on whole lines up to about a kilobyte."""


def lines_of(node: str, text: str) -> Iterator[str]:
    """`text`, of one line, cut into numbered lines that say what the whole of it hashes to."""
    chunks = [text[at : at + CHUNK_CHARACTERS] for at in range(0, len(text), CHUNK_CHARACTERS)]
    for number, chunk in enumerate(chunks, start=1):
        yield f"{MARK} {node} {_hash(text)} {number}/{len(chunks)} {chunk}"


def texts_in(lines: Iterable[str]) -> dict[str, str]:
    """The text of each node whose lines are all there, in whatever order the lines came.

    Lines that are cut, lost, or of two texts of one node never make up another text.
    """
    parts: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        words = line.rstrip("\r\n").split(" ", 4)
        if len(words) == 5 and words[0] == MARK:
            number = words[3].partition("/")[0]
            if number.isascii() and number.isdecimal() and len(number) < 10:
                parts.setdefault((words[1], words[2]), {})[int(number)] = words[4]
    joined = {
        key: "".join(found[number] for number in sorted(found)) for key, found in parts.items()
    }
    return {node: text for (node, digest), text in joined.items() if _hash(text) == digest}


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def main() -> None:
    """Read this host and print it."""
    from fsdpplan.files.machines import machine_document
    from fsdpplan.topology.conclude.machine import machine_of
    from fsdpplan.topology.probe import record_host

    machine = machine_of(record_host())
    node = os.environ.get("SLURMD_NODENAME", "here")
    for line in lines_of(node, json.dumps(machine_document(machine), separators=(",", ":"))):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
