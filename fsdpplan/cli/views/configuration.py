"""What was read of a configuration of another tool: what it asks for, and what is left out."""

from __future__ import annotations

from typing import TypedDict

from fsdpplan.cli.resolve.configuration import Under
from fsdpplan.cli.views.answer import Said
from fsdpplan.cli.views.render import blocks, listed, wrapped


class ConfigurationJson(TypedDict):
    """Under `configuration` of `estimate --from FILE --json`."""

    file: str
    tool: str
    """Such as `DeepSpeed`."""
    options: dict[str, str]
    """Option, its name with underscores -> value that the file gave."""
    typed: list[str]
    """Options of the file in whose place others were typed."""
    understood: list[str]
    """Fields, with dots, that these come from."""
    idle: list[str]
    """Fields that change nothing of a step's time or memory."""
    not_understood: list[str]
    """All other fields, with their values: the prediction leaves them out."""
    notes: list[str]
    """How the tool's way is priced where that is not the very thing."""


def configuration_said(under: Under, *, width: int) -> Said:
    """The block above the estimate, and its JSON."""
    found = under.configuration
    document: ConfigurationJson = {
        "file": under.file,
        "tool": found.tool,
        "options": dict(under.taken),
        "typed": list(under.typed),
        "understood": list(found.understood),
        "idle": list(found.idle),
        "not_understood": list(found.not_understood),
        "notes": list(found.notes),
    }
    asks = " ".join(
        f"--{name.replace('_', '-')}" + ("" if text == "yes" else f" {text}")
        if text != "no"
        else f"--no-{name.replace('_', '-')}"
        for name, text in under.taken.items()
    )
    read = f"{under.file} is of {found.tool}; it asks for, with that tool's defaults: {asks}."
    if under.typed:
        read += f" Typed in place of its own: {', '.join(under.typed)}."
    if found.idle:
        read += f" {len(found.idle)} fields change nothing of a step."
    return Said(
        screen=blocks(
            wrapped(read, width=width),
            listed("Not understood, left out", found.not_understood, width=width),
            listed("How it is priced", found.notes, width=width),
        ),
        document={"configuration": document},
    )
