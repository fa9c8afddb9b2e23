"""Searching the catalogue of models: by parts of names, who publishes them, sizes and traits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import inf

from fsdpplan.errors import ProfileNotFound
from fsdpplan.files import catalogue
from fsdpplan.files.search import having_all, nothing_found, split_words
from fsdpplan.spec.model import Model

SAME_SIZE = 0.03
"""A model of 70.6 billion parameters is called a 70b; most names round so."""

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?)([kmbt])"
_SIZE = re.compile(_NUMBER)
_RANGE = re.compile(rf"(?:{_NUMBER})?\.\.(?:{_NUMBER})?")
_BOUND = re.compile(rf"([<>]=?)({_NUMBER})")

TRAITS: dict[str, Callable[[Model], bool]] = {
    "dense": lambda model: model.experts is None,
    "moe": lambda model: model.experts is not None,
    "mixture": lambda model: model.experts is not None,
    "mha": lambda model: model.latent is None and model.kv_heads == model.heads,
    "gqa": lambda model: model.latent is None and 1 < model.kv_heads < model.heads,
    "mqa": lambda model: model.latent is None and model.kv_heads == 1 < model.heads,
    "mla": lambda model: model.latent is not None,
    "windows": lambda model: model.windowed_blocks > 0,
    "hybrid": lambda model: bool(set(model.mixers) & set("DM")),
    "delta": lambda model: model.delta is not None,
    "mamba": lambda model: model.mamba is not None,
    "sparse": lambda model: bool(model.latent and model.latent.indexer),
    "sinks": lambda model: model.attention_sinks,
    "shared-expert": lambda model: bool(model.experts and model.experts.shared_hidden),
    "qk-norm": lambda model: model.qk_norm,
    "tied": lambda model: model.tied_embeddings,
    "rope": lambda model: model.positions == "rope",
    "alibi": lambda model: model.positions == "alibi",
    "learned": lambda model: model.positions == "learned",
    "swiglu": lambda model: model.mlp == "swiglu",
    "geglu": lambda model: model.mlp == "geglu",
    "gelu": lambda model: model.mlp == "gelu",
    "rmsnorm": lambda model: model.norm == "rmsnorm",
    "layernorm": lambda model: model.norm == "layernorm",
}
"""What a model may be asked to have, by the word."""


def find_models(words: Sequence[str]) -> tuple[str, ...]:
    """The name of the model that is called so; else those of all that have each word, in the order
    of the catalogue: by family, in it by size. No words: all names.

    A word is a part of a name or of where the model is published; a size, which the name says or
    the parameters are within 3 % of (70b), or a range of sizes (7b..14b, ..8b, 100b.., "<=8b"); or
    a trait. Capitals do not matter, nor in names dashes.
    """
    named = _exact(words)
    if named is not None:
        return (named,)
    asked = split_words(words)
    found = having_all(asked, catalogue.model_names(), _has)
    if not found:
        said = nothing_found("model", words, catalogue.model_names(), has=_has)
        raise ProfileNotFound(
            f"{said}; type a part of a name (qwen3), a size (70b, 7b..14b) or a trait "
            f"({', '.join(list(TRAITS)[:7])}); `fsdpplan models` lists all"
        )
    return tuple(found)


def _exact(words: Sequence[str]) -> str | None:
    """The model that one word names, by its name or its repository."""
    if len(words) != 1:
        return None
    plain = words[0].strip().lower()
    named = {plain} if plain in catalogue.model_names() else set()
    if "/" in plain:
        named |= {
            name for name in catalogue.model_names() if f" {plain} " in f"{_published(name)} "
        }
    return named.pop() if len(named) == 1 else None


def _published(name: str) -> str:
    return re.sub(r"[;,]", " ", catalogue.model_source(name)).lower()


def _has(name: str, word: str) -> bool:
    sizes = _sizes(word)
    if sizes is not None:
        least, most = sizes
        return least <= catalogue.published_parameters(name) <= most or word in re.split(
            r"[-_/ ]", name
        )
    if word in TRAITS and TRAITS[word](catalogue.load_model(name)):
        return True
    return word in name or word in _published(name) or _plain(word) in _plain(name)


def _plain(text: str) -> str:
    return re.sub(r"[-_. ]", "", text) or text


def _sizes(word: str) -> tuple[float, float] | None:
    """(least, most) parameters that a word asks for; None: it asks for none."""
    if size := _SIZE.fullmatch(word):
        asked = _count(*size.groups())
        return asked * (1 - SAME_SIZE), asked * (1 + SAME_SIZE)
    if bound := _BOUND.fullmatch(word):
        limit = _count(bound[3], bound[4])
        return (0.0, limit) if bound[1].startswith("<") else (limit, inf)
    if (ends := _RANGE.fullmatch(word)) and word != "..":
        least = _count(ends[1], ends[2]) if ends[1] else 0.0
        return least, _count(ends[3], ends[4]) if ends[3] else inf
    return None


def _count(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]
