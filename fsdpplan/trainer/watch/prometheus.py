"""Metrics as a text file for Prometheus, which node_exporter's textfile collector reads.

Source of the format: prometheus.io, "Exposition formats", text-based format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.whole_file import write_whole

HELP = {
    "training_running": "1 while the run goes on, 0 after it has ended.",
    "training_step": "Optimizer steps done.",
    "training_last_step_timestamp_seconds": "When the newest step ended, in Unix time.",
    "training_mfu": "Useful FLOPs of the newest step over the dense peak, from 0 to 1.",
    "training_tokens_per_second": "Tokens of all ranks a second, in the newest step.",
    "training_step_seconds": "Duration of the newest step.",
    "training_data_seconds": "Part of it that this rank waited for its data.",
    "training_loss": "Mean loss of the newest step over all ranks.",
    "training_eval_loss": "Mean loss on held-out data, when it was last taken.",
    "training_eval_step": "Optimizer steps done then.",
    "training_grad_norm": "Norm of all gradients before clipping.",
    "training_memory_allocated_bytes": "Most memory that tensors took on this rank.",
    "training_memory_reserved_bytes": "Most memory that the allocator held on this rank.",
    "training_communication_seconds": "A collective on a mesh axis in a step, by the profiler.",
    "training_exposed_communication_seconds": "Part of it in which no other kernel ran.",
    "training_idle_seconds": "Part of a step in which no kernel ran at all, by the profiler.",
}
"""Metric -> what it says. All are gauges: a run may begin again."""


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


def exposition(samples: Iterable[Sample], common: Mapping[str, str]) -> str:
    """The text of `samples`, each with the `common` labels; samples of a metric stand together."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, its in by_name.items():
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        lines += [
            f"{name}{_labels({**common, **each.labels})} {_number(each.value)}" for each in its
        ]
    return "\n".join(lines) + "\n"


def write_exposition(path: Path, text: str) -> None:
    """Replace the file at once: its reader may come at any moment."""
    write_whole(path, text, durably=False)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
