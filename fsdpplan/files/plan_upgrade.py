"""Plan upgrade: documents of earlier fsdpplans, read as the same plan with today's fields.

A field that has come since has its default, which is what plans before it meant without saying it,
or what `MEANT` says that they did. Those of the first fsdpplan, which had fitted numbers of another
meaning, are told by one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from math import log
from typing import Any, get_args, get_origin, get_type_hints

from fsdpplan.spec.cluster import DeviceFit, Level, StepError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan
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

MEANT: dict[type, dict[str, Any]] = {Training: {"fits_fraction": 0.0}}
"""What plans without a field meant where that is not its default: nothing was asked of a chance."""

GONE = ("correction",)
"""Fields that plans of 0.1.0 have and today's have not."""

_NORMAL_80 = 1.2816


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with today's fields; the same where it has them, or is no plan at all."""
    cluster = _table(document, "cluster")
    device = _table(cluster, "device")
    fit = _table(device, "fit")
    if isinstance(fit.get(OLD_MARK), int | float):
        device = {**device, "fit": _fit(fit), "error": _error(fit)}
        document = {**document, "cluster": {**cluster, "device": device}}
    if any(name in cluster for name in GONE):
        document = {**document, "cluster": _without_correction(document["cluster"])}
    kinds = get_type_hints(Plan)
    return {key: _filled(kinds.get(key), value) for key, value in document.items()}


def _without_correction(cluster: dict[str, Any]) -> dict[str, Any]:
    """Plans of 0.1.0 said there what past runs had changed in the cluster's numbers, which stand
    beside it; today runs change the estimate."""
    return {name: value for name, value in cluster.items() if name not in GONE}


def _fit(fit: dict[str, Any]) -> dict[str, Any]:
    """Today's fitted numbers: the backward rate as a ratio; the band is no part of them."""
    forward, backward = fit.get("attention_forward_fraction"), fit[OLD_MARK]
    gone = (OLD_MARK, "step_time_lower_fraction", "step_time_upper_fraction")
    kept = {name: value for name, value in fit.items() if name not in gone}
    if isinstance(forward, int | float) and forward > 0:
        kept["attention_backward_ratio"] = min(1.0, backward / forward)
    return kept


def _error(fit: dict[str, Any]) -> dict[str, float]:
    """The old band of every step, with no error of the parts."""
    upper = fit.get("step_time_upper_fraction")
    known = isinstance(upper, int | float) and upper >= 1
    zeros = dict.fromkeys((field.name for field in fields(StepError)), 0.0)
    return {**zeros, "base_fraction": log(float(upper)) / _NORMAL_80 if known else 0.0}  # type: ignore[arg-type]


def _filled(kind: Any, value: Any) -> Any:
    """`value`, which is of the type `kind`, with today's fields at all depths."""
    if isinstance(value, list) and get_origin(kind) is tuple:
        return [_filled(get_args(kind)[0], item) for item in value]
    table = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
    if table is None or not isinstance(value, dict):
        return value
    kinds = get_type_hints(table)
    return {
        **{name: default for name, default in _defaults(table) if name not in value},
        **{name: _filled(kinds.get(name), item) for name, item in value.items()},
    }


def _defaults(kind: Any) -> Iterator[tuple[str, Any]]:
    """What a field means where it is not said, of those that were not in every plan."""
    for field in fields(kind):
        if field.name in THEN.get(kind, "").split():
            continue
        default = MEANT.get(kind, {}).get(field.name, field.default)
        if field.default_factory is not MISSING:
            default = asdict(field.default_factory())
        if default is not MISSING:
            yield field.name, list(default) if isinstance(default, tuple) else default


def _table(holder: Any, key: str) -> dict[str, Any]:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}
