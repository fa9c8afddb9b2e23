"""Lists and pages of the catalogue of models, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.views.render import blocks, facts, table, wrapped
from fsdpplan.cost.params import active_parameter_count, parameter_count
from fsdpplan.spec.model import Model
from fsdpplan.units import format_count


def models_table(models: Sequence[Model], *, width: int) -> str:
    """One line a model."""
    headers = ("name", "parameters", "active", "layers", "hidden", "heads", "kv", "vocab")
    rows = [
        (
            model.name,
            format_count(parameter_count(model)),
            format_count(active_parameter_count(model)) if model.experts else "all",
            str(model.layers),
            str(model.hidden),
            str(model.heads),
            str(model.kv_heads),
            str(model.vocab),
        )
        for model in models
    ]
    return table(rows, headers=headers, align=("left", *["right"] * 7), width=width)


def models_json(models: Sequence[Model]) -> str:
    """All models."""
    return dumps({"models": [_model_document(model) for model in models]})


def model_json(model: Model, source: str) -> str:
    """One model with its source."""
    return dumps({**_model_document(model), "source": source})


def model_page(model: Model, source: str, *, width: int) -> str:
    """Every field of a model, and where it is published."""
    fields = [
        pair for key, value in _model_document(model).items() for pair in flat_pairs(key, value)
    ]
    return blocks(facts(fields, width=width), wrapped(f"Source: {source}", width=width))


def _model_document(model: Model) -> dict[str, Any]:
    return {
        **asdict(model),
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
    }


def flat_pairs(key: str, value: Any) -> list[tuple[str, str]]:
    """`key.inner  text` pairs of a nested value."""
    match value:
        case dict():
            return [pair for k, v in value.items() for pair in flat_pairs(f"{key}.{k}", v)]
        case list() | tuple() if value and isinstance(value[0], dict):
            return [pair for i, v in enumerate(value) for pair in flat_pairs(f"{key}.{i}", v)]
        case list() | tuple():
            return [(key, ", ".join(map(str, value)))]
        case float():
            return [(key, f"{value:g}")]
        case None:
            return [(key, "none")]
        case _:
            return [(key, str(value))]


def dumps(document: dict[str, Any]) -> str:
    """As --json prints it."""
    return json.dumps(document, indent=2)
