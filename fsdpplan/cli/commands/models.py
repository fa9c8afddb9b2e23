"""`fsdpplan models`: list and show the catalogue of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Annotated, Any

import typer

from fsdpplan.cli.options import offered
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.render import blocks, columns, facts, flat_pairs, table, wrapped
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.files import catalogue
from fsdpplan.files.model_search import find_models
from fsdpplan.spec.model import Model
from fsdpplan.units import format_count

# hidden: the list of arguments would show its Python type, so the command's text says what it is
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME|WORD", hidden=True, autocompletion=offered.models),
]


def models(*, words: Words = None, json: Json = False) -> None:
    """Catalogue of models: list or search it, or show one.

    A NAME shows that model. WORDS list those that have them all, and show it where there is only
    one: parts of a name or of its publisher's, a size (70b, 7b..14b, ..8b), or a trait (dense, moe,
    gqa, mqa, mha, mla, windows).
    """
    found = find_models(words or ())
    if not words or len(found) > 1:
        known = [catalogue.load_model(name) for name in found]
        typer.echo(models_json(known) if json else models_table(known, width=columns()))
        return
    (name,) = found
    model, source = catalogue.load_model(name), catalogue.model_source(name)
    if json:
        typer.echo(model_json(model, source))
    else:
        typer.echo(model_page(model, source, width=columns()))


def models_table(models: Sequence[Model], *, width: int) -> str:
    """One line a model, of as many columns as are room for; `--json` has all."""
    headers: tuple[str, ...] = (
        "name",
        "parameters",
        "active",
        "layers",
        "hidden",
        "heads",
        "kv",
        "vocab",
    )
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
    kept = _columns_within(width, headers, rows)
    return table(
        [row[:kept] for row in rows],
        headers=headers[:kept],
        align=("left", *["right"] * (kept - 1)),
        width=width,
    )


LEAST_COLUMNS = 3
"""The name and both counts."""


def _columns_within(width: int, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How many of the first columns fit, two spaces before each."""
    needed = accumulate(2 + max(map(len, column)) for column in zip(headers, *rows, strict=True))
    return max(LEAST_COLUMNS, sum(so_far <= width for so_far in needed))


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
