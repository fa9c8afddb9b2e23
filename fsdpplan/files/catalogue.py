"""The catalogue of dense models, by the names of their repositories on the Hugging Face hub."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.table import short
from fsdpplan.spec.model import Model

_FILE = Path(__file__).with_name("models.toml")
_MIXTURE_NAMES = re.compile(
    r"mixtral|deepseek|gpt-?oss|llama-?4|kimi|dbrx|grok|olmoe|minimax|glm-?4\.[5-9]|moe|-a\d+b\b"
)


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def model_names() -> list[str]:
    """Names in the catalogue, by family and size."""
    return list(_entries())


def load_model(name: str) -> Model:
    """The shape of a catalogue model; `Qwen/Qwen3-8B` and `qwen3-8b` are the same."""
    found = _find(name)
    entry = _entries()[found]
    shape = {key: value for key, value in entry.items() if key not in ("source", "parameters")}
    return Model(name=found, **shape)


def model_source(name: str) -> str:
    """Where the shape of a catalogue model is published."""
    return f"config.json of {_entries()[_find(name)]['source']} on the Hugging Face hub"


def published_parameter_count(name: str) -> int:
    """The parameters that the publisher's weights hold."""
    return int(_entries()[_find(name)]["parameters"])


def _find(name: str) -> str:
    """The catalogue's spelling of `name`."""
    plain = name.strip().lower()
    by_source = {entry["source"].lower(): key for key, entry in _entries().items()}
    if plain in by_source:
        return by_source[plain]
    last = plain.rsplit("/", 1)[-1]
    if last in _entries():
        return last
    if _MIXTURE_NAMES.search(plain):
        raise SpecError(
            f"{short(name)} is a mixture of experts, which fsdpplan does not price yet; "
            f"plan a dense model instead, such as {', '.join(_near(last) or ['llama-3.1-8b'])}"
        )
    nearest = _near(last)
    hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
    raise ProfileNotFound(
        f"no model is called {short(name)}; {hint}`fsdpplan models` lists all, --config takes a "
        "Hugging Face config.json and --params a number such as 7B"
    )


def _near(name: str) -> list[str]:
    return difflib.get_close_matches(name[:100], model_names(), n=3, cutoff=0.4)
