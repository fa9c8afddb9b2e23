"""Order: which layouts the model cannot tell apart, and which of those goes first.

Fastest first would call a gain real that is smaller than the error of the prediction. So all that
are not told apart from the fastest come first, in the order that an expert would try them
(`Preference`): only a gain that is told apart buys another kind of parallelism. The others follow
by their time. Every layout is compared with the fastest and with nothing else, which makes this a
total order: there are no cycles.

Unusual: settings that most jobs leave alone, each with what it asks of whoever runs it.

This is the one list. A setting that is not here is free: micro-batch, keeping parameters after
forward, whole recomputation and synchronising once a step are everyday choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION, Timed, tie_fraction
from fsdpplan.search.question import LEAST_HEADROOM_FRACTION
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, SPLIT_BACKWARD_SCHEDULES, Layout, Sharding
from fsdpplan.spec.plan import Estimate, Interval, MemoryBreakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusualSetting:
    """One unusual setting."""

    words: str
    why: str
    """What it asks for that the usual does not."""
    is_in: Callable[[Layout], bool]


UNUSUAL = (
    UnusualSetting(
        words="async TP",
        why="needs torch.compile and symmetric memory, which not every system has",
        is_in=lambda layout: layout.async_tp,
    ),
    UnusualSetting(
        words="experts over tp",
        why="experts have a mesh of their own, which checkpoints and few programs know",
        is_in=lambda layout: layout.experts_over_tp,
    ),
    UnusualSetting(
        words="integer reshard",
        why="keeps a second sharding of the parameters, in groups that only this uses",
        is_in=lambda layout: isinstance(layout.reshard_after_forward, int),
    ),
    UnusualSetting(
        words="recomputation by operation",
        why="which operations it saves is a list that follows the versions of torch",
        is_in=lambda layout: layout.activation_checkpointing == "op",
    ),
    UnusualSetting(
        words="some blocks recomputed",
        why="a number to find again for every other model, batch or device",
        is_in=lambda layout: layout.checkpoint_blocks != "all",
    ),
    UnusualSetting(
        words="pieces of the loss",
        why="the loss makes gradients itself, so that a loss of one's own must be rewritten",
        is_in=lambda layout: layout.loss_chunks > 1,
    ),
    UnusualSetting(
        words="gradients reduced in two stages",
        why="reduce_scatter_only keeps sums on each copy that nothing but the last pass may read",
        is_in=lambda layout: layout.gradient_sync == "reduce_scatter_only",
    ),
    UnusualSetting(
        words="offload",
        why="steps wait for the host's memory and processors, which differ from node to node",
        is_in=lambda layout: layout.offload != "none",
    ),
    UnusualSetting(
        words="several stages a rank",
        why="checkpoints and models must be cut into parts that are not neighbours",
        is_in=lambda layout: layout.virtual_stages > 1,
    ),
    UnusualSetting(
        words="a rare schedule",
        why="split backward passes and looped schedules run in few programs, mostly uncompiled",
        is_in=lambda layout: layout.schedule in {*SPLIT_BACKWARD_SCHEDULES, "looped_bfs"},
    ),
    UnusualSetting(
        words="stages cut by hand",
        why="who changes the model has to cut again",
        is_in=lambda layout: bool(layout.stage_blocks),
    ),
    UnusualSetting(
        words="several blocks a unit",
        why="FSDP is wrapped otherwise than every example does it",
        is_in=lambda layout: layout.wrap_blocks > 1,
    ),
    UnusualSetting(
        words="another bucket of DDP",
        why="a number to tune again on other machines",
        is_in=lambda layout: layout.ddp_bucket_bytes != DDP_BUCKET_BYTES,
    ),
)


def unusual(layout: Layout) -> tuple[str, ...]:
    """The unusual settings of `layout`, in words."""
    return tuple(setting.words for setting in UNUSUAL if setting.is_in(layout))


KINDS = {"data": 0, "tensor": 1, "context": 2, "expert": 2, "pipeline": 2}
"""Kinds of parallelism, and how much each asks for: tensor parallelism touches every matrix of a
block; the others change attention, routing or the training loop too."""

SHARDINGS = ("ddp", "zero1", "zero2", "fsdp")
"""In the order of what is split: nothing, the optimizer's state, gradients, parameters."""


class Priced(Timed, Protocol):
    """What the order reads of an estimate."""

    @property
    def step_seconds(self) -> Interval:
        """The step."""

    @property
    def memory(self) -> MemoryBreakdown:
        """Bytes on the fullest rank."""


Entry = tuple[Layout, Estimate]
One = TypeVar("One", bound=tuple[Layout, Priced])
Difference = Callable[[tuple[Layout, Any], tuple[Layout, Any]], float]
"""Error of the difference of two step times, as a share of them; of layouts with their times."""


@dataclass(frozen=True, slots=True, order=True)
class Preference:
    """What decides between layouts that are not told apart, the first thing first: less is better.

    The first four follow from the layout alone.
    """

    kinds: int
    """Kinds of parallelism."""
    weight: int
    """Of as many kinds, what they ask for."""
    form: int
    """How the state is held: whole before split, and split in groups that others use too."""
    settings: int
    """Unusual settings."""
    is_tight: bool
    """Leaves less memory free than should be."""
    is_wide: bool
    """Gathers parameters over the outermost level of the network, where crowds are not priced."""
    seconds: float
    peak_bytes: int
    text: str
    """No tie is left to the order of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Generic[One]):
    """Layouts in the order in which they are answered."""

    tied: tuple[One, ...]
    """Those that are not told apart from `reference`, mostly the fastest, the preferred one
    first."""
    others: tuple[One, ...]
    """The others, the faster first."""

    @property
    def entries(self) -> tuple[One, ...]:
        """All of them."""
        return self.tied + self.others

    @property
    def fastest(self) -> One:
        """The fastest."""
        return min(self.entries, key=by_time)


def seconds(entry: tuple[Layout, Priced]) -> float:
    """The expected step."""
    return entry[1].step_seconds.expected


def by_time(entry: tuple[Layout, Priced]) -> tuple[float, int, str]:
    """Time, then memory, then a stable text."""
    layout, result = entry
    return (seconds(entry), result.memory.peak_device_bytes, repr(layout))


def kinds(layout: Layout) -> tuple[str, ...]:
    """The kinds of parallelism in use; whole copies and shards alike are data parallelism."""
    degrees = (layout.data_parallel, layout.tp, layout.cp, layout.expert_ranks, layout.pp)
    return tuple(kind for kind, degree in zip(KINDS, degrees, strict=True) if degree > 1)


def form(layout: Layout, cluster: Cluster) -> int:
    """How the state is held: twice its place in `SHARDINGS`, and one more for copies of shards
    that fill no domain of the network.

    Sharding over all ranks and over a node are both everyday; which is better is for time to say.
    """
    if layout.shard_ranks == 1:
        return 0
    domains = {level.domain_gpus for level in cluster.levels}
    is_odd = layout.dp_replicate > 1 and layout.shard_ranks * layout.tp not in domains
    return 2 * SHARDINGS.index(layout.sharding) + is_odd


def gathers_widely(layout: Layout, cluster: Cluster) -> bool:
    """Whether FSDP gathers parameters over the outermost level of the network, which joins more
    than two domains, where nothing is known of how groups crowd there: time says it where it is."""
    if layout.sharding != "fsdp" or layout.shard_ranks == 1 or len(cluster.levels) == 1:
        return False
    inner, outermost = cluster.levels[-2:]
    is_priced = outermost.crowding_exponent > 0 or cluster.gpus <= 2 * inner.domain_gpus
    return not is_priced and layout.shard_ranks * layout.tp > inner.domain_gpus


def simplicity(layout: Layout, cluster: Cluster) -> tuple[int, int, int, int]:
    """The part of the preference that needs no estimate; less is simpler."""
    used = kinds(layout)
    weight = sum(KINDS[kind] for kind in used)
    return (len(used), weight, form(layout, cluster), len(unusual(layout)))


def preference(entry: tuple[Layout, Priced], cluster: Cluster) -> Preference:
    """Where `entry` stands among those that are not told apart from the fastest."""
    layout, result = entry
    most_bytes = (1 - LEAST_HEADROOM_FRACTION) * cluster.device.memory_bytes
    is_tight = result.memory.peak_device_bytes > most_bytes
    wide = gathers_widely(layout, cluster)
    return Preference(*simplicity(layout, cluster), is_tight, wide, *by_time(entry))


def decided_by(one: Preference, other: Preference) -> str:
    """The first thing in which the two differ."""
    differing = (f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name))
    return next(differing, "text")


def in_order(
    entries: Iterable[One], *, difference: Difference, cluster: Cluster
) -> Ordered[One] | None:
    """`entries` in order; None where there are none."""
    by_speed = sorted(entries, key=by_time)
    if not by_speed:
        return None
    first = reference(by_speed, difference=difference)
    is_plain = first is not by_speed[0]
    tied: list[One] = []
    others: list[One] = []
    for entry in by_speed:
        is_left_out = is_plain and entry[0].offload != "none"
        is_in = not is_left_out and is_tied(entry, first, difference)
        (tied if is_in else others).append(entry)
    tied.sort(key=lambda entry: preference(entry, cluster))
    return Ordered(tied=tuple(tied), others=tuple(others))


def reference(by_speed: Sequence[One], *, difference: Difference) -> One:
    """The layout with which others tie: the fastest. Where its state is on the host it is the
    fastest that has none there, if the error of their difference does not tell them apart: what a
    host gives differs from node to node, and has to be worth more than that error."""
    fastest = by_speed[0]
    if fastest[0].offload == "none":
        return fastest
    plain = next((one for one in by_speed if one[0].offload == "none"), fastest)
    behind = seconds(plain) / seconds(fastest) - 1
    return plain if behind <= difference(fastest, plain) else fastest


def is_tied(entry: One, fastest: One, difference: Difference) -> bool:
    """Whether `entry` cannot be told apart from the fastest of all."""
    behind = seconds(entry) / seconds(fastest) - 1
    if behind > MOST_INDISTINGUISHABLE_FRACTION:
        return False
    return entry is fastest or behind <= tie_fraction(difference(fastest, entry))


def listed(order: Ordered[One], *, limit: int) -> list[One]:
    """The `limit` best ways to spread the ranks, each by its first; and always, where it stands in
    the order, the fastest of all with its own policies and the first of each kind of `COMPARED`."""
    firsts: dict[tuple[int, ...], One] = {}
    for entry in order.entries:
        firsts.setdefault(spread(entry[0]), entry)
    ways = list(firsts.values())
    firsts_of_kinds = (
        next((entry for entry in order.entries if is_of_kind(entry[0])), order.fastest)
        for is_of_kind in COMPARED.values()
    )
    shown = {id(entry) for entry in (*ways[:limit], order.fastest, *firsts_of_kinds)}
    return [entry for entry in order.entries if id(entry) in shown]


def spread(layout: Layout) -> tuple[int, ...]:
    """How the ranks are spread."""
    degrees = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    return (*degrees, *layout.expert_ways)


class Spread(Protocol):
    """How ranks are spread: what a layout and the degrees of a group have in common."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""

    @property
    def dp_replicate(self) -> int:
        """Copies."""

    @property
    def dp_shard(self) -> int:
        """Ranks of a copy."""

    @property
    def cp(self) -> int:
        """Parts of a sequence."""

    @property
    def tp(self) -> int:
        """Parts of a matrix."""

    @property
    def ep(self) -> int:
        """Ranks that share experts."""

    @property
    def experts_over_tp(self) -> bool:
        """Whether whole experts are spread over `tp`, too."""

    @property
    def sharding(self) -> Sharding:
        """What is split over the ranks of a copy."""


def is_data_parallel(spread: Spread) -> bool:
    """Whether every rank computes whole layers of its own sequences."""
    return spread.tp == spread.pp == spread.cp == 1


def is_hybrid(spread: Spread) -> bool:
    """Whether it is data parallel by HSDP: copies of shards."""
    is_split = spread.sharding == "fsdp" and spread.dp_shard > 1
    return is_data_parallel(spread) and is_split and spread.dp_replicate > 1


def is_expert_parallel(spread: Spread) -> bool:
    """Whether experts are spread over ranks."""
    return spread.ep > 1 or (spread.experts_over_tp and spread.tp > 1)


COMPARED: Mapping[str, Callable[[Spread], bool]] = {
    "data parallel": is_data_parallel,
    "HSDP": is_hybrid,
    "expert parallel": is_expert_parallel,
}
"""Kinds of layouts whose best is always listed: what people compare with first."""
