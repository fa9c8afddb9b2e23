"""A checkpoint as a folder that transformers loads:
`python -m fsdpplan.trainer.export --checkpoint-dir DIR --out DIR`; of adapters as one that PEFT
loads (`--peft DIR`), or merged into their base (`--merged`).

One process, without a GPU: it reads a tensor at a time, whatever layout wrote them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from .checkpoint.files import damage, resumable
from .checkpoint.progress import Progress, read_progress
from .checkpoint.runs import require_manifest
from .config import parse_adapters, parse_model
from .errors import TrainerError
from .huggingface.export import export_checkpoint, exported, require_new
from .huggingface.peft import Beside, export_merged, export_peft_of_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is written, and where."""

    out: Path | None = None
    """The model."""
    like: Path | None = None
    """What the run began with."""
    drops_biases: bool = False
    peft: Path | None = None
    """The adapters alone."""
    merges: bool = False
    """`out` gets the base with the adapters in it."""
    as_trained: bool = False
    """The 4-bit base, dequantised."""


def export_newest(checkpoints: Path, wanted: Wanted) -> str:
    """Write what is wanted of the best checkpoint of a folder; returns what is to be said. Raises
    TrainerError where there is none, it is damaged, no published model is like it, it holds
    something else, or biases of its experts would be dropped and nobody said so."""
    paths = resumable(checkpoints)
    if not paths:
        raise TrainerError(
            f"{checkpoints} has no checkpoint: name the folder that was --checkpoint-dir"
        )
    path = paths[0]
    problem = damage(require_manifest(path), path, rank=0, ranks=1)
    if problem:
        raise TrainerError(
            f"{path} is damaged: {problem}; write the name of an older one into "
            f"{checkpoints / 'latest'}"
        )
    progress = read_progress(path)
    require_new(wanted.out, "--out")
    require_new(wanted.peft, "--peft")
    if progress.adapters:
        return _export_adapters(path, progress, wanted)
    if wanted.peft is not None or wanted.merges:
        raise TrainerError(
            f"{path} holds the whole model, without adapters: leave --peft and --merged out, and "
            "give --out"
        )
    model, out = parse_model(progress.model), wanted.out
    assert out is not None
    what = exported(model, progress.precision, wanted.like, seq_len=progress.seq_len)
    export_checkpoint(path, model, out, what, drops_biases=wanted.drops_biases)
    return f"{out}: a {what.family} after step {progress.step}, from {path.name}"


def _export_adapters(path: Path, progress: Progress, wanted: Wanted) -> str:
    """Those of a checkpoint, alone or in their base."""
    if wanted.peft is None and not wanted.merges:
        raise TrainerError(
            f"{path} holds adapters alone: give --peft DIR for them, or --merged --out DIR "
            "--init-from BASE for the base with them in it"
        )
    if wanted.merges and wanted.like is None:
        raise TrainerError(
            "--merged needs the base that the run began with, which a checkpoint of adapters does "
            "not hold: add --init-from BASE"
        )
    model, adapters = parse_model(progress.model), parse_adapters(progress.adapters)
    what = exported(model, progress.precision, wanted.like, seq_len=progress.seq_len)
    beside = Beside(model=model, adapters=adapters, what=what, like=wanted.like)
    said = []
    if wanted.peft is not None:
        export_peft_of_checkpoint(path, wanted.peft, beside)
        said.append(f"{wanted.peft}: adapters of a {what.family}")
    if wanted.merges and wanted.out is not None:
        more = export_merged(
            path,
            wanted.out,
            beside,
            precision=progress.precision,
            fingerprint=progress.base,
            as_trained=wanted.as_trained,
        )
        said.append(f"{wanted.out}: a {what.family} with its adapters merged{more}")
    return f"{'; '.join(said)}; after step {progress.step}, from {path.name}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdpplan.trainer.export",
        description="Write a checkpoint for transformers' or PEFT's from_pretrained.",
    )
    add = parser.add_argument
    add("--checkpoint-dir", required=True, type=Path, metavar="DIR", help="of the run")
    add("--out", type=Path, metavar="DIR", help="new folder to write the model to")
    add("--peft", type=Path, metavar="DIR", help="new folder to write the adapters to")
    add("--merged", action="store_true", help="merge the adapters into --init-from")
    add(
        "--as-trained",
        action="store_true",
        help="merge into the 4-bit base, dequantised, not into the published one",
    )
    add(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="what the run began with: its config and tokenizer go along",
    )
    add(
        "--drop-expert-bias",
        action="store_true",
        help="leave out biases that balance experts, for which the published architecture has no "
        "place",
    )
    options = parser.parse_args(arguments)
    if options.out is None and (options.merged or options.peft is None):
        parser.error("--out is missing: the folder of the model")
    wanted = Wanted(
        out=options.out,
        like=options.init_from,
        drops_biases=options.drop_expert_bias,
        peft=options.peft,
        merges=options.merged,
        as_trained=options.as_trained,
    )
    try:
        said = export_newest(options.checkpoint_dir, wanted)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = options.out or options.peft
        print(f"error: cannot write {where}: {error}; choose another folder", file=sys.stderr)
        return 2
    print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
