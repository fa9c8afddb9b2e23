"""A checkpoint as a folder that transformers loads:
`python -m fsdpplan.trainer.export --checkpoint-dir DIR --out DIR`.

One process, without a GPU: it reads a tensor at a time, whatever layout wrote them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .checkpoint.files import damage, resumable
from .checkpoint.progress import read_progress
from .checkpoint.runs import require_manifest
from .config import parse_model
from .errors import TrainerError
from .huggingface.export import export_checkpoint, exported, require_new


def export_newest(
    checkpoints: Path, out: Path, like: Path | None, *, drops_biases: bool = False
) -> str:
    """Write the best checkpoint of a folder into `out`; returns what is to be said. Raises
    TrainerError where there is none, it is damaged, no published model is like it, or biases of its
    experts would be dropped and nobody said so."""
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
    model = parse_model(progress.model)
    require_new(out)
    what = exported(model, progress.precision, like, seq_len=progress.seq_len)
    export_checkpoint(path, model, out, what, drops_biases=drops_biases)
    return f"{out}: a {what.family} after step {progress.step}, from {path.name}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdpplan.trainer.export",
        description="Write a checkpoint for transformers' from_pretrained.",
    )
    add = parser.add_argument
    add("--checkpoint-dir", required=True, type=Path, metavar="DIR", help="of the run")
    add("--out", required=True, type=Path, metavar="DIR", help="new folder to write")
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
    try:
        said = export_newest(
            options.checkpoint_dir,
            options.out,
            options.init_from,
            drops_biases=options.drop_expert_bias,
        )
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {options.out}: {error}; choose another --out", file=sys.stderr)
        return 2
    print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
