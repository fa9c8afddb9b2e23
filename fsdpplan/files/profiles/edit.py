"""Editing a profile's text: numbers and words on their source, all else as it was."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdpplan.errors import SpecError

FIT = "fit"


def number_text(value: float) -> str:
    """A number as profiles write it: short, and still a float."""
    text = f"{value:.12g}"
    return text if any(mark in text for mark in ".einf") else f"{text}.0"


def with_numbers(
    text: str, values: Mapping[str, float], *, level: str | None = None, table: str = FIT
) -> str:
    """`text` with other values: of the table [`table`], or of the [[levels]] table named `level`.

    A number that is not there yet is an error: its source must be written by hand first.
    """
    start, stop = _span(text, level, table)
    part = text[start:stop]
    for key, value in values.items():
        pattern = rf"^({re.escape(key)} = {{ value = )[^,]+(,)"
        part, found = re.subn(
            pattern, rf"\g<1>{number_text(value)}\g<2>", part, count=1, flags=re.M
        )
        if not found:
            where = f"level {level}" if level else f"[{table}]"
            raise SpecError(f"the profile has no {key} in {where}; write it with its source first")
    return text[:start] + part + text[stop:]


def with_source(text: str, source: str, words: Mapping[str, str]) -> str:
    """`text` with other words (`what`, `how`, `from`, `date`) in [sources.`source`]."""
    match = re.search(rf"^\[sources\.{re.escape(source)}\]\n(?:.+\n?)*", text, flags=re.M)
    if match is None:
        raise SpecError(f"the profile has no [sources.{source}]; write it first")
    part = match[0] if match[0].endswith("\n") else match[0] + "\n"
    for key, said in words.items():
        line = f'{key} = "{said}"\n'
        escaped = line.replace("\\", r"\\")
        part, found = re.subn(rf"^{key} = .*\n", escaped, part, flags=re.M)
        if not found:
            part += line
    return text[: match.start()] + part + text[match.end() :]


def _span(text: str, level: str | None, table: str) -> tuple[int, int]:
    """Where the table stands, from its header to the next one."""
    if level is None:
        pattern = rf"^\[{re.escape(table)}\]\n"
    else:
        pattern = rf'^\[\[levels\]\]\nname = "{re.escape(level)}"\n'
    header = re.search(pattern, text, flags=re.M)
    if header is None:
        raise SpecError(f"the profile has no table of {level or table}; write it first")
    following = re.search(r"^\[", text[header.end() :], flags=re.M)
    stop = header.end() + following.start() if following else len(text)
    return header.end(), stop
