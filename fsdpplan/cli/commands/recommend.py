"""`fsdpplan recommend`: search, rank, explain on one screen, save the plan."""

from __future__ import annotations

import typer

from fsdpplan.cli.options.files import DEFAULT_PLAN, EvidenceOptions, Json, NoSave, Save
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.errors import SpecError


def recommend(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    save: Save = DEFAULT_PLAN,
    no_save: NoSave = False,
    json: Json = False,
) -> None:
    """Search, rank, explain on one screen, save the plan."""
    from fsdpplan.cli.resolve import answer
    from fsdpplan.cli.resolve.inputs import resolve
    from fsdpplan.cli.views import screen
    from fsdpplan.cli.views.render import columns

    if no_save and save != DEFAULT_PLAN:
        raise SpecError("--save and --no-save contradict each other: give one of them")
    place = None if no_save else path(save, name="--save")
    inputs = resolve(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
    )
    found = answer.search(inputs)
    inputs = answer.advised(inputs, found)
    said = answer.save(inputs, found.result, place) if place is not None else answer.NOT_SAVED
    if json:
        typer.echo(answer.recommend_json(inputs, found))
    else:
        typer.echo(screen.recommend_screen(inputs, found.result, width=columns()))
    typer.echo(said, err=True)
