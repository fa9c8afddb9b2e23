"""`fsdpplan export`: a checkpoint as a folder that transformers or PEFT loads."""

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
    peft: Annotated[
        Path | None,
        Flag(metavar="DIR", parse=path, help="Of a run with --lora: new folder for the adapters."),
    ] = None
    merged: Annotated[
        bool, Flag(help="Of a run with --lora: merge the adapters into --init-from.")
    ] = False
    as_trained: Annotated[
        bool, Flag(help="With --merged: into the 4-bit base that was trained, dequantised.")
    ] = False
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
    """Write a checkpoint for transformers, or adapters for PEFT.

    The newest whole checkpoint, whatever layout wrote it. It needs torch, no GPU, and room for one
    tensor at a time.
    """
    if options.checkpoint_dir is None:
        raise SpecError(
            "--checkpoint-dir is missing: fsdpplan export --checkpoint-dir ckpt --out model"
        )
    if options.out is None and (options.merged or options.peft is None):
        raise SpecError("--out is missing: fsdpplan export --checkpoint-dir ckpt --out model")
    if options.as_trained and not options.merged:
        raise SpecError("--as-trained is of --merged: add it, or leave this one out")
    said = export_checkpoint(
        options.checkpoint_dir,
        options.out,
        options.init_from,
        drop_expert_bias=options.drop_expert_bias,
        peft=options.peft,
        merged=options.merged,
        as_trained=options.as_trained,
    )
    if json:
        typer.echo(exported_json(options.out or options.peft, said))
    else:
        tell(said)


class ExportJson(TypedDict):
    """What `export --json` prints."""

    out: str
    """The folder of the model, or of its adapters alone."""
    said: str
    """What was written, in a sentence."""


def exported_json(out: Path | None, said: str) -> str:
    """What `export --json` prints."""
    document: ExportJson = {"out": str(out), "said": said}
    return json.dumps(document, indent=2)
