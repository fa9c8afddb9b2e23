"""Fields that Hugging Face configs of several families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.table import Table, short
from fsdpplan.spec.model import MAX_LAYERS, RopeScaling

SILU = ("silu", "swish")
GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast", "gelu_python")
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
UNGATED = (*GELU, "relu", "relu2")
"""Activations without a gate: one read and one write each, so they are planned alike."""


def either(table: Table, *keys: str) -> str:
    """Which of `keys`, names of one field in configs of different age, is written."""
    return next((key for key in keys if table.values.get(key) is not None), keys[0])


def optional_integer(table: Table, key: str, default: int, *, lowest: int = 1) -> int:
    """`key`, or `default` where it is absent or null."""
    if table.values.get(key) is None:
        return default
    return table.integer(key, lowest=lowest)


def optional_flag(table: Table, key: str, default: bool) -> bool:
    """`key`, or `default` where it is absent or null."""
    return default if table.values.get(key) is None else table.flag(key)


def optional_number(table: Table, key: str, default: float) -> float:
    """`key`, or `default` where it is absent or null."""
    return default if table.values.get(key) is None else table.number(key)


def require_flag(table: Table, key: str, wanted: bool, why: str) -> None:
    """Raise unless `key` is absent, null or `wanted`."""
    if optional_flag(table, key, wanted) is not wanted:
        raise table.wrong(key, f"{str(wanted).lower()}: {why}")


def activation(table: Table, key: str, known: Iterable[str]) -> str | None:
    """The activation function, which must be one that the family has; None: its default."""
    return None if table.values.get(key) is None else table.choice(key, known)


def note_ungated(table: Table, notes: list[str], key: str, default: str) -> None:
    """Activations without a gate are trained as the tanh form of GELU; say so of the others."""
    kind = activation(table, key, UNGATED) or default
    if kind not in TANH_GELU:
        notes.append(f"{key} {kind} is planned and trained as the tanh form of GELU")


def head_dim(table: Table, heads_key: str = "num_attention_heads") -> int:
    """`head_dim`, or hidden / heads where it is absent or null."""
    if table.values.get("head_dim") is not None:
        return table.integer("head_dim")
    return split_width(table, "hidden_size", heads_key)


def split_width(table: Table, width_key: str, heads_key: str) -> int:
    """Width of one of the heads that split `width_key` evenly."""
    hidden, heads = table.integer(width_key), table.integer(heads_key)
    if hidden % heads:
        raise SpecError(
            f"{table.field(heads_key)} {heads} does not divide {width_key} {hidden}; "
            "write head_dim, or correct one of them"
        )
    return hidden // heads


def rope_theta(
    table: Table, notes: list[str], *, default: float = 10000.0, may_be_partial: bool = False
) -> float:
    """Base of the rotary frequencies: `rope_parameters` (transformers 5) or `rope_theta`."""
    theta = optional_number(table, "rope_theta", default)
    _check_partial(table, notes, may_be_partial)
    for key in ("rope_scaling", "rope_parameters"):
        if table.values.get(key) is None:
            continue
        rope = table.table(key)
        if rope.values.get("full_attention") is not None:  # one table a kind of block (Gemma 3)
            rope = rope.table("full_attention")
        theta = optional_number(rope, "rope_theta", theta)
        _check_partial(rope, notes, may_be_partial)
        kind = rope.values.get("rope_type", rope.values.get("type", "default"))
        if kind not in ("default", *SCALINGS):
            notes.append(
                f"{key} of type {short(kind)} is left out: it turns the angles of long positions "
                "and changes neither memory nor time"
            )
    return theta


SCALINGS = ("linear", "dynamic", "llama3", "yarn")
"""Kinds of stretched rotary positions that the trainer computes."""


def rope_scaling(table: Table, *, of_scores: bool = False) -> RopeScaling | None:
    """How rotary positions are stretched: `rope_parameters` (transformers 5) or `rope_scaling`.
    `of_scores`: the family scales scores, too (DeepSeek)."""
    for key in ("rope_parameters", "rope_scaling"):
        if table.values.get(key) is None:
            continue
        rope = table.table(key)
        kind = rope.values.get("rope_type", rope.values.get("type"))
        if kind not in SCALINGS:
            continue
        factor = optional_number(rope, "factor", 1.0)
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        if kind == "dynamic":  # transformers measures sequences by what the model says, no other
            longest = optional_integer(table, "max_position_embeddings", 2048)
            return RopeScaling(kind="dynamic", factor=factor, original_positions=longest)
        original = optional_integer(
            rope,
            "original_max_position_embeddings",
            optional_integer(table, "max_position_embeddings", 8192),
        )
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=factor,
                original_positions=original,
                low=rope.number("low_freq_factor"),
                high=rope.number("high_freq_factor"),
            )
        return _yarn(rope, factor, original, of_scores)
    return None


def _yarn(rope: Table, factor: float, original: int, of_scores: bool) -> RopeScaling:
    # 0 says the same as nothing
    mscale, of_all = (
        rope.number(key) if rope.values.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")
    )
    both = bool(mscale and of_all)
    usual = _magnitude(factor, mscale) / _magnitude(factor, of_all) if both else None
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        low=optional_number(rope, "beta_slow", 1.0),
        high=optional_number(rope, "beta_fast", 32.0),
        amplitude=optional_number(
            rope, "attention_factor", _magnitude(factor, 1.0) if usual is None else usual
        ),
        score_factor=_magnitude(factor, of_all) ** 2 if of_scores and of_all else 1.0,
        truncate=optional_flag(rope, "truncate", True),
    )


def _magnitude(factor: float, mscale: float) -> float:
    """Peng et al. (arXiv 2309.00071), equation 22, with DeepSeek's weight."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _check_partial(table: Table, notes: list[str], may_be_partial: bool) -> None:
    fraction = optional_number(table, "partial_rotary_factor", 1.0)
    if fraction != 1.0 and not may_be_partial:
        raise table.wrong("partial_rotary_factor", "1: positions turn whole heads here")
    if fraction != 1.0:
        note_partial(notes, f"partial_rotary_factor {fraction:g}")


def note_partial(notes: list[str], what: str) -> None:
    """Heads that positions turn in part are planned and trained as turned in whole."""
    notes.append(f"{what} is planned and trained as 1: positions turn whole heads here")


def windows(
    table: Table, notes: list[str], *, window: int, layers: int, full_every: int
) -> dict[str, Any]:
    """`sliding_window` and `full_attention_every`, by `layer_types` or the family's pattern.

    `window` 0 is none; `full_every` is the pattern without `layer_types`: the last of so many
    blocks is full, none is if there are fewer.
    """
    every = full_every
    if table.values.get("layer_types") is not None:
        every = _full_every(table, layers, notes)
    if not window or every == 1:
        return {}
    notes.append(
        f"sliding_window {window} is priced and trained: its blocks see no token farther back"
    )
    return {"sliding_window": window, "full_attention_every": every}


def _full_every(table: Table, layers: int, notes: list[str]) -> int:
    """N where each Nth of `layer_types` is full and the others slide; N > layers: none is. Of
    another order the N that has as many full blocks, or nearly."""
    words = {"full_attention": "f", "sliding_attention": "s"}
    found = letters(table, "layer_types", layers, words)
    kinds = whole_pattern(found, layers)
    full = kinds.count("f")
    every = kinds.index("f") + 1 if full else layers + 1
    if kinds == "".join("f" if (i + 1) % every == 0 else "s" for i in range(layers)):
        return every
    every = min(range(2, layers + 2), key=lambda n: abs(layers // n - full))
    notes.append(
        f"layer_types has {full} blocks that see everything in an order of its own: planned is the "
        f"last of each {every}, {layers // every} in all"
    )
    return every


def layers_of(table: Table) -> int:
    """`num_hidden_layers`, of which lists are made: no more than a model can have."""
    return within_layers(table, "num_hidden_layers", table.integer("num_hidden_layers"))


def within_layers(table: Table, key: str, number: int) -> int:
    """`number`, the value of `key`, which counts blocks."""
    if number > MAX_LAYERS:
        raise table.wrong(key, f"at most {MAX_LAYERS}: no model has more than {MAX_LAYERS} layers")
    return number


def letters(table: Table, key: str, layers: int, words: dict[str, str]) -> str:
    """A letter for each block, by the list of their kinds; the shortest run that is repeated."""
    kinds = table.values[key]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise table.wrong(key, f"a list of {layers} kinds, one a layer")
    strange = [kind for kind in kinds if not isinstance(kind, str) or kind not in words]
    if strange:
        raise SpecError(
            f"{table.field(key)} has {short(strange[0])}: the kinds of blocks that are planned are "
            f"{', '.join(words)}; give the size of another model by --params"
        )
    return period("".join(words[kind] for kind in kinds))


def period(pattern: str) -> str:
    """The shortest beginning of `pattern` that makes all of it, said over and over."""
    return next(
        pattern[:size]
        for size in range(1, len(pattern) + 1)
        if (pattern[:size] * (len(pattern) // size + 1))[: len(pattern)] == pattern
    )


def whole_pattern(found: str, layers: int) -> str:
    """A letter for each of `layers` blocks, by what is repeated."""
    return (found * layers)[:layers]


def renamed(table: Table, names: dict[str, str]) -> Table:
    """The table with the value of each key of `names` under its other name, where that is free."""
    values = dict(table.values)
    for key, other in names.items():
        if key in values and values.get(other) is None:
            values[other] = values[key]
    return replace(table, values=values)


def with_default(table: Table, **defaults: object) -> Table:
    """The table with the family's own values of keys that are absent or null."""
    written = {key: value for key, value in table.values.items() if value is not None}
    return replace(table, values={**table.values, **defaults, **written})
