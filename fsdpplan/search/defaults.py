"""Defaults: the layout that pins name, and a global batch with which some layout can be trained,
for what a user leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

from fsdpplan.errors import SpecError
from fsdpplan.search.enumerate import LOOPED_SCHEDULES, divisors
from fsdpplan.search.pins import Pins, attention_over_cp, default_global_batch
from fsdpplan.search.pins import pin_flag as flag
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.search.rules.program import program_pins, vocabulary_of
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import MESH_AXES, SPLIT_BACKWARD_SCHEDULES, GradientSync, Layout, Sharding
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
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


def named_layout(
    pins: Pins, *, cluster: Cluster, training: Training, model: Model | None = None
) -> NamedLayout:
    """The one layout that the pins name; what is missing is derived, or the default, and said."""
    degrees, derived = _degrees(pins, cluster.gpus)
    pins = program_pins(pins, training.program)
    defaults = _default_policies(pins, degrees, cluster, training)
    if model is not None:
        defaults["cp_attention"] = attention_over_cp(
            model=model, training=training, tp=degrees["tp"], cp=degrees["cp"], pins=pins
        )
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
    if len(missing) == 2:
        said = f"dp_shard {left}: all GPUs that no degree splits hold a shard (--dp-replicate)"
        return {**degrees, "dp_shard": left}, (said,)
    words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    if not missing:
        raise SpecError(
            f"{words or 'no degree'} leaves {left} of {gpus} GPUs to split: give more of a degree, "
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
        degrees["dp_shard"] * degrees["cp"] > 1 or pins.offload == "cpu"
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


LEAST_LOCAL_TOKENS = 1024
"""Of a sequence on a context-parallel rank, for a batch to count on it: with fewer, collectives
take longer than what they bring together."""


def legal_global_batch(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins, usual: int | None = None
) -> int:
    """The usual batch, where a layout that the pins allow can train it; else the nearest to it that
    one can, and the usual one again where none can train any.

    On more GPUs than there are sequences, several GPUs must work on each: as many as tensor
    parallelism, context parallelism and pipelines that are full allow.
    """
    if usual is None:
        usual = default_global_batch(seq_len=training.seq_len, gpus=cluster.gpus)
    shapes = [
        replace(
            shape,
            cp_attention=attention_over_cp(
                model=model, training=training, tp=shape.tp, cp=shape.cp, pins=pins
            ),
        )
        for shape in _shapes(cluster, training, pins)
    ]
    batches = {_nearest(usual, layout): layout for layout in reversed(shapes)}
    for batch in sorted(batches, key=lambda batch: (abs(batch - usual), batch)):
        layout = batches[batch]
        number = batch // layout.data_parallel
        asked = replace(training, global_batch=batch)
        for plain in _policies(replace(layout, num_microbatches=number), training):
            case = Case(model=model, cluster=cluster, training=asked, layout=plain)
            if first_problem(case) is None:
                return batch
    return usual


def _policies(layout: Layout, training: Training) -> Iterator[Layout]:
    """`layout`, and for a program of others the same as it shards and reduces."""
    yield layout
    if vocabulary_of(training.program) is None:
        return
    shardings: tuple[Sharding, ...] = ("fsdp", "zero1", "ddp")
    for sharding in shardings:
        for sync in get_args(GradientSync):
            if sharding != "ddp" or layout.shard_ranks == 1:
                keeps = sharding == "fsdp" and layout.pp > 1
                yield replace(
                    layout,
                    sharding=sharding,
                    gradient_sync=sync,
                    reshard_after_forward="never" if keeps else "always",
                )


def _nearest(usual: int, layout: Layout) -> int:
    """The batch of `layout` that is nearest to the usual one: full pipelines, whole ranks."""
    ranks = layout.data_parallel * layout.micro_batch
    return ranks * max(layout.pp, round(usual / ranks))


def _shapes(cluster: Cluster, training: Training, pins: Pins) -> Iterator[Layout]:
    """The plainest layout of each spread of the ranks; those that leave sequences whole first."""
    gpus = cluster.gpus
    contexts = [cp for cp in divisors(gpus) if cp * LEAST_LOCAL_TOKENS <= training.seq_len]
    for cp in [pins.cp] if pins.cp else contexts or [1]:
        for tp in [pins.tp] if pins.tp else divisors(gpus):
            for pp in [pins.pp] if pins.pp else divisors(gpus):
                ranks, left = divmod(gpus, cp * tp * pp)
                if left or (tp > cluster.levels[0].domain_gpus and pins.tp is None):
                    continue
                if layout := _plainest(pp=pp, ranks=ranks, cp=cp, tp=tp, pins=pins):
                    yield layout


def _plainest(*, pp: int, ranks: int, cp: int, tp: int, pins: Pins) -> Layout | None:
    shard = pins.dp_shard or (ranks // pins.dp_replicate if pins.dp_replicate else ranks)
    if not shard or ranks % shard or (pins.dp_replicate or ranks // shard) != ranks // shard:
        return None
    is_ddp = shard * cp == 1
    return Layout(
        pp=pp,
        dp_replicate=ranks // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        sharding="ddp" if is_ddp else "fsdp",
        reshard_after_forward="never" if pp > 1 and not is_ddp else "always",
        gradient_sync="last" if pp > 1 else "every",
        micro_batch=pins.micro_batch or 1,
        schedule="1f1b" if pp > 1 else "none",
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        compile=False,
    )
