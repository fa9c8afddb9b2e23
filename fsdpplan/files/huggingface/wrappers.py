"""Hugging Face configs that hold several models: the text model, and what stands beside it."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.table import Table, short
from fsdpplan.units import format_count

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a wrapper keeps its language model, and Qwen's omni models the wrapper of theirs."""

_BLOCKS = ("num_hidden_layers", "depth", "vt_num_hidden_layers", "num_layers")
_WIDTHS = ("embed_dim", "vt_hidden_size", "hidden_size", "d_model")
_INNER_WIDTHS = ("intermediate_size", "vt_intermediate_size")
_OTHER_INNER_WIDTH = "glm4v"
"""Towers whose `intermediate_size` is that of what merges patches."""


def text_model(table: Table, notes: list[str]) -> Table:
    """The table of the language model that is planned: `table` itself, or one within it."""
    for _ in TEXT_KEYS:
        notes += _towers(table)
        key = next((key for key in TEXT_KEYS if table.values.get(key) is not None), None)
        if key is None:
            break
        inner = table.table(key)
        values = dict(inner.values)
        if table.values.get("tie_word_embeddings") is not None:  # the wrapper's model has the head
            values["tie_word_embeddings"] = table.values["tie_word_embeddings"]
        table = replace(inner, values=values)
    return table


def _towers(table: Table) -> list[str]:
    """What is left out beside the text model, each with its size where its config says it."""
    return [
        f"the {kind} tower{_size(table.values[key])} is left out: only the text model is planned"
        for kind in ("vision", "audio")
        if isinstance(table.values.get(key := f"{kind}_config"), dict)
    ]


def _size(values: dict[str, object]) -> str:
    """Parameters of a transformer's blocks: 4 of the width squared for attention, and two matrices
    of the feed-forward network, or three with a gate. Biases, norms, patches and what joins the
    tower to the text model are left out."""

    def whole(*keys: str) -> int:
        found = (values.get(key) for key in keys)
        return next((n for n in found if type(n) is int and 0 < n < 10**6), 0)

    blocks, width, inner = whole(*_BLOCKS), whole(*_WIDTHS), whole(*_INNER_WIDTHS)
    ratio, kind = values.get("mlp_ratio"), str(values.get("model_type", ""))
    if not inner and isinstance(ratio, int | float) and 0 < ratio < 100:
        inner = int(ratio * width)
    if not (blocks and width and inner) or kind.startswith(_OTHER_INNER_WIDTH):
        return ""
    is_gated = values.get("hidden_act") in ("silu", "swish") or kind == "pixtral"
    count = blocks * width * (4 * width + (3 if is_gated else 2) * inner)
    return f" ({short(blocks)} blocks of {width}, about {format_count(count)} parameters)"
