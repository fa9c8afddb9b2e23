"""Weights of published models, loaded into layouts on forked ranks, and written again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdpplan.files.huggingface.config import read_hf_config
from tests.trainer import jobs, plans

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp 2, tp 2": {"dp_shard": 2, "tp": 2, "loss_parallel": True, "sequence_parallel": True},
    "pp 2, fsdp 2": {
        "pp": 2,
        "dp_shard": 2,
        "num_microbatches": 2,
        "schedule": "1f1b",
        "gradient_sync": "last",
        "reshard_after_forward": "never",
    },
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "cp 2, fsdp 2": {"cp": 2, "dp_shard": 2},
    "ddp": {"dp_replicate": 4, "sharding": "ddp"},
    "ep 2": {"dp_shard": 4, "ep": 2},
}


def train(
    folder: Path,
    model: dict[str, Any],
    source: Path,
    layout: dict[str, Any],
    *,
    steps: int = 1,
    options: Sequence[str] = (),
) -> dict[int, float]:
    """Losses of a run that begins with the weights of `source`; `folder/out` gets its last ones."""
    world = plans.plan_document(**layout)["cluster"]["gpus"]
    words = ["--init-from", str(source), "--export-hf", str(folder / "out"), *options]
    jobs.train(folder, world, *words, "--steps", str(steps), model=model, **layout)
    return jobs.losses(folder)


def model_of(config: Path) -> dict[str, Any]:
    """The plan's model of a `config.json`."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(read_hf_config(config).model)))
    return document
