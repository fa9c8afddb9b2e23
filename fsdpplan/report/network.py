"""Network: how ranks lie on nodes, islands and rails, which of them form a group on each axis, and
what goes over each; communication by axis and level, with the part that is waited for.

A group is its size and its stride: the browser works out which ranks are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpplan.cost.network.placement import (
    Group,
    cp_group,
    data_parallel_group,
    ep_group,
    expert_shard_group,
    group_placement,
    pp_group,
    regather_group,
    replicate_group,
    shard_group,
    tp_group,
)
from fsdpplan.report.values import Cell, Chart, Section, Table, Words, cell
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import CollectiveCost, Plan
from fsdpplan.units import format_bandwidth, format_percent, format_seconds

_WORDS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline",
    "dp_replicate": "copies of a shard",
}
_COLORS = {"tp": 0, "cp": 2, "ep": 6, "pp": 5, "dp_replicate": 3}
_SHARDS_COLOR, _OTHER_COLOR = 1, 4
"""Numbers of the page's palette, of what is not by its own name there."""
_LEVELS = {
    "nvlink": "NVLink",
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "pcie": "PCIe",
    "shm": "shared memory",
    "efa": "EFA",
    "roce": "RoCE",
    "tcpx": "TCPX",
}


def level_words(name: str) -> str:
    """A level's name as it is written."""
    return _LEVELS.get(name, name)


def groups(layout: Layout) -> tuple[Group, ...]:
    """The process groups of more than one rank, innermost first, each once."""
    all_groups = (
        tp_group(layout),
        cp_group(layout),
        ep_group(layout),
        expert_shard_group(layout) if layout.ep > 1 else shard_group(layout),
        shard_group(layout),
        regather_group(layout),
        replicate_group(layout),
        data_parallel_group(layout),
        pp_group(layout),
    )
    found: dict[tuple[int, int], Group] = {}
    for one in all_groups:
        if one.ranks > 1:
            found.setdefault((one.ranks, one.stride), one)
    return tuple(found.values())


def topology_section(plan: Plan) -> Section:
    """Where ranks are, and who talks to whom."""
    cluster, layout = plan.cluster, plan.layout
    unit = cluster.device.unit
    return Section(
        name="topology",
        title="Where the ranks are",
        says=f"One node, with what joins its {unit}s and what leads out of it. Each cell is a "
        "rank, in the order in which a job numbers them; its groups have colours. Type another "
        "rank, point at one, tap it or use the arrow keys.",
        blocks=(
            Chart(
                name="topology",
                kind="topology",
                title=f"{cluster.gpus:,} ranks on {cluster.nodes:,} "
                f"node{'' if cluster.nodes == 1 else 's'} of {cluster.gpus_per_node}",
                says=_seen(cluster, layout),
                data=topology_data(plan),
                table=_groups_table(cluster, layout),
            ),
            _levels_table(cluster),
        ),
    )


def _groups_table(cluster: Cluster, layout: Layout) -> Table:
    return Table(
        caption="Groups on each axis, in numbers",
        columns=("axis", "groups", "ranks in each", "every", "widest level", "a ring gets"),
        rows=tuple(_group_row(one, cluster) for one in groups(layout)),
        folded=True,
    )


def _group_row(group: Group, cluster: Cluster) -> tuple[Cell | str, ...]:
    placed = group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride)
    rate = placed.bandwidth_bytes_per_second
    return (
        group.axis,
        cell(cluster.gpus // group.ranks, "whole"),
        cell(group.ranks, "whole"),
        Cell("rank" if group.stride == 1 else f"{group.stride:,}th rank", group.stride),
        level_words(placed.level_name),
        Cell(format_bandwidth(rate), rate),
    )


def _seen(cluster: Cluster, layout: Layout) -> str:
    parts = [
        f"{one.axis}: groups of {one.ranks:,}, {_span(one, cluster)}" for one in groups(layout)
    ]
    return f"{'; '.join(parts)}." if parts else "One rank, which talks to nobody."


def _span(group: Group, cluster: Cluster) -> str:
    placed = group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride)
    return f"over {level_words(placed.level_name)}"


def topology_data(plan: Plan) -> dict[str, Any]:
    """What the drawing takes: sizes and order, from which the browser has every rank."""
    cluster, layout = plan.cluster, plan.layout
    return {
        "gpus": cluster.gpus,
        "perNode": cluster.gpus_per_node,
        "unit": cluster.device.unit,
        "islandNodes": island_nodes(cluster),
        "rails": None if cluster.network is None else cluster.network.rails,
        "stages": layout.pp,
        "levels": [
            {
                "name": level_words(level.name),
                "gpus": min(level.domain_gpus, cluster.gpus),
                "ports": level.ports,
                "bandwidth": level.port_bandwidth_bytes_per_second,
            }
            for level in cluster.levels
        ],
        "axes": [_axis(one, plan) for one in groups(layout) if _is_shown(one, plan)],
    }


def island_nodes(cluster: Cluster) -> int | None:
    """Nodes that one domain of an inner level joins, such as a rack of NVLink; None: no level but
    the outermost joins nodes."""
    sizes = [
        level.domain_gpus
        for level in cluster.levels
        if cluster.gpus_per_node < level.domain_gpus < cluster.gpus
        and level.domain_gpus % cluster.gpus_per_node == 0
    ]
    return sizes[0] // cluster.gpus_per_node if sizes else None


def _is_shown(group: Group, plan: Plan) -> bool:
    """Axes of the mesh are; what joins several only where something is sent over it."""
    return "*" not in group.axis.replace("dp_shard*cp", "") or any(traffic_of(group, plan))


def _axis(group: Group, plan: Plan) -> dict[str, Any]:
    placed = group_placement(cluster=plan.cluster, ranks=group.ranks, stride=group.stride)
    return {
        "name": group.axis,
        "words": _axis_words(group.axis, plan.layout),
        "color": _color(group.axis),
        "ranks": group.ranks,
        "stride": group.stride,
        "level": level_words(placed.level_name),
        "traffic": [
            {
                "collective": one.collective,
                "dtype": one.dtype,
                "count": one.count,
                "bytes": one.bytes,
                "seconds": one.seconds,
                "exposed": one.exposed_seconds,
            }
            for one in traffic_of(group, plan)
        ],
    }


def _color(axis: str) -> int:
    is_shards = axis.startswith("dp_shard") and "/" not in axis
    return _COLORS.get(axis, _SHARDS_COLOR if is_shards else _OTHER_COLOR)


def _axis_words(axis: str, layout: Layout) -> str:
    if axis in _WORDS:
        return _WORDS[axis]
    if "/ep" in axis:
        return "shards of experts"
    if axis.startswith("dp_replicate"):
        return "all that see other tokens"
    return "shards" if layout.sharding == "fsdp" else "data parallel"


def traffic_of(group: Group, plan: Plan) -> Iterator[CollectiveCost]:
    """What one rank sends in a step over a group."""
    return (
        one
        for one in plan.estimate.communication
        if (one.axis, one.ranks) == (group.axis, group.ranks)
    )


def _levels_table(cluster: Cluster) -> Table:
    return Table(
        caption="Levels of the network, from the inside out",
        columns=("level", "joins", "reached by", "latency", "GPUDirect"),
        rows=tuple(_level_row(level, at, cluster) for at, level in enumerate(cluster.levels)),
    )


def _level_row(level: Level, at: int, cluster: Cluster) -> tuple[Cell | str, ...]:
    unit = cluster.device.unit
    inner = 1 if at == 0 else cluster.levels[at - 1].domain_gpus
    below = (
        unit if at == 0 else "node" if inner == cluster.gpus_per_node else f"domain of {inner:,}"
    )
    gpus = min(level.domain_gpus, cluster.gpus)
    rate = format_bandwidth(level.port_bandwidth_bytes_per_second)
    return (
        level_words(level.name),
        Cell(cluster.device.counted(gpus), gpus),
        f"{level.ports} × {rate} of each {below}",
        cell(level.latency_seconds, "seconds"),
        "yes" if level.gpudirect else "no",
    )


def communication_section(plan: Plan) -> Section:
    """What is sent in a step, and how much of that nothing hides."""
    costs = plan.estimate.communication
    step = plan.estimate.time.total_seconds
    exposed = sum(one.exposed_seconds for one in costs)
    total = sum(one.seconds for one in costs)
    if not costs:
        return Section(
            name="communication",
            title="Communication",
            blocks=(Words(("One rank sends nothing.",)),),
        )
    return Section(
        name="communication",
        title="Communication",
        says=f"Of one rank in one step: {format_seconds(total)} of collectives, of which "
        f"{format_seconds(exposed)} are waited for ({format_percent(exposed / step)} of the step); "
        "the rest runs beside computing.",
        blocks=(_communication_chart(costs),),
    )


def call_name(one: CollectiveCost) -> str:
    """A row's name."""
    return f"{one.collective} over {one.axis}"


def _communication_chart(costs: tuple[CollectiveCost, ...]) -> Chart:
    ordered = sorted(costs, key=lambda one: -one.seconds)
    most = max(ordered, key=lambda one: one.exposed_seconds)
    waits = "Nothing is waited for."
    if most.exposed_seconds > 0:
        waits = (
            f"Most is waited for {call_name(most)}, on {level_words(most.level)}: "
            f"{format_seconds(most.exposed_seconds)}."
        )
    return Chart(
        name="communication",
        kind="bars",
        title="Collectives of one rank in a step",
        says=waits,
        data={
            "unit": "seconds",
            "categories": [f"{call_name(one)}, {level_words(one.level)}" for one in ordered],
            "series": [
                {
                    "name": "waited for",
                    "color": 5,
                    "values": [one.exposed_seconds for one in ordered],
                },
                {
                    "name": "hidden behind computing",
                    "color": 4,
                    "values": [max(0.0, one.seconds - one.exposed_seconds) for one in ordered],
                },
            ],
        },
        table=Table(
            caption="Collectives of one rank in a step, in numbers",
            columns=("collective", "axis", "ranks", "level", "calls", "volume", "time", "waited"),
            rows=tuple(
                (
                    one.collective,
                    one.axis,
                    cell(one.ranks, "whole"),
                    level_words(one.level),
                    cell(one.count, "whole"),
                    cell(one.bytes, "wire_bytes"),
                    cell(one.seconds, "seconds"),
                    cell(one.exposed_seconds, "seconds"),
                )
                for one in ordered
            ),
            folded=True,
        ),
    )
