"""Neighbours: cases beside one, by other degrees, policies, micro-batches or a larger batch, and
what the best of them brings. Rules of the field try them before they say what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.errors import SpecError
from fsdpplan.search.pins import Pins, changed_pins
from fsdpplan.search.rules.legality import first_problem, in_pieces, problems
from fsdpplan.spec.plan import Case, Estimate
from fsdpplan.units import format_percent

CLAIMED_FRACTION = 0.01
"""Of a step, for which a change is worth a sentence; less is not claimed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Another case that obeys, or comes nearer to it, and what it brings."""

    case: Case
    change: str
    """What to type beside the options that name the first case."""
    gain_fraction: float
    """Share of the time of a token that it saves."""

    @property
    def words(self) -> str:
        """What to type, and what it brings."""
        gain = format_percent(self.gain_fraction)
        if "--global-batch" in self.change:
            return f"{self.change} makes a token {gain} cheaper"
        return f"{self.change} makes a step {gain} shorter"


def seconds(case: Case) -> float:
    return step_time(case).time.total_seconds


def fits(other: Case, case: Case, estimate: Estimate) -> bool:
    """Whether `other` has the room that a plan must have, or at least takes no more than `case`."""
    available = available_bytes(cluster=case.cluster, training=case.training)
    most = max(available, estimate.memory.peak_device_bytes)
    return rank_memory(other).peak_device_bytes <= most


def best(case: Case, estimate: Estimate, *groups: Iterable[Case | None]) -> Remedy | None:
    """The best of the first group in which one is legal, fits and gains."""
    token_seconds = estimate.time.total_seconds / case.training.tokens_per_step
    broken = {problem.reason for problem in problems(case)}
    for group in groups:
        gains: list[tuple[float, Case]] = []
        for other in dict.fromkeys(one for one in group if one is not None and one != case):
            if _breaks_no_more(other, broken) and fits(other, case, estimate):
                after = seconds(other) / other.training.tokens_per_step
                gains.append((1 - after / token_seconds, other))
        gain, found = max(gains, key=lambda pair: pair[0], default=(0.0, case))
        if gain >= CLAIMED_FRACTION:
            return Remedy(case=found, change=typed_change(case, found), gain_fraction=gain)
    return None


def _breaks_no_more(other: Case, broken: Set[str]) -> bool:
    """Whether it is legal but for what a published layout `broken` itself: rules of our program."""
    if not broken:
        return first_problem(other) is None
    return {problem.reason for problem in problems(other)} <= broken


def typed_change(case: Case, other: Case) -> str:
    """What to type beside the options that name `case`, to name `other`."""
    before, after = (replace(one.layout, stage_blocks=()) for one in (case, other))
    words = [changed_pins(before, after)]
    for name in ("global_batch", "reduce_dtype", "gradient_compression"):
        if getattr(case.training, name) != getattr(other.training, name):
            words.append(f"--{name.replace('_', '-')} {getattr(other.training, name)}")
    if case.model.vocab_multiple != other.model.vocab_multiple:
        words.append(f"--vocab-multiple {other.model.vocab_multiple}")
    return " ".join(word for word in words if word)


def changed(case: Case, **changes: object) -> Case | None:
    """The case with these fields of its layout, and the batch that they make; None: no layout."""
    if {"pp", "virtual_stages", "schedule"} & changes.keys():
        changes["stage_blocks"] = ()
    try:
        layout = replace(case.layout, **changes)  # type: ignore[arg-type]
    except SpecError:
        return None
    training = replace(case.training, global_batch=layout.global_batch)
    return replace(case, layout=layout, training=training)


def respread(case: Case, **changes: int) -> Case | None:
    """The case with these degrees and the same batch, in micro-batches no larger than before."""
    layout = case.layout
    ranks = changes.get("dp_replicate", layout.dp_replicate)
    ranks *= changes.get("dp_shard", layout.dp_shard)
    share, left = divmod(case.training.global_batch, ranks)
    if left or not share:
        return None
    micro = next(size for size in range(min(layout.micro_batch, share), 0, -1) if share % size == 0)
    more: dict[str, object] = {"micro_batch": micro, "num_microbatches": share // micro}
    if isinstance(layout.reshard_after_forward, int):
        more["reshard_after_forward"] = "always"
    if changes.get("tp") == 1:
        more |= {"sequence_parallel": False, "loss_parallel": False, "async_tp": False}
    if changes.get("pp") == 1:
        more |= {"schedule": "none", "virtual_stages": 1}
        more |= {"reshard_after_forward": "always", "gradient_sync": "every"}
    return changed(case, **changes, **more)


def shards_inside(case: Case) -> Iterator[Case | None]:
    """Shards over an even part of an island, or a whole one, and copies of them."""
    layout, island = case.layout, case.cluster.levels[0].domain_gpus
    if layout.sharding != "fsdp":
        return
    for shard in range(2, layout.data_parallel + 1):
        span = shard * layout.cp * layout.tp
        if layout.data_parallel % shard == 0 and span <= island and island % span == 0:
            yield respread(case, dp_shard=shard, dp_replicate=layout.data_parallel // shard)


def partly_resharded(case: Case) -> Iterator[Case | None]:
    layout, island = case.layout, case.cluster.levels[0].domain_gpus
    ranks = island // layout.tp
    if layout.sharding == "fsdp" and 2 <= ranks < layout.shard_ranks:
        yield changed(case, reshard_after_forward=ranks)


def left_over(span: int, island: int) -> int:
    """GPUs that are left over where a group of `span` is cut into islands, or they into it."""
    return max(span, island) % min(span, island)


def evenly_sharded(case: Case) -> Iterator[Case | None]:
    """Shards over whole islands, or even parts of one."""
    layout, island = case.layout, case.cluster.levels[0].domain_gpus
    for shard in range(1, layout.data_parallel + 1):
        span = shard * layout.cp * layout.tp
        if layout.data_parallel % shard == 0 and not left_over(span, island):
            yield respread(case, dp_shard=shard, dp_replicate=layout.data_parallel // shard)


def policies(case: Case) -> Iterator[Case | None]:
    """Fewer reductions, and parameters that are kept."""
    layout = case.layout
    if layout.sharding == "fsdp":
        yield changed(case, reshard_after_forward="never")
    if layout.num_microbatches > 1:
        for sync in ("reduce_scatter_only", "last"):
            yield changed(case, gradient_sync=sync)
            yield changed(case, gradient_sync=sync, reshard_after_forward="never")


def micro_batches(case: Case, *, larger: bool) -> Iterator[Case | None]:
    """The same batch in larger micro-batches, or in smaller ones."""
    size, number = case.layout.micro_batch, case.layout.num_microbatches
    for factor in (2, 4, 8):
        if larger and number % factor == 0:
            yield changed(case, micro_batch=size * factor, num_microbatches=number // factor)
        if not larger and size % factor == 0:
            yield changed(case, micro_batch=size // factor, num_microbatches=number * factor)


def larger_batches(case: Case) -> Iterator[Case | None]:
    layout = case.layout
    for factor in (2, 4):
        yield changed(case, num_microbatches=layout.num_microbatches * factor)
        yield changed(case, micro_batch=layout.micro_batch * factor)


def narrower(case: Case, *, most: int) -> Iterator[Case | None]:
    """Less tensor parallelism, and data parallelism in its place."""
    layout = case.layout
    for tp in (layout.tp // 2, layout.tp // 4, layout.tp // 8):
        if 1 <= tp <= most and layout.tp % tp == 0:
            for axis in ("dp_shard", "dp_replicate"):
                wide = getattr(layout, axis) * (layout.tp // tp)
                yield respread(case, **{"tp": tp, axis: wide})


def shorter_pipelines(case: Case) -> Iterator[Case | None]:
    """Fewer stages, and data parallelism in their place; none at all behind two."""
    layout = case.layout
    if layout.pp % 2 == 0:
        for axis in ("dp_shard", "dp_replicate"):
            yield respread(case, **{"pp": layout.pp // 2, axis: 2 * getattr(layout, axis)})


def interleaved(case: Case) -> Iterator[Case | None]:
    layout = case.layout
    if layout.schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        for stages in (2 * layout.virtual_stages, 4 * layout.virtual_stages):
            yield changed(case, schedule="interleaved_1f1b", virtual_stages=stages)


def whole_copies(case: Case) -> Case | None:
    """DDP in the place of FSDP over the same ranks."""
    layout = case.layout
    if layout.sharding == "ddp" or layout.dp_shard == 1 or layout.cp * layout.ep * layout.pp > 1:
        return None
    return changed(
        case,
        sharding="ddp",
        dp_replicate=layout.data_parallel,
        dp_shard=1,
        reshard_after_forward="always",
        gradient_sync="last",
        wrap_blocks=1,
    )


def larger_buckets(case: Case) -> Iterator[Case | None]:
    layout = case.layout
    for factor in (2, 4, 8):
        if layout.sharding == "ddp":
            yield changed(case, ddp_bucket_bytes=layout.ddp_bucket_bytes * factor)
        elif layout.sharding == "fsdp":
            yield changed(case, wrap_blocks=layout.wrap_blocks * factor)


def leaner(case: Case) -> Iterator[Case | None]:
    """More recomputation, a loss in pieces, smaller micro-batches, deeper shards; also two."""
    layout = case.layout
    modes = ("none", "attention", "op", "full")
    for mode in modes[modes.index(layout.activation_checkpointing) :]:
        more = changed(case, activation_checkpointing=mode, checkpoint_blocks="all")
        for one in (more, *(micro_batches(more, larger=False) if more else ())):
            yield one
            pieces = one and in_pieces(one.layout, training=one.training, pins=Pins())
            if one and pieces:
                yield replace(one, layout=pieces)
    if layout.dp_replicate > 1:
        ranks = layout.data_parallel
        yield changed(case, sharding="fsdp", dp_replicate=1, dp_shard=ranks)


def on_the_other_side(case: Case) -> Case | None:
    """The case with its state on the host where it is on the device, and the other way round."""
    return changed(case, offload="none" if case.layout.offload == "cpu" else "cpu")
