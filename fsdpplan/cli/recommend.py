"""`fsdpplan recommend`: search, rank, explain on one screen, save the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fsdpplan.cli.options import (
    ClusterOptions,
    EvidenceOptions,
    Json,
    LayoutOptions,
    ModelOptions,
    Save,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.parse import path

if TYPE_CHECKING:
    pass


def recommend(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    save: Save = "fsdpplan.json",
    json: Json = False,
) -> None:
    """Search, rank, explain on one screen, save the plan."""
    from fsdpplan.cli import answer, screen
    from fsdpplan.cli.inputs import resolve
    from fsdpplan.cli.render import columns

    place = path(save, name="--save")
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
    saved = answer.save(inputs, found.result, place)
    if json:
        typer.echo(answer.recommend_json(inputs, found))
    else:
        typer.echo(screen.recommend_screen(inputs, found.result, width=columns()))
    typer.echo(saved, err=True)
