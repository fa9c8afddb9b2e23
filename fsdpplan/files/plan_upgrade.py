"""Plan upgrade: documents of earlier fsdpplans, read as the same plan with today's fields.

Those of the first one are told by a fitted number that no plan has had since; those before clusters
had a network, or a correction, by its absence. A field that has come since has its default, which
is what they meant without saying it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from math import log
from typing import Any

from fsdpplan.spec.cluster import Cluster, Device, DeviceFit, Level, StepError
from fsdpplan.spec.estimate import MemoryBreakdown, TimeBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

OLD_MARK = "attention_backward_fraction"
"""Since then a ratio to the forward pass."""

THEN: dict[type, str] = {
    Layout: "dp_replicate dp_shard cp tp pp ep sharding reshard_after_forward gradient_sync "
    "wrap_blocks ddp_bucket_bytes micro_batch num_microbatches schedule virtual_stages "
    "activation_checkpointing sequence_parallel loss_parallel async_tp offload compile",
    Model: "mlp norm positions max_positions tied_embeddings attention_bias "
    "attention_output_bias mlp_bias qk_norm rope_theta norm_epsilon",
    Training: "precision reduce_dtype optimizer tokens runtime headroom_fraction",
    DeviceFit: "matmul_fill_depth matmul_wave_fraction matmul_start_seconds sustained_fraction",
    Level: "base_seconds multicast_fraction",
}
"""Fields that had a default already then, and stood in every plan."""

_NORMAL_80 = 1.2816


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with today's fields; the same where it has them, or is no plan at all."""
    cluster = _table(document, "cluster")
    if cluster and not {"network", "weak"} & set(cluster):
        device = _filled(Device, cluster.get("device"))
        document = {**document, "cluster": {**_filled(Cluster, cluster), "device": device}}
    elif cluster and "correction" not in cluster:
        document = {**document, "cluster": {**cluster, "correction": None}}
    device = _table(_table(document, "cluster"), "device")
    fit = _table(device, "fit")
    if not isinstance(fit.get(OLD_MARK), int | float):
        return document
    new_device = {**device, "fit": _fit(fit), "error": _error(fit)}
    levels = _table(document, "cluster").get("levels")
    cluster = {**document["cluster"], "device": new_device}
    if isinstance(levels, list):
        cluster["levels"] = [_filled(Level, level) for level in levels]
    lines = document.get("alternatives")
    return {
        **_planned(document),
        "model": _filled(Model, document.get("model")),
        "cluster": cluster,
        "training": _filled(Training, document.get("training")),
        "alternatives": [_planned(line) for line in lines] if isinstance(lines, list) else lines,
    }


def _planned(holder: Any) -> Any:
    """What holds a layout and its estimate, both with today's fields."""
    if not isinstance(holder, dict):
        return holder
    estimate = holder.get("estimate")
    if isinstance(estimate, dict):
        estimate = {
            **estimate,
            "time": _filled(TimeBreakdown, estimate.get("time")),
            "memory": _filled(MemoryBreakdown, estimate.get("memory")),
        }
    return {**holder, "layout": _filled(Layout, holder.get("layout")), "estimate": estimate}


def _fit(fit: dict[str, Any]) -> Any:
    """Today's fitted numbers: the backward rate as a ratio; the band is no part of them."""
    forward, backward = fit.get("attention_forward_fraction"), fit[OLD_MARK]
    gone = (OLD_MARK, "step_time_lower_fraction", "step_time_upper_fraction")
    kept = {name: value for name, value in fit.items() if name not in gone}
    if isinstance(forward, int | float) and forward > 0:
        kept["attention_backward_ratio"] = min(1.0, backward / forward)
    return _filled(DeviceFit, kept)


def _error(fit: dict[str, Any]) -> dict[str, float]:
    """The old band of every step, with no error of the parts."""
    upper = fit.get("step_time_upper_fraction")
    known = isinstance(upper, int | float) and upper >= 1
    zeros = dict.fromkeys((field.name for field in fields(StepError)), 0.0)
    return {**zeros, "base_fraction": log(float(upper)) / _NORMAL_80 if known else 0.0}  # type: ignore[arg-type]


def _filled(kind: type, table: Any) -> Any:
    """`table` with the defaults of `kind` for what it does not say."""
    if not isinstance(table, dict):
        return table
    return {**table, **{k: v for k, v in _defaults(kind) if k not in table}}


def _defaults(kind: type) -> Iterator[tuple[str, Any]]:
    for field in fields(kind):
        if field.default is not MISSING and field.name not in THEN.get(kind, "").split():
            is_list = isinstance(field.default, tuple)
            yield field.name, list(field.default) if is_list else field.default


def _table(holder: Any, key: str) -> dict[str, Any]:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}
