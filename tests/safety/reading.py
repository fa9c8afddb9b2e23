"""YAML as other programs read it."""

from __future__ import annotations

from typing import Any

import yaml

# libyaml's reader, where it is there, is ten times as fast, and the one that many programs use.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def document(text: str) -> Any:
    """The only document of a text."""
    return yaml.load(text, Loader=Loader)


def every_document(text: str) -> list[Any]:
    """All documents of a text."""
    return list(yaml.load_all(text, Loader=Loader))
