"""Export: a checkpoint as a folder that transformers loads, by the trainer's own program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.topology.probe import require_torch


def export_checkpoint(
    checkpoints: Path,
    out: Path | None,
    like: Path | None,
    *,
    drop_expert_bias: bool = False,
    peft: Path | None = None,
    merged: bool = False,
    as_trained: bool = False,
) -> str:
    """Write the newest whole checkpoint of `checkpoints` into the new folder `out`, with config and
    tokenizer of `like`; or its adapters into `peft`, and `like` with them `merged` in it into
    `out`. Returns what the program says of it.

    Raises SpecError where there is none, no published architecture is its model, or it has biases
    that balance experts, for which that has no place, unless they may be dropped.
    """
    require_torch("the export")
    words = [sys.executable, "-m", "fsdpplan.trainer.export"]
    words += [f"--checkpoint-dir={checkpoints}"]
    words += [f"--out={out}"] if out is not None else []
    words += [f"--peft={peft}"] if peft is not None else []
    words += [*(["--merged"] if merged else []), *(["--as-trained"] if as_trained else [])]
    words += [f"--init-from={like}"] if like is not None else []
    words += ["--drop-expert-bias"] if drop_expert_bias else []
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = ended.stderr.strip().splitlines()
    said = lines[-1] if lines else ""
    if ended.returncode == 2:
        raise SpecError(said.removeprefix("error: "))
    if ended.returncode:
        raise LaunchError(f"the export ended with code {ended.returncode}: {said or 'no word'}")
    return said
