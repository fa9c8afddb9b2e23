"""What the tiny step's numbers say, in a sentence: put together on rank 0 of what all ranks saw."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from math import isfinite, sqrt

from ..config import PlanConfig
from ..parallel.mesh import MESH_AXES, Place, place
from ..parallel.tied_tables import HEAD, TABLE
from ..preflight.findings import Findings, may_leave_out, places_words
from .evidence import Evidence, counts_in, explain_counts
from .look import Seen
from .trial import Rough
from .words import (
    CLOSE,
    ROUGH_FRACTION,
    axes_words,
    axis_sizes,
    gradient_words,
    names_words,
    nearest_ratio,
    ratio_words,
    times_words,
)

ROUGH_LOSS = 0.15
MOST_FITTED = 64
"""Ranks of which evidence is wanted."""

Hosts = Sequence[str]


def wanted_evidence(seen: Sequence[Seen], plan: PlanConfig) -> list[int]:
    """Ranks that are to tell more; none where all is right."""
    differing = differing_replicas(seen, plan)
    wrong = [each.rank for each in seen if not each.is_right]
    return sorted({*wrong[:MOST_FITTED], *differing[:MOST_FITTED]})


def judge_numbers(
    seen: Sequence[Seen], evidence: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings:
    """What is wrong with the step in fp32, by its first cause."""
    for judge in _JUDGES:
        found = judge(seen, evidence, plan, hosts)
        if found is not None:
            return found
    return Findings()


def differing_replicas(seen: Sequence[Seen], plan: PlanConfig) -> list[int]:
    """Ranks in groups of replicas that do not hold the same bits; kernels of different CPUs round
    differently, and are not compared."""
    groups = _replica_groups(seen, plan)
    return [
        each.rank
        for group in groups
        if len({one.digest for one in group}) > 1
        and len({one.digest.rpartition(" ")[0] for one in group}) == 1
        for each in group
    ]


def _replica_groups(seen: Sequence[Seen], plan: PlanConfig) -> list[list[Seen]]:
    groups: dict[tuple[int, ...], list[Seen]] = {}
    for each in seen:
        at = place(plan.layout, each.rank)
        groups.setdefault((at.pp, at.dp_shard, at.cp, at.tp), []).append(each)
    return [group for group in groups.values() if len(group) > 1]


def _judge_gathered(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.gathered]
    if not wrong:
        return None
    names = names_words([name for each in wrong for name in each.gathered])
    if plan.layout.sharding == "fsdp":
        axis = next((name for name in axis_sizes(plan) if name.startswith("dp_shard")), "dp_shard")
        why = f"the all-gather over {axis} brings other values than the ranks hold"
    else:
        why = "they change between the start and the forward pass"
    return _found(wrong, hosts, f"forward is given wrong parameters ({names}): {why}")


def _judge_outputs(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.outputs]
    if not wrong:
        return None
    first = min((name for each in wrong for name in each.outputs), key=_turn)
    there = [each for each in wrong if first in each.outputs]
    axes = [axis for axis in _axes_at(first, plan) if _fills_groups(there, plan, axis)]
    text = (
        f"the forward pass is wrong from the {first} on"
        if first.startswith("input")
        else (f"the forward pass is wrong from {first} on")
    )
    if first.startswith("input"):
        why = "what the stage before sends is not what arrives"
    elif axes:
        sizes = axis_sizes(plan) | {"cp": plan.layout.cp}
        over = " or ".join(f"{axis} ({sizes[axis]} ranks)" for axis in axes)
        why = f"the parts of the ranks of {over} do not add up there"
    else:
        why = "it is computed otherwise than in one process"
    return _found(there, hosts, f"{text}: {why}")


def _judge_losses(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.losses]
    if not wrong:
        return None
    found, expected = wrong[0].losses
    times = times_words(found / expected) if expected else ""
    by = f", {times}" if times else ""
    text = f"the loss is {found:.6g}, that of one process {expected:.6g}{by}"
    return _found(wrong, hosts, text)


def _judge_gradients(
    seen: Sequence[Seen], evidence: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.gradients]
    if not wrong or _is_one_replica(wrong, seen, plan):
        return None
    commonest = Counter(_rounded(each.ratio) for each in wrong).most_common(1)[0][0]
    alike = [each for each in wrong if _rounded(each.ratio) == commonest]
    if commonest is not None:
        return _found(alike, hosts, ratio_words(commonest, alike, plan))
    shards = [each for each in evidence if each.shard_of is not None]
    if shards:
        places = {each.rank: each.shard_of for each in shards}
        rank, other = next(iter(places.items()))
        axis = next(name for name in axis_sizes(plan) if name.startswith("dp_shard"))
        return Findings(
            problem=f"the reduce-scatter over {axis} gives {places_words([rank], _by_rank(hosts))} "
            f"the part of the gradients that belongs to number {other} of {axis}, and "
            f"{len(places)} ranks in all another one's"
        )
    story = _story(wrong, evidence, plan)
    which = gradient_words(wrong)
    if story:
        return _found(wrong, hosts, f"{story} ({which})")
    tables = {TABLE, HEAD} if plan.model.tied_embeddings and plan.layout.pp > 1 else set()
    if {name for each in wrong for name in each.gradients} <= tables:
        text = "the gradients of the table that embedding and head share are not added up over pp"
        return _found(wrong, hosts, text)
    axes = axes_words(plan)
    return _found(
        wrong,
        hosts,
        f"the loss is right and the gradients are not ({which}): what backward sends over {axes} "
        "does not add up",
    )


def _judge_replicas(
    seen: Sequence[Seen], evidence: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    differing = set(differing_replicas(seen, plan))
    group = next(
        (
            members
            for members in _replica_groups(seen, plan)
            if any(each.rank in differing for each in members)
        ),
        None,
    )
    if group is None:
        return None
    usual, count = Counter(each.digest for each in group).most_common(1)[0]
    odd = [each for each in group if each.digest != usual]
    is_clear = 2 * count > len(group)
    suspects = odd if is_clear else [each for each in group if not each.is_right]
    ranks = [each.rank for each in group]
    bits = {each.rank: each.bits for each in evidence}
    known = [bits[rank] for rank in ranks if rank in bits]
    names = [
        name for name in (known[0] if known else {}) if len({each.get(name) for each in known}) > 1
    ]
    text = f"replicas of dp_replicate (ranks {', '.join(map(str, ranks[:8]))}) differ after a step"
    what = f"{text}, first in {names[0]}" if names else text
    if len(suspects) == 1 or is_clear:
        by = places_words([each.rank for each in suspects], _by_rank(hosts))
        what += f": {by} {'has' if len(suspects) == 1 else 'have'} other bits than the others"
        return _blaming(suspects, hosts, what)
    return Findings(problem=f"{what}: what one of them got or computed is not what it should be")


def _judge_norms(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.norms]
    if not wrong:
        return None
    found, expected = wrong[0].norms
    story = _norm_story(wrong[0], seen, plan)
    why = f": {story}" if story else ""
    return _found(
        wrong, hosts, f"the gradient norm is {found:.6g}, that of the whole {expected:.6g}{why}"
    )


def _judge_updates(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.updates]
    if not wrong:
        return None
    names = names_words([name for each in wrong for name in each.updates])
    optimizer = plan.training.optimizer
    return _found(
        wrong,
        hosts,
        f"{optimizer} makes another step than in one process, of right gradients ({names})",
    )


def _judge_second_step(
    seen: Sequence[Seen], _: Sequence[Evidence], plan: PlanConfig, hosts: Hosts
) -> Findings | None:
    wrong = [each for each in seen if each.later_losses]
    if wrong:
        found, expected = wrong[0].later_losses
        return _found(
            wrong,
            hosts,
            f"the loss of a second step is {found:.6g}, that of one process {expected:.6g}: "
            "forward is given other parameters than the first step left (older ones?)",
        )
    wrong = [each for each in seen if each.later_norms]
    if not wrong:
        return None
    found, expected = wrong[0].later_norms
    return _found(
        wrong,
        hosts,
        f"the gradient norm of a second step is {found:.6g}, that of the whole {expected:.6g}: "
        "gradients of the first one may be left in it",
    )


_JUDGES: tuple[
    Callable[[Sequence[Seen], Sequence[Evidence], PlanConfig, Hosts], Findings | None], ...
] = (
    _judge_gathered,
    _judge_outputs,
    _judge_losses,
    _judge_gradients,
    _judge_replicas,
    _judge_norms,
    _judge_updates,
    _judge_second_step,
)
"""In the order of cause and effect."""


def judge_formats(rough: Sequence[Rough], norm: float, plan: PlanConfig, hosts: Hosts) -> Findings:
    """What is wrong with the step in the plan's own formats, which was right in fp32; `norm` is
    one process's, in fp32."""
    training = plan.training
    formats = f"in {training.precision}, reduced in {training.reduce_dtype},"
    lost = [n for n, each in enumerate(rough) if not isfinite(each.found_squares + each.norm)]
    if lost:
        return _said_of(lost, hosts, f"{formats} the gradients of {{}} are no numbers")
    off = [
        n
        for n, each in enumerate(rough)
        if each.losses and abs(each.losses[0] / each.losses[1] - 1) > ROUGH_LOSS
    ]
    if off:
        found, expected = rough[off[0]].losses or (0.0, 0.0)
        text = f"the loss of {{}} is {found:.4g}, in fp32 {expected:.4g}"
        return _said_of(off, hosts, f"{formats} {text}")
    expected_squares = sum(each.expected_squares for each in rough)
    ratio = sum(each.products for each in rough) / expected_squares
    if abs(ratio - 1) > ROUGH_FRACTION:
        nearest = nearest_ratio(ratio, plan)
        return Findings(problem=f"{formats} {ratio_words(nearest, (), plan)}")
    off = [n for n, each in enumerate(rough) if abs(each.norm / norm - 1) > ROUGH_FRACTION]
    if off:
        text = f"the gradient norm of {{}} is {rough[off[0]].norm:.4g}, in fp32 {norm:.4g}"
        return _said_of(off, hosts, f"{formats} {text}")
    return Findings()


def _said_of(ranks: Sequence[int], hosts: Hosts, text: str) -> Findings:
    where = places_words(ranks, _by_rank(hosts))
    return _blamed(ranks, hosts, text.format(where))


def _found(wrong: Sequence[Seen], hosts: Hosts, text: str) -> Findings:
    ranks = [each.rank for each in wrong]
    where = places_words(ranks, _by_rank(hosts)) if len(ranks) < len(hosts) else "all ranks"
    return _blamed(ranks, hosts, f"{text}, on {where}")


def _blaming(wrong: Sequence[Seen], hosts: Hosts, text: str) -> Findings:
    return _blamed([each.rank for each in wrong], hosts, text)


def _blamed(ranks: Sequence[int], hosts: Hosts, text: str) -> Findings:
    """A host is bad where it alone is wrong: more of them say that something else is."""
    there = {hosts[rank] for rank in ranks}
    bad = there if len(there) == 1 and may_leave_out(there, hosts) else ()
    return Findings(problem=text, bad={host: text for host in bad})


def _by_rank(hosts: Hosts) -> dict[int, str]:
    return dict(enumerate(hosts))


def _turn(name: str) -> tuple[int, int]:
    """Where a part of the model stands in forward."""
    number = re.search(r"layers\.(\d+)", name)
    if number is None:
        return (-1, 0) if name == "tok_embeddings" else (10**9, 0)
    kinds = ("input", "attention", "feed_forward")
    return int(number[1]), next(n for n, kind in enumerate(kinds) if kind in name)


def _axes_at(part: str, plan: PlanConfig) -> list[str]:
    """Axes whose ranks put their parts together there."""
    layout = plan.layout
    wanted = ["tp"]
    if part.endswith("attention"):
        wanted = ["tp", "cp"]
    elif part.endswith("feed_forward") and plan.model.has_experts(_turn(part)[0]):
        wanted = ["ep", "tp"]
    return [axis for axis in wanted if getattr(layout, axis) > 1]


def _fills_groups(wrong: Sequence[Seen], plan: PlanConfig, axis: str) -> bool:
    """Whether more than one rank of each group along `axis` is wrong: what they share is."""
    if axis == "ep":
        return True
    groups = Counter(_without(place(plan.layout, each.rank), axis) for each in wrong)
    return all(count > 1 for count in groups.values()) or not groups


def _without(at: Place, *axes: str) -> tuple[int, ...]:
    return tuple(getattr(at, name) for name in MESH_AXES if name not in axes)


def _is_one_replica(wrong: Sequence[Seen], seen: Sequence[Seen], plan: PlanConfig) -> bool:
    """Whether replicas of wrong ranks are right: then they differ, and that is said."""
    ranks = {each.rank for each in wrong}
    differing = set(differing_replicas(seen, plan))
    return bool(differing) and all(
        ranks & set(group) and set(group) - ranks
        for group in (
            {each.rank for each in members}
            for members in _replica_groups(seen, plan)
            if any(each.rank in ranks for each in members)
        )
    )


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else float(f"{ratio:.3g}")


def _story(wrong: Sequence[Seen], evidence: Sequence[Evidence], plan: PlanConfig) -> str:
    """Whose sequences are in the gradients: told of ranks that must have the same, together."""
    by_rank = {each.rank: each for each in evidence if each.products}
    for ranks in _groups_alike([each.rank for each in wrong], plan):
        known = [by_rank[rank] for rank in ranks if rank in by_rank]
        counts = counts_in(known, plan) if known else None
        story = explain_counts(counts, plan, known[0].rank) if counts else ""
        if story:
            return story
    return ""


def _groups_alike(ranks: Sequence[int], plan: PlanConfig) -> Iterator[list[int]]:
    """All ranks, then those of a replica, then each by itself: those of one story may hold parts of
    one gradient, or each its own."""
    yield list(ranks)
    for axes in (("dp_replicate",), ("dp_replicate", "dp_shard")):
        names: Collection[str] = set(MESH_AXES) - set(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            key = _without(place(plan.layout, rank), *names)
            groups.setdefault(key, []).append(rank)
        yield from groups.values()


def _norm_story(wrong: Seen, seen: Sequence[Seen], plan: PlanConfig) -> str:
    """Which sum a wrong norm leaves out, or makes twice."""
    found, expected = wrong.norms
    at = place(plan.layout, wrong.rank)
    groups = {
        "tp": ("tp",),
        "dp_shard" if plan.layout.cp == 1 else "dp_shard*cp": ("dp_shard", "cp"),
        "pp": ("pp",),
    }
    sizes = axis_sizes(plan)
    for axis, names in groups.items():
        if axis not in sizes:
            continue
        fixed = {"dp_replicate", *names}
        squares = sum(
            each.squares
            for each in seen
            if all(
                getattr(place(plan.layout, each.rank), name) == getattr(at, name) for name in fixed
            )
        )
        if abs(sqrt(squares) / found - 1) <= CLOSE:
            return f"the squares of the ranks of {axis} are not added up"
        if abs(found / expected - sqrt(sizes[axis])) <= CLOSE * sqrt(sizes[axis]):
            return f"the squares are counted {sizes[axis]} times, over {axis}"
    if abs(sqrt(wrong.squares) / found - 1) <= CLOSE:
        return "no rank's squares are added to its own"
    return ""
