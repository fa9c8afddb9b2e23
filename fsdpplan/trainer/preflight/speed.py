"""How fast links are: what the plan counts on, and which node is slower than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from ..config import ClusterConfig, LevelConfig
from .findings import Findings, may_leave_out

Where = Literal["inside", "between"]
"""The ranks of one node, or one rank of each node."""

FAR_BELOW_FRACTION = 0.5
"""Of what is promised, or of what others have: fitted promises are some 10 % off and fabrics some
20 % uneven, while a broken adapter or a link that fell to its lower rate leaves half or less."""
CPU_FAR_BELOW_FRACTION = 0.02
"""CPU processes share cores: on a busy machine one of them may be ten times as slow for a while."""
PAIR_ROUNDS = 3
"""Partners that each node is tried with: one good partner clears it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one group, or one pair of nodes, reached."""

    where: Where | Literal["pair"]
    hosts: tuple[str, ...]
    bytes_per_second: float
    """Bus bandwidth of a rank: what a ring has on its slowest link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """All groups of one kind against the plan."""

    where: Where
    name: str
    """Slowest level of the plan's network that these groups cross."""
    measured_bytes_per_second: float
    """Median of the groups."""
    promised_bytes_per_second: float | None
    """None: the plan's device is a CPU, whose links nobody promises anything of."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the plan counts on."""

    level: str
    bytes_per_second: float


def promised(
    cluster: ClusterConfig, where: Where, *, nodes: int, per_node: int, sent_bytes: float
) -> Promise | None:
    """What a ring has of the plan's network when each rank sends so many bytes; None: unknown.

        V / T,  T = V / B + h V / ((V + h) B)

    B is the least, over the levels that the ring crosses, of the fitted share of the ports by which
    a domain of the level below reaches it, split among the groups that leave that domain at the
    same time; h its half_bandwidth_bytes. The same as in the cost model
    (fsdpplan.cost.network), without latencies.
    """
    if cluster.device.kind != "cuda":
        return None
    promises, below = [], 1
    for level in cluster.levels:
        is_inside = below < per_node
        leaves_node = level.domain_gpus > per_node and below < nodes * per_node
        if is_inside if where == "inside" else leaves_node:
            groups = 1 if where == "inside" else min(below, per_node)
            rate = _exit_bytes_per_second(level, cluster, groups=groups, ranks=below)
            half = level.half_bandwidth_bytes
            filling = half / (sent_bytes + half) if half else 0.0
            promises.append(Promise(level=level.name, bytes_per_second=rate / (1 + filling)))
        below = level.domain_gpus
    return min(promises, key=lambda one: one.bytes_per_second, default=None)


def _exit_bytes_per_second(
    level: LevelConfig, cluster: ClusterConfig, *, groups: int, ranks: int
) -> float:
    """Of one group out of a domain of the level below."""
    ports = level.ports * level.port_bandwidth_bytes_per_second / groups
    host_link = cluster.device.host_link_bytes_per_second
    if not level.gpudirect and host_link is not None:
        # through host memory, which the data crosses twice
        ports = min(ports, (ranks if groups == 1 else 1) * host_link / 2)
    return ports * level.bandwidth_fraction


def pair_rounds(nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pairs of nodes that are tried at the same time, each node with another partner each round.

    The circle method of round-robin tournaments: one stays, the others move on by one place. With
    two nodes the only pair is the group of both, and there is nobody to compare it with.
    """
    if nodes < 3:
        return ()
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(PAIR_ROUNDS, len(seats) - 1)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple((a, b) for a, b in pairs if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def judge_speeds(
    speeds: Sequence[Speed], promises: Mapping[str, Promise | None], *, is_cpu: bool
) -> Findings:
    """Nodes far slower than the others are to blame; where all are far below the plan, the plan is.

    Inside, a node is compared with the other nodes; between nodes, it is slow if it is with each
    of its partners.
    """
    fraction = CPU_FAR_BELOW_FRACTION if is_cpu else FAR_BELOW_FRACTION
    inside = _slow(_of(speeds, "inside"), promises.get("inside"), fraction)
    between = _slow(_of(speeds, "pair"), promises.get("between"), fraction)
    bad = {**between, **inside}
    if may_leave_out(bad, (host for one in speeds for host in one.hosts)):
        return Findings(problem="; ".join(f"{host}: {why}" for host, why in bad.items()), bad=bad)
    return Findings(
        warnings=tuple(text for level in levels(speeds, promises) for text in _below_plan(level))
    )


def levels(
    speeds: Sequence[Speed], promises: Mapping[str, Promise | None]
) -> tuple[LevelResult, ...]:
    """What was measured of each kind of group."""
    found = []
    where: Where
    for where in ("inside", "between"):
        rates = [one.bytes_per_second for one in _of(speeds, where)]
        promise = promises.get(where)
        if rates:
            found.append(
                LevelResult(
                    where=where,
                    name=promise.level if promise else f"{where} nodes",
                    measured_bytes_per_second=median(rates),
                    promised_bytes_per_second=promise.bytes_per_second if promise else None,
                )
            )
    return tuple(found)


def _of(speeds: Sequence[Speed], where: str) -> list[Speed]:
    return [one for one in speeds if one.where == where]


def _slow(speeds: Sequence[Speed], promise: Promise | None, fraction: float) -> dict[str, str]:
    """Hosts whose best is far below what others have, with how slow that is."""
    best: dict[str, float] = {}
    for one in speeds:
        for host in one.hosts:
            best[host] = max(one.bytes_per_second, best.get(host, 0.0))
    if len(best) < 2:
        return {}
    usual = max(best.values())
    if promise is not None:
        # faster than promised is no reason to want it of all
        usual = min(usual, promise.bytes_per_second)
    where = "between its GPUs" if speeds[0].where == "inside" else "with each other node tried"
    return {
        host: f"{gb_per_second(rate)} {where}, others reach {gb_per_second(usual)}"
        for host, rate in best.items()
        if rate < fraction * usual
    }


def _below_plan(level: LevelResult) -> list[str]:
    promise = level.promised_bytes_per_second
    if promise is None or level.measured_bytes_per_second >= FAR_BELOW_FRACTION * promise:
        return []
    return [
        f"{level.name} is slower than the plan's profile: {gb_per_second(promise)} were promised, "
        f"{gb_per_second(level.measured_bytes_per_second)} measured on all nodes; measure it by "
        "fsdpplan calibrate, and plan again"
    ]


def levels_words(found: Sequence[LevelResult]) -> str:
    """`nvlink 431 of 450 GB/s, infiniband 46 of 50 GB/s`."""
    words = []
    for level in found:
        promise = level.promised_bytes_per_second
        of = "" if promise is None else f" of {promise / 1e9:.3g}"
        words.append(f"{level.name} {level.measured_bytes_per_second / 1e9:.3g}{of} GB/s")
    return ", ".join(words)


def gb_per_second(rate: float) -> str:
    """For people."""
    return f"{rate / 1e9:.3g} GB/s"
