"""YAML in block style, as people read it, of the values that JSON has.

PyYAML writes it, by the rules of YAML 1.1. Programs of other versions read it too, so a string
stands plain only where none could read anything else in it (`no`, `1e3`, `0o7`, `1:30`, dates, `~`
and `=` are quoted); text of several lines is a literal block.

Source: YAML 1.1, its type repository for bool, int, float, null, timestamp, merge and value;
YAML 1.2.2, section 10.3.2; PyYAML 6.0.3 emitter.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from fsdpplan.errors import SpecError

YamlValue: TypeAlias = (
    "Mapping[str, YamlValue] | Sequence[YamlValue] | str | int | float | bool | None"
)

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
"""Begins like no number, date or sign; a colon within a word ends no key."""
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def yaml_text(value: YamlValue) -> str:
    """One document; ends with a line break. Raises SpecError for what YAML cannot hold."""
    import yaml

    return str(
        yaml.dump(
            value,
            Dumper=_dumper(),
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=False,
            width=math.inf,
        )
    )


@cache
def _dumper() -> Any:
    """PyYAML's writer of plain values, with our choice of style."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Items of a list stand deeper than its key; what occurs twice is written twice."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

        def write_double_quoted(self, text: str, split: bool = True) -> None:
            # No one who reads the file is shown another text than programs.
            self.allow_unicode = text.isprintable()
            super().write_double_quoted(text, split)
            self.allow_unicode = True

    def string(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))

    def number(dumper: Dumper, value: float) -> Any:
        if not math.isfinite(value):
            raise SpecError(f"{value} is no number that a manifest can hold: give a finite one")
        return dumper.represent_float(value)

    Dumper.add_representer(str, string)
    Dumper.add_representer(float, number)
    return Dumper


def _style(text: str) -> str | None:
    """PyYAML's name of the style: literal, plain or between double quotes.

    It writes a literal block between double quotes where the block could not be read back.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecError(
            f"{text!r} is not text: it has bytes that are no UTF-8, which YAML cannot hold; "
            "write it in UTF-8"
        )
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > 1 and all(line.replace("\t", "").isprintable() for line in lines):
        return "|"
    return None if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else '"'
