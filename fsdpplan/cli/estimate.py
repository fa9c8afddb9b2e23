"""`fsdpplan estimate`: predict one given layout."""

from __future__ import annotations

import typer

from fsdpplan.cli.options import (
    ClusterOptions,
    Json,
    LayoutOptions,
    LedgerOptions,
    ModelOptions,
    TrainingOptions,
)


def estimate(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    ledger: LedgerOptions,
    json: Json = False,
) -> None:
    """Predict the time and memory of one layout."""
    from fsdpplan.cli import answer, screen
    from fsdpplan.cli.inputs import resolve
    from fsdpplan.cli.render import columns

    inputs = resolve(model=model, cluster=cluster, training=training, layout=layout, ledger=ledger)
    one = answer.one_layout(inputs)
    if json:
        typer.echo(answer.estimate_json(one))
    else:
        typer.echo(screen.estimate_screen(one, width=columns()))
