"""The catalogue of models, by the names of their repositories on the Hugging Face hub."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fsdpplan.errors import ProfileNotFound, SpecError, nearest
from fsdpplan.files.table import short
from fsdpplan.spec.model import (
    DeltaRule,
    Experts,
    Indexer,
    LatentAttention,
    Mamba2,
    Model,
    RopeScaling,
    Router,
)

_FILE = Path(__file__).with_name("models.toml")
_NOT_SHAPES = ("source", "paper", "note", "parameters")
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
    shape = {key: value for key, value in _entries()[found].items() if key not in _NOT_SHAPES}
    return Model(name=found, **_with_parts(shape))


_PARTS: dict[str, type[Any]] = {
    "experts": Experts,
    "router": Router,
    "latent": LatentAttention,
    "indexer": Indexer,
    "rope_scaling": RopeScaling,
    "delta": DeltaRule,
    "mamba": Mamba2,
}
"""What a table within an entry is."""


def _with_parts(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _PARTS[key](**_with_parts(value)) if isinstance(value, dict) else value
        for key, value in fields.items()
    }


@cache
def catalogue_models(*, with_experts: bool) -> tuple[Model, ...]:
    """All models of the catalogue that have experts, or all that have none."""
    models = (load_model(name) for name in model_names())
    return tuple(one for one in models if (one.experts is not None) == with_experts)


def model_source(name: str) -> str:
    """Where the shape of a catalogue model is published, and what differs from there."""
    entry = _entries()[_find(name)]
    if "paper" in entry:
        source = str(entry["paper"])
    else:
        source = f"config.json of {entry['source']} on the Hugging Face hub"
    return f"{source}; {entry['note']}" if "note" in entry else source


def published_parameters(name: str) -> int:
    """Parameters of a catalogue model, as its publisher counts them."""
    return int(_entries()[_find(name)]["parameters"])


MOST_NAMED = 12
"""Names in one message."""


def names_with(words: str) -> list[str]:
    """Names in the catalogue that hold all parts of `words`, in any order."""
    parts = words.lower().replace("-", " ").replace("_", " ").split()
    return [name for name in _entries() if parts and all(part in name for part in parts)]


def _find(name: str) -> str:
    """The catalogue's spelling of `name`."""
    plain = name.strip().lower()
    entries = _entries().items()
    by_source = {entry["source"].lower(): key for key, entry in entries if "source" in entry}
    if plain in by_source:
        return by_source[plain]
    last = plain.rsplit("/", 1)[-1]
    if last in _entries():
        return last
    variant = _base_of(last)
    if variant:
        return variant
    within = names_with(last)
    if len(within) == 1:
        return within[0]
    if within:
        raise ProfileNotFound(
            f"{short(name)} stands in the names of {len(within)} models: type one of "
            f"{', '.join(within[:MOST_NAMED])}{' ...' if len(within) > MOST_NAMED else ''}; "
            f"`fsdpplan models {last}` lists them"
        )
    near = _near(last)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    if _MIXTURE_NAMES.search(plain):
        raise SpecError(
            f"no model is called {short(name)}, which sounds like a mixture of experts; {hint}"
            "give its Hugging Face config.json by --config, or its size by --params 235e9 "
            "--active-params 22e9"
        )
    raise ProfileNotFound(
        f"no model is called {short(name)}; {hint}`fsdpplan models` lists all, --config takes a "
        "Hugging Face config.json and --params a number such as 7B"
    )


_VARIANTS = frozenset({"base", "instruct", "chat", "it", "thinking", "hf", "bf16", "fp8"})
"""Words that hubs put into the names of what was trained further, or stored otherwise: the shape
stays."""


def _base_of(name: str) -> str:
    """The model that a hub's `name` is a variant of, the empty text if there is none or several."""
    base = _base_name(name)
    if base in _entries():
        return base
    found = {
        key
        for key, entry in _entries().items()
        if base == _base_name(str(entry.get("source", "")).lower().rsplit("/", 1)[-1])
    }
    return found.pop() if len(found) == 1 else ""


def _base_name(name: str) -> str:
    parts = name.split("-")
    return "-".join(
        part for part in parts if part not in _VARIANTS and not re.fullmatch(r"\d{4}", part)
    )


def _near(name: str) -> list[str]:
    names = model_names()
    return nearest(name, names) or difflib.get_close_matches(name[:100], names, n=3, cutoff=0.4)
