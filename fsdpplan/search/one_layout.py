"""One layout: the one that pins name, with a default for what they leave open."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.search.enumerate import LOOPED_SCHEDULES, V_SCHEDULES
from fsdpplan.search.pins import Pins
from fsdpplan.search.pins import pin_flag as flag
from fsdpplan.search.rules.program import program_pins
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import MESH_AXES, SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.training import Training

SAID = (
    "micro_batch",
    "sharding",
    "reshard_after_forward",
    "gradient_sync",
    "activation_checkpointing",
    "schedule",
)
"""Defaults of a layout that are worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayout:
    """The one layout that pins name."""

    layout: Layout
    assumptions: tuple[str, ...]
    """What was not named: derived, or a default."""


def named_layout(pins: Pins, *, cluster: Cluster, training: Training) -> NamedLayout:
    """The one layout that the pins name; what is missing is derived, or the default, and said."""
    degrees, derived = _degrees(pins, cluster.gpus)
    pins = program_pins(pins, training.program)
    defaults = _default_policies(pins, degrees, cluster, training)
    chosen = {**defaults, **pins.given(), **degrees}
    micro_batch = chosen["micro_batch"]
    ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    chosen["num_microbatches"] = _microbatches(training, ranks=ranks, micro_batch=micro_batch)
    taken = [name for name in defaults if name in SAID and name not in pins.given()]
    words = ", ".join(f"{flag(name)} {chosen[name]}" for name in taken)
    return NamedLayout(
        layout=Layout(**chosen),
        assumptions=(*derived, *([f"of the layout, not given: {words}"] if words else [])),
    )


def _degrees(pins: Pins, gpus: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """All degrees, and what to say about the data-parallel one that was derived."""
    degrees = {axis: getattr(pins, axis) or 1 for axis in MESH_AXES}
    missing = [axis for axis in ("dp_replicate", "dp_shard") if getattr(pins, axis) is None]
    left = gpus // prod(degrees.values())
    if pins.sharding == "ddp" and "dp_shard" in missing:
        missing.remove("dp_shard")
    if left == 1:
        return degrees, ()
    words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    if len(missing) != 1:
        ways = "--dp-shard or --dp-replicate, or both" if missing else "more of a degree"
        raise SpecError(
            f"{words or 'no degree'} leaves {left} of {gpus} GPUs to split: give {ways}, "
            f"such as --dp-shard {degrees['dp_shard'] * left}, or use --gpus {gpus // left}"
        )
    axis = missing[0]
    return {**degrees, axis: left}, (f"{axis} {left}, the GPUs left by the other degrees",)


def _default_policies(
    pins: Pins, degrees: dict[str, int], cluster: Cluster, training: Training
) -> dict[str, Any]:
    """What a layout has where it was not said. Megatron-LM shards the optimizer alone."""
    split, pipelined = degrees["tp"] > 1, degrees["pp"] > 1
    sharded = (
        degrees["dp_shard"] * degrees["cp"] > 1
        if pins.sharding is None
        else (pins.sharding == "fsdp")
    )
    interleaved = (pins.virtual_stages or 1) > 1
    of_optimizer = pins.sharding is None and sharded and training.program == "megatron"
    sharded = sharded and not of_optimizer
    policies: dict[str, Any] = {
        "micro_batch": 1,
        "sharding": "zero1" if of_optimizer else "fsdp" if sharded else "ddp",
        "sequence_parallel": split,
        "loss_parallel": split,
        "compile": cluster.device.kind == "cuda" and pins.schedule not in SPLIT_BACKWARD_SCHEDULES,
    }
    if sharded:
        policies["reshard_after_forward"] = "never" if pipelined else "always"
    policies["gradient_sync"] = "every" if sharded and not pipelined else "last"
    if pipelined:
        several = (*LOOPED_SCHEDULES, *V_SCHEDULES)
        policies["schedule"] = "interleaved_1f1b" if interleaved else "1f1b"
        policies["virtual_stages"] = 2 if pins.schedule in several else 1
    is_some = pins.checkpoint_blocks not in (None, "all")
    return {**policies, "activation_checkpointing": "full" if is_some else "none"}


def _microbatches(training: Training, *, ranks: int, micro_batch: int) -> int:
    """Forward passes that a rank makes in a step."""
    if training.global_batch % (ranks * micro_batch):
        whole = ranks * micro_batch
        near = max(1, round(training.global_batch / whole)) * whole
        raise SpecError(
            f"a global batch of {training.global_batch} sequences does not split over {ranks} "
            f"data-parallel ranks x micro-batch {micro_batch}: use --global-batch {near}, "
            "or another --micro-batch"
        )
    return training.global_batch // (ranks * micro_batch)
