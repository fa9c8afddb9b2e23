"""What `ibstat` and `ibstatus` print of InfiniBand and RoCE ports, as a part of a recording."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdpplan.topology.read.reading import is_name
from fsdpplan.topology.read.recording import Recording

_CARD = re.compile(r"CA '([^']{1,64})'")
_CARD_AND_PORT = re.compile(r"Infiniband device '([^']{1,64})' port ([1-9][0-9]?) status:")
_PORT = re.compile(r"Port ([1-9][0-9]?):")
_STATES = {
    "active": "4: ACTIVE",
    "armed": "3: ARMED",
    "init": "2: INIT",
    "initializing": "2: INIT",
    "down": "1: DOWN",
}
"""ibstat's words and ibstatus's, and what the kernel writes."""


def ports_recording(text: str) -> Recording | None:
    """Ports of the text with state, rate and kind; None where there are none."""
    files = dict(_files(text))
    return Recording(files=files) if files else None


def _files(text: str) -> Iterator[tuple[str, str]]:
    """(path under /sys, text) of each value that the kernel says, too."""
    card = port = None
    for line in map(str.strip, text.splitlines()):
        if (match := _CARD_AND_PORT.match(line)) is not None:
            card, port = match[1], match[2]
        elif (match := _CARD.match(line)) is not None:
            card, port = match[1], None
        elif card is not None and (match := _PORT.fullmatch(line)) is not None:
            port = match[1]
        elif card is not None and is_name(card) and ":" in line:
            yield from _value(f"/sys/class/infiniband/{card}", port, line)


def _value(folder: str, port: str | None, line: str) -> Iterator[tuple[str, str]]:
    label, _, value = line.partition(":")
    label, value = label.lower().replace("_", " "), value.strip()
    if label == "firmware version" and re.fullmatch(r"[0-9.]{1,32}", value):
        yield f"{folder}/fw_ver", value
    if port is None:
        return
    here = f"{folder}/ports/{port}"
    state = re.fullmatch(r"(?:[0-9]: *)?([A-Za-z]+)", value)
    rate = re.match(r"([0-9]{1,5}(?:\.[0-9])?)(?:$| Gb/sec)", value)
    if label == "state" and state is not None and state[1].lower() in _STATES:
        yield f"{here}/state", _STATES[state[1].lower()]
    elif label == "rate" and rate is not None:
        yield f"{here}/rate", f"{rate[1]} Gb/sec"
    elif label == "link layer" and value in ("InfiniBand", "Ethernet"):
        yield f"{here}/link_layer", value
