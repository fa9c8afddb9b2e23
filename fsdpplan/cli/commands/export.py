"""`fsdpplan export`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.views.render import tell
from fsdpplan.errors import SpecError
from fsdpplan.run.export import export_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """From where to where."""

    HEADING: ClassVar[str] = "Export"

    checkpoint_dir: Annotated[
        Path | None, Flag(metavar="DIR", parse=path, help="The run's checkpoints.")
    ] = None
    out: Annotated[
        Path | None, Flag(metavar="DIR", parse=path, help="New folder for the model.")
    ] = None
    init_from: Annotated[
        Path | None,
        Flag(
            metavar="DIR",
            parse=path,
            help="What the run began with: its config and tokenizer go along.",
        ),
    ] = None
    drop_expert_bias: Annotated[
        bool,
        Flag(
            help="Leave out biases that balance experts, for which the published architecture has "
            "no place.",
        ),
    ] = False


def export(*, options: ExportOptions, json: Json = False) -> None:
    """Write a checkpoint as transformers loads it.

    The newest whole checkpoint, whatever layout wrote it. It needs torch, no GPU, and room for one
    tensor at a time.
    """
    for name in ("checkpoint_dir", "out"):
        if getattr(options, name) is None:
            raise SpecError(
                f"--{name.replace('_', '-')} is missing: fsdpplan export --checkpoint-dir ckpt "
                "--out model"
            )
    assert options.checkpoint_dir is not None
    assert options.out is not None
    said = export_checkpoint(
        options.checkpoint_dir,
        options.out,
        options.init_from,
        drop_expert_bias=options.drop_expert_bias,
    )
    if json:
        typer.echo(exported_json(options.out, said))
    else:
        tell(said)


class ExportJson(TypedDict):
    """What `export --json` prints."""

    out: str
    """The folder of the model."""
    said: str
    """What was written, in a sentence."""


def exported_json(out: Path, said: str) -> str:
    """What `export --json` prints."""
    document: ExportJson = {"out": str(out), "said": said}
    return json.dumps(document, indent=2)
