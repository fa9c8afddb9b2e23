"""Words: a layout as a person would say it."""

from __future__ import annotations

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
}


def describe(layout: Layout, cluster: Cluster) -> str:
    """One sentence, such as "HSDP: shard over the 8 GPUs of a node, replicate over 16 nodes"."""
    if layout.world == 1:
        return "one GPU: nothing to spread"
    parts = [_data_parallel(layout, cluster)] if layout.data_parallel * layout.cp > 1 else []
    if layout.tp > 1:
        parts.append(f"tensor parallel over {_span(layout.tp, 1, cluster)}")
    if layout.pp > 1:
        schedule = _SCHEDULES.get(layout.schedule, layout.schedule)
        parts.append(f"pipeline of {layout.pp} stages ({schedule})")
    return ", ".join(parts)


def name(layout: Layout) -> str:
    """The family in a word or two: "DDP", "FSDP", "HSDP", "TP + FSDP", ..."""
    families = []
    if layout.tp > 1:
        families.append("TP")
    if layout.pp > 1:
        families.append("PP")
    if layout.data_parallel * layout.cp > 1:
        families.append(_family(layout))
    return " + ".join(families) or "one GPU"


def _family(layout: Layout) -> str:
    if layout.sharding == "ddp":
        return "DDP"
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
