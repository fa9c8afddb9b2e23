"""Measured steps of `single_gpu.py` as a table of runs, which `learn` and `make fit` take."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.files.runs.columns import COLUMNS
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.measure.ranks import cpu_name

SOURCE = "own"
"""Begins the name of the source."""


Row = Mapping[str, Any]


def run_row(plan: Plan, *, name: str, seconds: float, peak_bytes: float | None, torch: str) -> Row:
    """One row: the shape, the layout and what was measured; the peak is what was allocated."""
    model, layout, training = plan.model, plan.layout, plan.training
    device = plan.cluster.device
    try:
        gpu = load_device(device.name).table_name or device.name
    except Exception:  # a profile of one's own
        gpu = device.name
    experts, is_fsdp = model.experts, layout.sharding == "fsdp"
    release = ".".join(torch.split(".")[:2])
    return {
        "source_id": f"{SOURCE}_{gpu}",
        "source_location": name,
        "date": datetime.now(UTC).date().isoformat(),
        "framework": f"fsdpplan{' (FSDP2)' if is_fsdp else ''}, torch {release}",
        "model_name": model.name,
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn_hidden": experts.hidden if experts else model.ffn_hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "tied": "y" if model.tied_embeddings else "n",
        "seq_len": training.seq_len,
        "moe": f"{experts.experts}/{experts.active}" if experts else "",
        "gpu": gpu,
        "gpus": 1,
        "gpus_per_node": 1,
        "cpu": cpu_name(),
        "torch": release,
        "allocator": "growing",
        "dtype": training.precision,
        "zero_stage": "3" if is_fsdp else "",  # 0 would be DDP's wrapper around one replica
        "micro_batch": layout.micro_batch,
        "global_batch": training.global_batch,
        "grad_accum": layout.num_microbatches,
        "act_ckpt": layout.activation_checkpointing,
        "compile": "y" if layout.compile else "n",
        "step_time_s": f"{seconds:.5f}",
        "peak_mem_gib": "" if not peak_bytes else f"{peak_bytes / 2**30:.3f}",
        "oom": "n",
        "notes": "mem_kind=alloc; the program's own trainer, catalogue shape",
    }


def table(rows: Sequence[Row]) -> str:
    """CSV with the columns that any row has."""
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def joined(path: Path, more: Path) -> str:
    """The table at `path` with the rows of `more` that it does not have."""
    both = []
    for place in (path, more):
        with place.open(encoding="utf-8", newline="") as file:
            both.append(list(csv.DictReader(file)))
    there, new = both
    known = [{name: text for name, text in row.items() if text} for row in there]
    fresh = [row for row in new if {n: t for n, t in row.items() if t} not in known]
    return table([*there, *fresh])


if __name__ == "__main__":
    import sys

    OWN = Path(__file__).resolve().parents[1] / "golden" / "bench" / "train_runs_own.csv"
    OWN.write_text(joined(OWN, Path(sys.argv[1]) / "steps.csv"), encoding="utf-8")
