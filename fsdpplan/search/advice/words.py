"""Words: a layout as a person would say it."""

from __future__ import annotations

from math import floor

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, MESH_AXES, CpAttention, Layout
from fsdpplan.units import format_gib

_WHOLE = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}
"""What keeps whole parameters."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "looped_bfs": "looped breadth-first",
    "interleaved_zero_bubble": "interleaved zero-bubble",
    "zbv": "ZBV zero-bubble",
    "dualpipev": "DualPipeV",
}
"""Pipeline schedules as people write them."""

ATTENTION_OVER_CP: dict[CpAttention, str] = {
    "ulysses": "Ulysses attention",
    "ring": "ring attention",
}
"""How attention goes over the parts of a sequence."""

POLICIES = {
    "sharding": "sharding",
    "reshard_after_forward": "reshard",
    "gradient_sync": "gradient sync",
    "wrap_blocks": "blocks a unit",
    "ddp_bucket_bytes": "bucket",
    "schedule": "schedule",
    "virtual_stages": "stages a rank",
    "micro_batch": "micro-batch",
    "stage_blocks": "blocks of the stages",
    "activation_checkpointing": "checkpointing",
    "checkpoint_blocks": "recomputed blocks",
    "experts_over_tp": "experts over tp",
    "async_tp": "async TP",
    "offload": "offload",
    "compile": "compile",
    "loss_chunks": "pieces of the loss",
}
"""Policies of a layout and what to call them."""

EVIDENCE = {
    "measured": "measured here",
    "fitted": "fitted from published runs",
    "datasheet": "datasheet only",
}
"""What stands behind the numbers of the hardware, in words."""


def schedule_words(schedule: str) -> str:
    """A pipeline schedule as people write it."""
    return SCHEDULES.get(schedule, schedule)


def degrees(layout: Layout) -> str:
    """`dp_replicate 16 x dp_shard 8`: the degrees that are not 1; ep adds no ranks, so apart."""
    parts = [f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1]
    words = " x ".join(parts) or "one rank"
    if layout.experts_over_tp:
        return f"{words}, ep {layout.ep} x tp {layout.tp}"
    return f"{words}, ep {layout.ep}" if layout.ep > 1 else words


def differences(layout: Layout, other: Layout) -> list[str]:
    """The policies in which `layout` differs from `other`."""
    return [
        f"{words} {_value(getattr(layout, name), name)}"
        for name, words in POLICIES.items()
        if getattr(layout, name) != getattr(other, name)
    ]


def _value(value: object, name: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "ddp_bucket_bytes" and isinstance(value, int):
        return format_gib(value) if value >= 2**30 else f"{value / 2**20:g} MiB"
    return str(value)


def describe(layout: Layout, cluster: Cluster) -> str:
    """One sentence, such as "HSDP: shard over the 8 GPUs of a node, replicate over 16 nodes"."""
    if layout.world == 1:
        return "one GPU: nothing to spread"
    parts = [_data_parallel(layout, cluster)] if layout.data_parallel * layout.cp > 1 else []
    if layout.tp > 1:
        how = "tensor parallel, overlapped," if layout.async_tp else "tensor parallel"
        parts.append(f"{how} over {_span(layout.tp, 1, cluster)}")
    if layout.cp > 1:
        parts.append(f"context parallel over {_span(layout.cp, layout.tp, cluster)}")
    if layout.expert_ranks > 1:
        stride = 1 if layout.experts_over_tp else layout.tp
        whole = "whole experts" if layout.experts_over_tp else "experts"
        parts.append(f"{whole} over {_span(layout.expert_ranks, stride, cluster)}")
    if layout.pp > 1:
        parts.append(f"pipeline of {layout.pp} stages ({schedule_words(layout.schedule)})")
    return ", ".join(parts)


def compact(layout: Layout) -> str:
    """A layout in a cell of a table: `HSDP 8 x 8, TP 4, EP 8, recompute op`."""
    parts = []
    if layout.data_parallel * layout.cp > 1:
        ranks = layout.dp_replicate if layout.sharding == "ddp" else layout.shard_ranks
        is_copied = layout.dp_replicate > 1 and layout.sharding != "ddp"
        copies = f"{layout.dp_replicate} x " if is_copied else ""
        parts.append(f"{_family(layout)} {copies}{ranks}")
    degrees = {"TP": layout.tp, "CP": layout.cp, "EP": layout.ep, "PP": layout.pp}
    parts += [f"{words} {degree}" for words, degree in degrees.items() if degree > 1]
    if layout.experts_over_tp:
        parts.append("experts over tp")
    if layout.activation_checkpointing != "none":
        parts.append(f"recompute {layout.activation_checkpointing}")
    if layout.offload != "none":
        parts.append("offload")
    return ", ".join(parts) or "one GPU"


def settings(layout: Layout) -> tuple[str, ...]:
    """The settings that a person would name beside the degrees."""
    is_none = layout.activation_checkpointing == "none"
    return (
        "no recomputation" if is_none else f"recompute {layout.recomputation}",
        micro_batches(layout),
        *(["state and optimizer on the host"] if layout.offload != "none" else []),
        *([f"loss in {layout.loss_chunks} pieces"] if layout.loss_chunks > 1 else []),
        *([] if layout.compile else ["eager"]),
    )


def batch_words(layout: Layout) -> str:
    """How the global batch is cut: micro-batches, and data-parallel ranks."""
    ranks = layout.data_parallel
    return f"{micro_batches(layout)}, {ranks} data-parallel rank{'s' if ranks > 1 else ''}"


def micro_batches(layout: Layout) -> str:
    """How many sequences a rank takes at once, and how often in a step."""
    number = layout.num_microbatches
    if layout.pp > 1:
        return f"micro-batch {layout.micro_batch}, {number} of them in the pipeline"
    if number == 1:
        return f"micro-batch {layout.micro_batch}"
    return f"micro-batch {layout.micro_batch}, {number} accumulation steps"


def name(layout: Layout) -> str:
    """The family in a word or two: "DDP", "FSDP", "HSDP", "TP + FSDP", ..."""
    families = []
    if layout.tp > 1:
        families.append("TP")
    if layout.cp > 1:
        families.append("CP")
    if layout.expert_ranks > 1:
        families.append("EP")
    if layout.pp > 1:
        families.append("PP")
    if layout.data_parallel * layout.cp > 1:
        families.append(_family(layout))
    return " + ".join(families) or "one GPU"


def _family(layout: Layout) -> str:
    if layout.sharding in _WHOLE:
        return _WHOLE[layout.sharding]
    return "HSDP" if layout.dp_replicate > 1 else "FSDP"


def _data_parallel(layout: Layout, cluster: Cluster) -> str:
    inside = layout.tp
    shard = _span(layout.shard_ranks, inside, cluster)
    replicate = _span(layout.dp_replicate, inside * layout.shard_ranks, cluster)
    match _family(layout):
        case "DDP":
            return f"DDP: a whole copy on each of {replicate.replace('all ', 'the ', 1)}"
        case "HSDP":
            return f"HSDP: shard over {shard}, replicate over {replicate}"
        case "ZeRO-1" | "ZeRO-2" as zero:
            what = "optimizer state" if zero == "ZeRO-1" else "gradients and optimizer state"
            copies = f", replicated over {replicate}" if layout.dp_replicate > 1 else ""
            return f"{zero}: {what} sharded over {shard}{copies}"
        case _:
            return f"FSDP: shard over {shard}"


def _span(ranks: int, stride: int, cluster: Cluster) -> str:
    """A group in words, by what it covers of nodes."""
    per_node = cluster.gpus_per_node
    unit = "processes" if cluster.device.kind == "cpu" else "GPUs"
    if stride >= per_node and stride % per_node == 0:
        every = "" if stride == per_node else f" groups of {stride // per_node}"
        return f"{ranks} nodes" if not every else f"{ranks}{every} nodes"
    covered = ranks * stride
    if covered == per_node and stride == 1:
        return f"the {ranks} {unit} of a node"
    if covered <= per_node:
        return f"{ranks} {unit} of a node"
    if stride > 1:
        return f"{ranks} {unit} across nodes"
    return f"all {ranks} {unit}" if covered == cluster.gpus else f"{ranks} {unit}"


def domain_words(cluster: Cluster, gpus: int) -> str:
    """A domain of `gpus` GPUs in words: `one node`, or `one domain of 512 GPUs`."""
    return "one node" if gpus == cluster.gpus_per_node else f"one domain of {gpus} GPUs"


def policy(layout: Layout) -> str:
    """The policies in words, those that do not apply left out."""
    is_bare = layout.sharding == "ddp" and layout.data_parallel == 1
    parts: list[str] = ["one whole copy" if is_bare else layout.sharding, *_data_policies(layout)]
    if layout.pp > 1:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"schedule {layout.schedule}{stages}")
    if layout.sequence_parallel:
        parts.append("sequence parallel" + (", async TP" if layout.async_tp else ""))
    if layout.cp > 1:
        parts.append(ATTENTION_OVER_CP[layout.cp_attention])
    parts.append(f"checkpointing {layout.recomputation}")
    if layout.offload != "none":
        parts.append("state and optimizer on the host")
    if layout.loss_chunks > 1:
        parts.append(f"loss in {layout.loss_chunks} pieces")
    parts.append("compiled" if layout.compile else "eager")
    return ", ".join(parts)


def _data_policies(layout: Layout) -> list[str]:
    """What is done with parameters and gradients, and in which pieces."""
    parts = []
    if layout.sharding == "fsdp":
        parts.append(f"reshard {layout.reshard_after_forward}")
        if layout.num_microbatches > 1:
            parts.append(f"gradient sync {layout.gradient_sync}")
        if layout.wrap_blocks > 1:
            parts.append(f"{layout.wrap_blocks} blocks a unit")
    elif layout.ddp_bucket_bytes != DDP_BUCKET_BYTES:
        parts.append(f"buckets of {layout.ddp_bucket_bytes / 2**20:g} MiB")
    return parts


def chance_words(fits_fraction: float) -> str:
    """A chance in whole percent, rounded down, and never certain."""
    if fits_fraction < 0.01:
        return "below 1 %"
    return "over 99 %" if fits_fraction > 0.99 else f"{floor(100 * fits_fraction + 1e-9)} %"
