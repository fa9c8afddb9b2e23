"""Layouts of models of one's own, and of Hugging Face, by one loop for every plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.trainer import jobs
from tests.trainer.user_layouts import DDP, FULL, HSDP, OP, SHARD4, TP2, TWICE

PP = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 4,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
MANY = PP | {"virtual_stages": 2}
SHARD2, TWO = {"dp_shard": 2}, {"dp_replicate": 2}
PIECES = {"loss_chunks": 3}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled pieces": ("scaled", SHARD4 | PIECES),
    "own pieces, ddp": ("own", DDP | PIECES | TWICE),
    "own pieces, hsdp, full": ("own", HSDP | PIECES | FULL),
    "own tp2": ("own", TP2 | SHARD2),
    "own tp2, pieces, twice": ("own", TP2 | SHARD2 | PIECES | TWICE),
    "own tp2, op, logits gathered": ("own", TP2 | OP | SHARD2 | {"loss_parallel": False}),
    "own tp4 alone, pieces, twice": (
        "own",
        TP2 | PIECES | TWICE | {"tp": 4, "sharding": "ddp", "gradient_sync": "last"},
    ),
    "tied pp2 tp2 alone": ("tied", PP | TP2 | {"sharding": "ddp"}),
    "llama pp2 tp2 alone": ("llama", PP | TP2 | {"sharding": "ddp"}),
    "flat tp2": ("flat", TP2 | TWO),
    "flat tp2 pp2": ("flat", TP2 | PP),
    "tied tp2, pieces": ("tied", TP2 | SHARD2 | PIECES),
    "own pp2": ("own", PP | SHARD2),
    "scaled pp2 gpipe": ("scaled", PP | SHARD2 | {"schedule": "gpipe"}),
    "own pp2 hsdp, pieces, full": ("own", PP | TWO | PIECES | FULL),
    "own pp2 ddp": ("own", PP | TWO | {"sharding": "ddp"}),
    "own pp2 tp2, pieces": ("own", PP | TP2 | PIECES),
    "own pp4": ("own", PP | {"pp": 4}),
    "own pp2, a stage with the head alone": ("own", PP | SHARD2 | {"stage_blocks": [4, 0]}),
    "own pp2, a stage with the table alone": ("own", PP | SHARD2 | {"stage_blocks": [0, 4]}),
    "tied tp2 zbv, both ends alone": (
        "tied",
        MANY | TP2 | {"schedule": "zbv", "stage_blocks": [0, 2, 2, 0]},
    ),
    "llama pp2, a stage with the table alone": ("llama", PP | TP2 | {"stage_blocks": [0, 3]}),
    "own interleaved": ("own", MANY | SHARD2 | {"schedule": "interleaved_1f1b"}),
    "own looped, an empty stage": (
        "own",
        MANY | SHARD2 | {"schedule": "looped_bfs", "stage_blocks": [2, 0, 1, 1]},
    ),
    "own zero bubble": ("own", MANY | SHARD2 | {"schedule": "interleaved_zero_bubble"}),
    "scaled zbv": ("scaled", MANY | SHARD2 | {"schedule": "zbv"}),
    "own dualpipev, ddp": ("own", MANY | TWO | {"schedule": "dualpipev", "sharding": "ddp"}),
    "tied pp2": ("tied", PP | SHARD2),
    "tied pp2 tp2, pieces": ("tied", PP | TP2 | PIECES),
    "tied pp2 ddp": ("tied", PP | TWO | {"sharding": "ddp"}),
    "tied zbv": ("tied", MANY | SHARD2 | {"schedule": "zbv"}),
    "llama pieces": ("llama", SHARD4 | PIECES),
    "llama pieces, tp2": ("llama", TP2 | SHARD2 | PIECES),
    "llama pieces, cp2": ("llama", {"cp": 2} | SHARD2 | PIECES),
    "llama pp2": ("llama", PP | SHARD2),
    "llama pp2 tp2, pieces": ("llama", PP | TP2 | PIECES),
    "llama pp2 cp2": ("llama", PP | {"cp": 2}),
    "qwen2 pp2 tp2, pieces": ("qwen2", PP | TP2 | PIECES),
    "qwen2 pp2": ("qwen2", PP | SHARD2),
    "qwen3 zero bubble": (
        "qwen3",
        MANY | SHARD2 | {"schedule": "zbv", "stage_blocks": [1, 1, 1, 0]},
    ),
    "gemma3 pp2": ("gemma3", PP | SHARD2),
    "mixtral pp2": ("mixtral", PP | SHARD2),
}
"""Layouts of four ranks that must lose like one process."""

BF16: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16 own pp2": ("own", PP | SHARD2),
    "bf16 tied pp2 ddp": ("tied", PP | TWO | {"sharding": "ddp"}),
    "bf16 own tp4 alone": ("own", TP2 | {"tp": 4, "sharding": "ddp", "gradient_sync": "last"}),
    "bf16 own tp2 pp2 alone": ("own", PP | TP2 | PIECES | {"sharding": "ddp"}),
    "bf16 llama pp2 tp2, pieces": ("llama", PP | TP2 | PIECES),
}
"""Layouts of four ranks in bf16."""

MOVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "own: fsdp to pp2": ("own", SHARD4, PP | SHARD2),
    "own: pp2 to zbv": ("own", PP | SHARD2, MANY | SHARD2 | {"schedule": "zbv"}),
    "tied: pp2 to tp2": ("tied", PP | SHARD2, TP2 | SHARD2),
    "tied: zbv to pp2": ("tied", MANY | SHARD2 | {"schedule": "zbv"}, PP | SHARD2),
    "tied: ddp to zbv": ("tied", DDP, MANY | SHARD2 | {"schedule": "zbv"}),
    "tied: fsdp to pp2 tp2": ("tied", SHARD4, PP | TP2),
    "llama: pp2 tp2 to fsdp": ("llama", PP | TP2, SHARD4),
}
"""A layout that saves after a step, and another that goes on."""

LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama pp2": ("llama", PP | SHARD2),
    "qwen2 pp2 tp2": ("qwen2", PP | TP2),
}
"""Pipelines of models that are built on the meta device and loaded from files."""


def measured_of(names: Iterable[str]) -> dict[str, Any]:
    """What four ranks measure of these cases."""
    with TemporaryDirectory() as folder:
        function = "tests.trainer.own_ranks:measure_all"
        out = Path(folder) / "own.json"
        return jobs.measured(4, function, out, asked=names, HF_HUB_OFFLINE="1")
