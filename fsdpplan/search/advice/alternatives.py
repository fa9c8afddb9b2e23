"""Alternatives: fewer machines than were asked for, where more of them do not pay; the domains of
slow links apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.search.bounds.pricing import faster
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.search.space import Space
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.spec.plan import Case, RankedLayout
from fsdpplan.spec.training import Training
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.units import format_count, format_percent, format_seconds

INNER_STEPS = 500
"""Steps between two averages of a low-communication method. Source: Douillard et al., DiLoCo
(arXiv 2311.08105), abstract: 500 times less communication than synchronous training."""

SHARES_WORTH = 1.03
"""Times as many tokens/s for which more racks, each in part, are worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedPlan:
    """What is to be trained, and the best way found to do it on all machines."""

    model: Model
    cluster: Cluster
    training: Training
    best: RankedLayout


def advice(job: RecommendedPlan, *, parts: Sequence[Cluster]) -> tuple[str, ...]:
    """Sentences on machines that cost more than they bring; `parts`: the nodes of each type alone,
    where there are several."""
    said = (_shares(job), _weak_nodes(job), _slow_type(job, parts))
    return tuple(sentence for sentence in said if sentence is not None)


def _shares(job: RecommendedPlan) -> str | None:
    """Where whole NVLink domains are filled: what shares of a power of two of more of them do."""
    domain = job.cluster.nvlink_domain
    if domain is None or domain.whole_gpus or job.cluster.gpus <= domain.domain_gpus:
        return None
    share = 1 << (domain.domain_gpus.bit_length() - 1)
    if share == domain.domain_gpus or job.cluster.gpus % share or share % job.cluster.gpus_per_node:
        return None
    shared = _tokens_per_second(job, with_shares(job.cluster, share))
    least = SHARES_WORTH * job.best.estimate.tokens_per_second
    if shared is None or shared < least:
        return None
    # the gain is that of the shares, not of what was pinned
    whole = _tokens_per_second(job, job.cluster)
    if whole is None or shared < SHARES_WORTH * whole:
        return None
    return (
        f"{share} of the {domain.domain_gpus} GPUs of each of {job.cluster.gpus // share} NVLink "
        f"domains (--domain-gpus {share}) train {format_count(shared)} tokens/s, "
        f"{format_percent(shared / whole - 1)} more than all {domain.domain_gpus} of "
        f"{job.cluster.gpus // domain.domain_gpus}: groups of a power of two stay inside"
    )


def with_shares(cluster: Cluster, share: int) -> Cluster:
    """`cluster` with so many GPUs of each domain of its innermost level; ports go with them."""
    inner, *outer = cluster.levels
    whole = inner.domain_gpus
    levels = [replace(inner, domain_gpus=share, whole_gpus=whole)]
    for level in outer:
        joined = min(cluster.gpus, level.domain_gpus // whole * share)
        last = level is outer[-1]
        ports = max(1, level.ports * share // whole)
        levels.append(replace(level, domain_gpus=cluster.gpus if last else joined, ports=ports))
    return replace(cluster, levels=tuple(levels))


def _tokens_per_second(job: RecommendedPlan, cluster: Cluster) -> float | None:
    """What the best layout on `cluster` trains; None where none fits. The batch stays about the
    same: the next multiple of the GPUs."""
    batch = max(1, round(job.training.global_batch / cluster.gpus)) * cluster.gpus
    training = replace(job.training, global_batch=batch)
    free = Pins()
    problem = question_problem(model=job.model, cluster=cluster, training=training, pins=free)
    if problem is not None:
        return None
    found = recommend(model=job.model, cluster=cluster, training=training, pins=free, limit=1)
    return found.ranked[0].estimate.tokens_per_second if found.ranked else None


def _weak_nodes(job: RecommendedPlan) -> str | None:
    """What the weak nodes cost, by the same layout with others in their place."""
    nodes = weak_nodes(job.cluster)
    if not nodes:
        return None
    extra = keeping_fraction(job, nodes)
    names = compress_host_list(nodes)
    if extra < 0.01:
        return f"keeping {names} costs less than 1 % a step: this layout hardly meets what is slow"
    now = job.best.estimate.step_seconds.expected
    return (
        f"keeping {names} makes a step {format_percent(extra)} longer: "
        f"{format_seconds(now)} in place of {format_seconds(now / (1 + extra))}; "
        f"fsdpplan emit-launch --exclude {names} takes other nodes"
    )


def keeping_fraction(job: RecommendedPlan, nodes: Sequence[str]) -> float:
    """How much longer a step is for keeping `nodes`, as a fraction of one without them."""
    healthy = estimate(
        Case(
            model=job.model,
            cluster=without_nodes(job.cluster, nodes),
            training=job.training,
            layout=job.best.layout,
        )
    )
    return job.best.estimate.step_seconds.expected / healthy.step_seconds.expected - 1


def _slow_type(job: RecommendedPlan, parts: Sequence[Cluster]) -> str | None:
    """Where the nodes of one type train about as fast alone as all do together."""
    whole = job.best.estimate.tokens_per_second
    rates = [(_tokens_per_second(job, part), part) for part in parts]
    known = [(rate, part) for rate, part in rates if rate is not None]
    if not known:
        return None
    rate, part = max(known, key=lambda pair: pair[0])
    if rate < whole:
        return None
    return (
        f"the {part.nodes} nodes with {part.device.name} alone train {format_count(rate)} "
        f"tokens/s, all {job.cluster.nodes} nodes together {format_count(whole)}: plan for them "
        f"alone, with their own profile and --gpus {part.gpus}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The domains of the outermost level, each training by itself between averages."""

    domains: int
    batch: int
    """Sequences a step of each: together as many as before, about."""
    step_seconds: float
    tokens_per_second: float
    """Of all together, the averages left out."""
    exchange_seconds: float
    """An all-reduce of fp32 parameters between domains, each GPU of one with its share."""

    @property
    def hiding_steps(self) -> int:
        """Inner steps beside which an average runs unseen: as long as it takes."""
        return max(1, ceil(self.exchange_seconds / self.step_seconds))


def apart_of(case: Case) -> Apart | None:
    """What the best layout on one domain does with its share of the batch; None where none fits."""
    cluster, training = case.cluster, case.training
    alone = _one_domain(cluster)
    domains = cluster.gpus // alone.gpus
    batch = max(1, round(training.global_batch / cluster.gpus)) * alone.gpus
    asked, free = replace(training, global_batch=batch), Pins()
    if question_problem(model=case.model, cluster=alone, training=asked, pins=free) is not None:
        return None
    found = recommend(model=case.model, cluster=alone, training=asked, pins=free, limit=1)
    if not found.ranked:
        return None
    best = found.ranked[0].estimate
    between = group_placement(cluster=cluster, ranks=domains, stride=alone.gpus)
    return Apart(
        domains=domains,
        batch=batch,
        step_seconds=best.step_seconds.expected,
        tokens_per_second=domains * best.tokens_per_second,
        exchange_seconds=collective_seconds(
            collective="all_reduce",
            gathered_bytes=4 * parameter_count(case.model) / alone.gpus,
            placement=between,
        ),
    )


def _one_domain(cluster: Cluster) -> Cluster:
    gpus = cluster.levels[-2].domain_gpus
    return replace(
        cluster,
        gpus=gpus,
        gpus_per_node=min(gpus, cluster.gpus_per_node),
        levels=cluster.levels[:-1],
        weak=tuple(spot for spot in cluster.weak if spot.level != cluster.levels[-1].name),
    )


def best_of_all(case: Case) -> float:
    """Tokens/s of the fastest layout on all devices, whatever that of the case is."""
    asked = Question(model=case.model, cluster=case.cluster, training=case.training, pins=Pins())
    found = faster(Space(asked), inf)
    return found[1].tokens_per_second if found else 0.0
