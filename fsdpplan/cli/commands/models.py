"""`fsdpplan models`: list and show the catalogue of models."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options.question import Json

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A model, or a part of names.")]


def models(*, name: Name = None, json: Json = False) -> None:
    """Catalogue of models: list it, or show one.

    A NAME shows that model; a part of several names lists those.
    """
    from fsdpplan.cli.views import catalogues
    from fsdpplan.cli.views.render import columns
    from fsdpplan.files.catalogue import load_model, model_names, model_source, names_with

    listed = model_names() if name is None else names_with(name)
    if name is None or (len(listed) > 1 and name.lower() not in listed):
        known = [load_model(known) for known in listed]
        text = (
            catalogues.models_json(known)
            if json
            else catalogues.models_table(known, width=columns())
        )
        typer.echo(text)
        return
    model, source = load_model(name), model_source(name)
    if json:
        typer.echo(catalogues.model_json(model, source))
    else:
        typer.echo(catalogues.model_page(model, source, width=columns()))
