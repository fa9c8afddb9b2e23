"""`fsdpplan estimate`: predict one given layout."""

from __future__ import annotations

import typer

from fsdpplan.cli.options.files import EvidenceOptions, Json
from fsdpplan.cli.options.layout import OneLayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.views.told import tell
from fsdpplan.errors import NoFeasibleLayout


def estimate(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: OneLayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    json: Json = False,
) -> None:
    """Predict the time and memory of one layout.

    Where it does not fit, it says the nearest one that does, and ends with code 3.
    """
    from fsdpplan.cli.resolve import answer
    from fsdpplan.cli.resolve.inputs import resolve
    from fsdpplan.cli.views import screen
    from fsdpplan.cli.views.render import columns

    inputs = resolve(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
    )
    one = answer.one_layout(inputs)
    if json:
        typer.echo(answer.estimate_json(one))
    else:
        typer.echo(screen.estimate_screen(one, width=columns()))
    if not one.fits:
        tell(answer.too_large(one))
        raise typer.Exit(NoFeasibleLayout.exit_code)
