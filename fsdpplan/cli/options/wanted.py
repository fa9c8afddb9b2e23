"""A part of a layout in words: `tp 4`, `pp 2 ep 8`, `hsdp`, `no recompute`, `micro_batch=2`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_type_hints

from fsdpplan.cli.options import synonyms
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.offered import beginning
from fsdpplan.cli.options.parse import shown
from fsdpplan.cli.options.phrases import phrases_of, settled
from fsdpplan.errors import SpecError, did_you_mean
from fsdpplan.search.advice.why import NUMBERS, Wanted
from fsdpplan.search.pins import Pins
from fsdpplan.spec.layout import MESH_AXES, CpAttention, Schedule, Sharding

EXAMPLES = '"tp 4", "pp 2 ep 8", hsdp, "no recompute" or micro_batch=2'

_DEGREES = (*MESH_AXES, "ep")

_NAMES = {
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "expert": "ep",
    "experts": "ep",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "recompute": "activation_checkpointing",
    "recomputation": "activation_checkpointing",
    "checkpointing": "activation_checkpointing",
    "recomputed_blocks": "checkpoint_blocks",
    "reshard": "reshard_after_forward",
    "sync": "gradient_sync",
    "bucket": "ddp_bucket_bytes",
    "ddp_bucket": "ddp_bucket_bytes",
    "microbatch": "micro_batch",
    "mbs": "micro_batch",
    "stages": "virtual_stages",
    "pieces": "loss_chunks",
    "asynctp": "async_tp",
    "compiled": "compile",
}
"""Words of people for fields."""

_NOT = {
    "activation_checkpointing": "none",
    "offload": "none",
    "reshard_after_forward": "never",
    "sharding": "ddp",
    "schedule": "none",
    "gradient_sync": "last",
    "checkpoint_blocks": "all",
}
"""What `no` makes of a field that is no degree and no switch."""

_ALONE = {"activation_checkpointing": "full", "offload": "cpu", "reshard_after_forward": "always"}
"""What a field means without a value."""

_VALUES: tuple[tuple[Any, str, Mapping[str, str]], ...] = (
    (Sharding, "sharding", synonyms.SHARDING),
    (Schedule, "schedule", synonyms.SCHEDULES),
    (CpAttention, "cp_attention", synonyms.CP_ATTENTION),
)
"""Fields whose values are said without their name."""

_NOISE = {"and", "with", "x", "a", "the", "of", "parallel", "parallelism", "sharded"}

_GLUED = re.compile(r"(tp|cp|pp|ep)([0-9]+)")

_MOST_WORDS = 3
"""Of a name: `reshard after forward`."""


def wanted(text: str, *, name: str) -> Wanted:
    """What `text` asks of a layout. Raises SpecError for words that are none of it."""
    said: dict[str, Any] = {}

    def add(field: str, value: Any) -> None:
        if said.get(field, value) != value and None not in (said[field], value):
            raise SpecError(
                f"{name}: {shown(text)} asks for two values of {field}: give one of them"
            )
        said[field] = said.get(field) if value is None else value

    phrases, rest = phrases_of(text.strip())
    for field, value in phrases:
        add(field, value)
    words = [word.removeprefix("--") for word in re.split(r"[\s,;:=+]+", rest)]
    words = [piece for word in words for piece in _unglued(word)]
    words = [word for word in words if word and word.lower() not in _NOISE]
    while words:
        field, value, number = _next(words, name)
        del words[:number]
        for one, meant in _meant(field, value):
            add(one, meant)
    if not said:
        raise SpecError(f"{name}: {shown(text)} names no part of a layout; type such as {EXAMPLES}")
    spread = dict(said)
    for field, value in settled(spread, name=name):
        add(field, value)
    return Wanted(
        words=" ".join(text.split()),
        pins=Pins(**{field: value for field, value in said.items() if _is_pin(field, value)}),
        split=tuple(field for field, value in said.items() if value is None),
        numbers=tuple((field, said[field]) for field in NUMBERS if field in said),
    )


def _is_pin(field: str, value: Any) -> bool:
    return value is not None and field in {one.name for one in fields(Pins)}


def layout_words() -> list[str]:
    """Every word that may begin a part of a layout: fields, what people call them, values that are
    said without their name."""
    values = [word for kind, _, _ in _VALUES for word in get_args(kind) if word != "none"]
    return list(dict.fromkeys([*_DEGREES, "hsdp", "eager", "no", *values, *_flags(), *_NAMES]))


def offered(incomplete: str) -> list[str]:
    """What a shell offers: words of a layout, behind those that are there."""
    return beginning(incomplete, (one for one in layout_words() if len(one) > 1), between=" ")


def _unglued(word: str) -> tuple[str, ...]:
    found = _GLUED.fullmatch(word.lower())
    return found.groups() if found else (word,)


def _meant(field: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Fields and values; None: more than one rank."""
    if field == "hsdp":
        return ("sharding", "fsdp"), ("dp_replicate", None)
    if field == "activation_checkpointing" and value == synonyms.SELECTIVE:
        return ((field, "op"),)
    return ((field, value),)


def _next(words: list[str], name: str) -> tuple[str, Any, int]:
    """(field, value, how many words) that begin `words`."""
    begin = words[0].lower()
    if begin == "hsdp":
        return "hsdp", None, 1
    if begin == "eager":
        return "compile", False, 1
    if begin in ("no", "without") and len(words) > 1:
        field, taken = _field(words[1:], name)
        return field, _denied(field, name), taken + 1
    word = begin.replace("-", "_")
    if word != "none" and _longest(words)[1] <= 1:  # `ddp bucket` is no DDP
        for kind, field, others in _VALUES:
            if word in get_args(kind) or word in others:
                return field, _parsed(field, word, name), 1
    if begin in ("full", "op", "selective", "attention") and len(words) > 1:
        field, taken = _field(words[1:], name)
        if field == "activation_checkpointing":
            return field, _parsed(field, words[0], name), taken + 1
    field, taken = _field(words, name)
    if taken < len(words):
        try:
            return field, _parsed(field, words[taken], name), taken + 1
        except SpecError:
            if not _stands_alone(field) or words[taken].isdigit():
                raise
    if not _stands_alone(field):
        raise SpecError(f"{name}: {field} needs a value; type such as {EXAMPLES}")
    return field, _alone(field), taken


def _field(words: list[str], name: str) -> tuple[str, int]:
    """(field, how many words name it), the longest name that there is."""
    field, taken = _longest(words)
    if not taken:
        meant = did_you_mean(words[0], layout_words())
        raise SpecError(
            f"{name}: {shown(words[0])} is no part of a layout{meant}; type such as {EXAMPLES}"
        )
    return field, taken


def _longest(words: list[str]) -> tuple[str, int]:
    """The same; 0 words where they name none."""
    for taken in range(min(_MOST_WORDS, len(words)), 0, -1):
        word = "_".join(words[:taken]).lower().replace("-", "_")
        field = _NAMES.get(word, word)
        if field in _flags():
            return field, taken
    return "", 0


@cache
def _flags() -> dict[str, Flag]:
    hints = get_type_hints(LayoutOptions, include_extras=True)
    return {
        field: flag
        for field, hint in hints.items()
        for flag in getattr(hint, "__metadata__", ())
        if isinstance(flag, Flag)
    }


def _parsed(field: str, word: str, name: str) -> Any:
    parse = _flags()[field].parse
    if parse is None:
        if word.lower() in ("on", "true", "yes"):
            return True
        if word.lower() in ("off", "false", "no"):
            return False
        raise SpecError(f"{name}: {field} is on or off; type such as {EXAMPLES}")
    return parse(word, name=name)


def _stands_alone(field: str) -> bool:
    return field in _DEGREES or field in _ALONE or _flags()[field].parse is None


def _alone(field: str) -> Any:
    if field in _DEGREES:
        return None
    return _ALONE.get(field, True)


def _denied(field: str, name: str) -> Any:
    if field in _NOT:
        return _NOT[field]
    if field in ("stage_blocks", "ddp_bucket_bytes", "cp_attention"):
        raise SpecError(f"{name}: no {field} says nothing; type such as {EXAMPLES}")
    return False if _flags()[field].parse is None else 1
