"""Labels of -100 of unequal number, under every kind of layout, by `forward_backward` and by a loop
of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdpplan.trainer.torch_versions import has_ring_attention
from tests.trainer import jobs
from tests.trainer.own_layouts import MANY, PIECES, PP, SHARD2, TWO
from tests.trainer.user_layouts import DDP, FULL, HSDP, SHARD4, TP2, TWICE

LAST = {"gradient_sync": "last"}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "own fsdp": ("own", SHARD4),
    "own fsdp, twice": ("own", SHARD4 | TWICE),
    "own fsdp, 4 times, last": ("own", SHARD2 | TWO | {"num_microbatches": 2} | LAST),
    "own ddp, twice": ("own", DDP | TWICE),
    "own ddp, twice, last": ("own", DDP | TWICE | LAST),
    "own hsdp, twice, all-reduce last": (
        "own",
        HSDP | TWICE | {"gradient_sync": "reduce_scatter_only"},
    ),
    "own hsdp, pieces, twice": ("own", HSDP | PIECES | TWICE),
    "own ddp, pieces": ("own", DDP | PIECES),
    "own tp2, twice": ("own", TP2 | SHARD2 | TWICE),
    "own tp2, pieces, full": ("own", TP2 | TWO | PIECES | FULL),
    "own tp2, logits gathered": ("own", TP2 | SHARD2 | {"loss_parallel": False}),
    "own tp4 alone, twice": ("own", TP2 | TWICE | LAST | {"tp": 4, "sharding": "ddp"}),
    "own pp2": ("own", PP | SHARD2),
    "own pp2 hsdp, pieces": ("own", PP | TWO | PIECES),
    "own pp2 ddp": ("own", PP | TWO | {"sharding": "ddp"}),
    "own pp2 tp2": ("own", PP | TP2),
    "own zbv": ("own", MANY | SHARD2 | {"schedule": "zbv"}),
    "tied dualpipev, ddp": ("tied", MANY | TWO | {"schedule": "dualpipev", "sharding": "ddp"}),
    "llama fsdp, twice": ("llama", SHARD4 | TWICE),
    "llama ddp, twice, last": ("llama", DDP | TWICE | LAST),
    "llama hsdp, pieces": ("llama", HSDP | PIECES),
    "llama tp2, twice": ("llama", TP2 | SHARD2 | TWICE),
    "llama tp2, pieces": ("llama", TP2 | TWO | PIECES),
    "llama cp2, twice": ("llama", {"cp": 2} | SHARD2 | TWICE),
    "llama cp4": ("llama", {"cp": 4} | TWICE),
    "llama cp2, pieces": ("llama", {"cp": 2} | TWO | PIECES),
    "llama cp2 tp2": ("llama", TP2 | {"cp": 2} | TWICE),
    "llama pp2": ("llama", PP | SHARD2),
    "llama pp2 tp2, pieces": ("llama", PP | TP2 | PIECES),
    "llama pp2 cp2": ("llama", PP | {"cp": 2}),
    "qwen3 zbv": ("qwen3", MANY | SHARD2 | {"schedule": "zbv", "stage_blocks": [1, 1, 1, 0]}),
    "mixtral hsdp, twice": ("mixtral", HSDP | TWICE),
}
"""Layouts of four ranks whose gradients must be those of one process."""
if not has_ring_attention():
    LAYOUTS = {name: case for name, case in LAYOUTS.items() if "cp" not in case[1]}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "own ddp": ("own", DDP),
    "own fsdp, pieces": ("own", SHARD4 | PIECES),
    "own tp4 alone, twice": ("own", TP2 | TWICE | LAST | {"tp": 4, "sharding": "ddp"}),
    "llama fsdp": ("llama", SHARD4),
    "llama hsdp, pieces": ("llama", HSDP | PIECES),
    "llama tp2": ("llama", TP2 | SHARD2),
    "llama cp2": ("llama", {"cp": 2, "dp_shard": 2}),
}
"""Layouts in which a loop of one's own counts nothing."""
if not has_ring_attention():
    REFUSED = {name: case for name, case in REFUSED.items() if "cp" not in case[1]}


def is_data_parallel(layout: dict[str, Any]) -> bool:
    """Whether a layout splits nothing but rows, so that even sums are those of one process but for
    their order."""
    return all(layout.get(axis, 1) == 1 for axis in ("cp", "tp", "pp"))


def measured_of(names: Iterable[str]) -> dict[str, Any]:
    """What four ranks measure of these cases."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "masked.json"
        function = "tests.trainer.masked_ranks:measure_all"
        return jobs.measured(4, function, out, asked=names, HF_HUB_OFFLINE="1")
