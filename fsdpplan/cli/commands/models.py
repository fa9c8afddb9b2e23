"""`fsdpplan models`: list and show the catalogue of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.render import blocks, columns, facts, flat_pairs, table, wrapped
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.files import catalogue
from fsdpplan.spec.model import Model
from fsdpplan.units import format_count

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A model, or a part of names.")]


def models(*, name: Name = None, json: Json = False) -> None:
    """Catalogue of models: list it, or show one.

    A NAME shows that model; a part of several names lists those.
    """
    listed = catalogue.model_names() if name is None else catalogue.names_with(name)
    if name is None or (len(listed) > 1 and name.lower() not in listed):
        known = [catalogue.load_model(known) for known in listed]
        text = models_json(known) if json else models_table(known, width=columns())
        typer.echo(text)
        return
    model, source = catalogue.load_model(name), catalogue.model_source(name)
    if json:
        typer.echo(model_json(model, source))
    else:
        typer.echo(model_page(model, source, width=columns()))


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
    return json.dumps({"models": [_model_document(model) for model in models]}, indent=2)


def model_json(model: Model, source: str) -> str:
    """One model with its source."""
    return json.dumps({**_model_document(model), "source": source}, indent=2)


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
