"""Alternatives: fewer machines than were asked for, where more of them do not pay; more rows of a
vocabulary, where they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.cost.step import estimate
from fsdpplan.search.advice.words import domain_words
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.spec.plan import Case, RankedLayout
from fsdpplan.spec.training import Training, program_named
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.units import format_bandwidth, format_count, format_percent, format_seconds

WAITING_FRACTION = 0.2
"""Share of a step that must wait for a level before the machines inside it are priced alone."""

WORTH_FRACTION = 0.5
"""Several domains that train at less than this share of what they would apart do not belong in
one step."""

SHARES_WORTH = 1.03
"""Times as many tokens/s for which more racks, each in part, are worth a word."""

INNER_STEPS = 500
"""Steps between two averages of a low-communication method. Source: Douillard et al., DiLoCo
(arXiv 2311.08105), abstract: 500 times less communication than synchronous training."""

OFFERED_MULTIPLE = 64
"""Rows: 128 bytes of logits in 16 bits, and divisors of most degrees."""

LEAST_GAIN_FRACTION = 0.01
"""Of a step, for which a padded vocabulary is worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedPlan:
    """What is to be trained, and the best way found to do it on all machines."""

    model: Model
    cluster: Cluster
    training: Training
    best: RankedLayout


def advice(job: RecommendedPlan, *, parts: Sequence[Cluster]) -> tuple[str, ...]:
    """Sentences on machines that cost more than they bring, and on rows that bring more than they
    cost; `parts`: the nodes of each type alone, where there are several."""
    machines = (_slow_level(job), _shares(job), _weak_nodes(job), _slow_type(job, parts))
    said = (*machines, _unaligned(job))
    return tuple(sentence for sentence in said if sentence is not None)


def _unaligned(job: RecommendedPlan) -> str | None:
    """Where rows of logits leave the tensor cores' fast path: what a padded vocabulary would do."""
    model, training, layout = job.model, job.training, job.best.layout
    if training.runtime != "fsdp2" or not program_named(training.program).knows_blocks:
        return None
    padded = replace(model, vocab_multiple=OFFERED_MULTIPLE)
    now, then = (
        estimate(Case(model=one, cluster=job.cluster, training=training, layout=layout))
        for one in (model, padded)
    )
    gain = 1 - then.step_seconds.expected / now.step_seconds.expected
    if gain < LEAST_GAIN_FRACTION:
        return None
    return (
        f"a vocabulary of {model.vocab:,} leaves the tensor cores' fast path: with "
        f"--vocab-multiple {OFFERED_MULTIPLE}, which pads it to "
        f"{padded.vocab_rows(layout.tp):,} rows, a step of this layout is {format_percent(gain)} "
        "shorter; the padded rows never learn"
    )


def _slow_level(job: RecommendedPlan) -> str | None:
    """Where most of a step waits for the outermost level: what its domains would do apart."""
    cluster, best = job.cluster, job.best.estimate
    if cluster.nodes == 1 or len(cluster.levels) == 1:
        return None
    outer, inner_gpus = cluster.levels[-1], cluster.levels[-2].domain_gpus
    waiting = sum(c.exposed_seconds for c in best.communication if c.level == outer.name)
    domains = cluster.gpus // inner_gpus
    if waiting < WAITING_FRACTION * best.step_seconds.expected or cluster.gpus % inner_gpus:
        return None
    alone = _tokens_per_second(job, _one_domain(cluster))
    if alone is None or best.tokens_per_second >= WORTH_FRACTION * domains * alone:
        return None
    each = domain_words(cluster, inner_gpus)
    port = format_bandwidth(outer.port_bandwidth_bytes_per_second)
    return (
        f"{format_seconds(waiting)} of each {format_seconds(best.step_seconds.expected)} step wait "
        f"for the level {outer.name} ({outer.ports} x {port} for {each}): what communicates every "
        f"step, FSDP and DDP alike, cannot live across it. {each[:1].upper()}{each[1:]} alone "
        f"(--gpus {inner_gpus}) trains {format_count(alone)} tokens/s, all {domains} together "
        f"{format_count(best.tokens_per_second)}. Replicate across it by a low-communication "
        f"method such as DiLoCo, which averages every {INNER_STEPS} steps "
        f"({format_seconds(_average_seconds(job, domains))} each) and is not part of fsdpplan, or "
        "train apart"
    )


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


def _one_domain(cluster: Cluster) -> Cluster:
    gpus = cluster.levels[-2].domain_gpus
    return replace(
        cluster,
        gpus=gpus,
        gpus_per_node=min(gpus, cluster.gpus_per_node),
        levels=cluster.levels[:-1],
        weak=tuple(spot for spot in cluster.weak if spot.level != cluster.levels[-1].name),
    )


def _average_seconds(job: RecommendedPlan, domains: int) -> float:
    """An all-reduce of fp32 parameters between domains, each GPU of a domain with its share."""
    inner_gpus = job.cluster.gpus // domains
    placement = group_placement(cluster=job.cluster, ranks=domains, stride=inner_gpus)
    shard_bytes = 4 * parameter_count(job.model) / inner_gpus
    return collective_seconds(
        collective="all_reduce", gathered_bytes=shard_bytes, placement=placement
    )


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
