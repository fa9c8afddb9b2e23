"""Rules of the field: what those who train large models hold to, each with the number that breaks
it, where it is from, and what obeying it brings.

    broken_rules(case, estimate)  # most dear first: a run at risk, then by seconds or bytes

A number is the estimate's own, or a group's place on the network. What to do instead is tried
before it is said: changes beside the layout are priced by the same model, and one that does not
gain a hundredth of a step, or does not fit, is not claimed. Those of the layout go before a larger
batch, which changes what is learned.

`recommend`, `estimate` and `explain` print them, and a plan carries them to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fsdpplan.cost.band import peak_factor
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.cost.network.placement import Group, group_placement, shard_group, tp_group
from fsdpplan.errors import SpecError
from fsdpplan.search.advice import neighbours as beside
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.search.vocabulary import OFFERED_MULTIPLE
from fsdpplan.spec.plan import BrokenRule, Case, Estimate
from fsdpplan.spec.training import DEFAULT_HEADROOM_FRACTION, program_named
from fsdpplan.units import (
    format_bandwidth,
    format_count,
    format_gb,
    format_gib,
    format_percent,
    format_seconds,
)

MOST_SHOWN = 3
"""Rules on a screen."""

_RECIPE = "FSDP training in a single datacenter, a recipe for FSDP2"
_COURSE = "EngineersOfAI, Distributed Training Strategies"
_OURS = "chosen here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as the page of rules has it."""

    name: str
    says: str
    """The rule."""
    number: str
    """What is compared."""
    limit: float
    """What it is compared with; 0 where that follows from the case."""
    limit_words: str
    where: str = ""
    """What must be so, too, for it to be said."""
    do: str
    """What to do, as it is said where nothing that was tried gains."""
    source: str
    find: Callable[[Rule, Case, Estimate], BrokenRule | None]

    def broken(
        self,
        number: float,
        says: str,
        estimate: Estimate,
        *,
        remedy: beside.Remedy | None = None,
        over_fraction: float = 0.0,
    ) -> BrokenRule:
        """The rule as it is broken. It costs what the remedy gains; without one, what is past the
        limit: `over_fraction` of the step."""
        gain = 0.0 if remedy is None else remedy.gain_fraction
        return BrokenRule(
            rule=self.name,
            what=self.number,
            number=float(number),
            limit=float(self.limit),
            says=says,
            advice=f"{self.do}; {_NOTHING}" if remedy is None else remedy.words,
            source=self.source,
            change="" if remedy is None else remedy.change,
            gain_seconds=gain * estimate.step_seconds.expected,
            cost_fraction=gain or over_fraction,
        )


_NOTHING = (
    "no faster layout was found beside this one. Not tried: another precision or optimizer, more "
    "GPUs, several changes at once"
)


def broken_rules(case: Case, estimate: Estimate) -> tuple[BrokenRule, ...]:
    """The rules that a legal layout breaks: what puts the run at risk, then by what they cost."""
    found = (rule.find(rule, case, estimate) for rule in RULES)
    broken = [one for one in found if one is not None]
    return tuple(sorted(broken, key=lambda one: (not one.risks_run, -one.cost_fraction)))


def shown(broken: Iterable[BrokenRule]) -> tuple[BrokenRule, ...]:
    """Those for a screen: the dearest, and of several with the same remedy the first."""
    chosen: list[BrokenRule] = []
    for one in broken:
        if not one.change or all(one.change != other.change for other in chosen):
            chosen.append(one)
    return tuple(chosen[:MOST_SHOWN])


def _exposed(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    time = estimate.time
    share = time.exposed_communication_seconds / time.total_seconds
    if share <= rule.limit:
        return None
    remedy = beside.best(
        case,
        estimate,
        (
            *beside.shards_inside(case),
            *beside.partly_resharded(case),
            *beside.policies(case),
            beside.on_the_other_side(case),
            *beside.micro_batches(case, larger=True),
            *beside.narrower(case, most=case.cluster.levels[0].domain_gpus),
            beside.whole_copies(case),
        ),
        beside.larger_batches(case),
    )
    row = max(estimate.communication, key=lambda row: row.exposed_seconds, default=None)
    most = ""
    if row is not None:
        is_most = 2 * row.exposed_seconds > time.exposed_communication_seconds
        part = "most of it" if is_most else "the largest part"
        most = f", {part} for {row.collective} over {row.axis} by {row.level}"
    if row is not None and not row.axis.startswith("dp_"):  # no gradients
        rule = replace(rule, do="look at the network")
    return rule.broken(
        share,
        f"{format_percent(share)} of the step waits for communication{most}: more than "
        f"{rule.limit_words}",
        estimate,
        remedy=remedy,
        over_fraction=(share - rule.limit) / (1 - rule.limit),
    )


def _bubble_fraction(estimate: Estimate) -> float:
    return estimate.time.bubble_seconds / estimate.time.total_seconds


def _of_pipeline(case: Case, estimate: Estimate) -> beside.Remedy | None:
    return beside.best(
        case,
        estimate,
        (
            *beside.micro_batches(case, larger=False),
            *beside.interleaved(case),
            *beside.shorter_pipelines(case),
        ),
        beside.larger_batches(case),
    )


def _bubble(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    share = _bubble_fraction(estimate)
    if share <= rule.limit:
        return None
    return rule.broken(
        share,
        f"{format_percent(share)} of the step is pipeline bubble, more than {rule.limit_words}",
        estimate,
        remedy=_of_pipeline(case, estimate),
        over_fraction=(share - rule.limit) / (1 - rule.limit),
    )


LEAST_BUBBLE_FRACTION = 0.1
"""Of the step, chosen here."""


def _few_micro_batches(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    layout, share = case.layout, _bubble_fraction(estimate)
    each = layout.num_microbatches / layout.pp
    if layout.pp == 1 or each >= rule.limit or share <= LEAST_BUBBLE_FRACTION:
        return None
    return rule.broken(
        each,
        f"{layout.num_microbatches} micro-batches for {layout.pp} stages are {each:.3g} a stage, "
        f"fewer than {rule.limit_words}, and {format_percent(share)} of the step is bubble",
        estimate,
        remedy=_of_pipeline(case, estimate),
    )


def _islands(case: Case, group: Group) -> int:
    """Domains of the innermost level that one group touches at the most."""
    placed = group_placement(cluster=case.cluster, ranks=group.ranks, stride=group.stride)
    return placed.levels[0].domains if placed.levels else 1


def _island_words(case: Case) -> str:
    level = case.cluster.levels[0]
    return f"{level.domain_gpus} GPUs ({level.name})"


def _exposed_across(case: Case, estimate: Estimate, axis: str) -> float:
    """Share of the step that waits for collectives of `axis` beyond the innermost level."""
    inner = case.cluster.levels[0].name
    waiting = sum(
        row.exposed_seconds
        for row in estimate.communication
        if row.level != inner and axis in row.axis.replace("/", "*").split("*")
    )
    return waiting / estimate.time.total_seconds


LEAST_WAIT_FRACTION = 0.05
"""Of the step, chosen here."""


def _shards_across(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    layout = case.layout
    if layout.sharding != "fsdp" or layout.shard_ranks == 1:
        return None
    islands = _islands(case, shard_group(layout))
    share = _exposed_across(case, estimate, "dp_shard")
    if islands <= rule.limit or share <= LEAST_WAIT_FRACTION:
        return None
    remedy = beside.best(
        case,
        estimate,
        (
            *beside.shards_inside(case),
            *beside.partly_resharded(case),
            *beside.micro_batches(case, larger=True),
            beside.whole_copies(case),
        ),
    )
    return rule.broken(
        islands,
        f"a shard group of {layout.shard_ranks} ranks lies across {islands} islands of "
        f"{_island_words(case)}, and {format_percent(share)} of the step waits for it there",
        estimate,
        remedy=remedy,
    )


def _uneven(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    layout, island = case.layout, case.cluster.levels[0].domain_gpus
    span = layout.shard_ranks * layout.tp
    if layout.sharding == "ddp" or layout.shard_ranks == 1 or case.cluster.gpus <= island:
        return None
    left = beside.left_over(span, island)
    if left <= rule.limit:
        return None
    return rule.broken(
        left,
        f"a shard group spans {span} GPUs and an island has {_island_words(case)}, which leaves "
        f"{left} over: some groups lie across two",
        estimate,
        remedy=beside.best(case, estimate, beside.evenly_sharded(case)),
    )


def _tp_across(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    layout = case.layout
    islands = _islands(case, tp_group(layout)) if layout.tp > 1 else 1
    if islands <= rule.limit:
        return None
    most = case.cluster.levels[0].domain_gpus
    return rule.broken(
        islands,
        f"tensor parallelism over {layout.tp} ranks lies across {islands} islands of "
        f"{_island_words(case)}, and each block waits for the links between them",
        estimate,
        remedy=beside.best(case, estimate, beside.narrower(case, most=most)),
    )


def _rounded_sums(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    training, layout = case.training, case.layout
    ranks, steps = layout.dp_replicate * layout.shard_ranks, training.steps
    if training.reduce_dtype != "bf16" or ranks == 1 or steps is None or steps < rule.limit:
        return None
    says = (
        f"gradients are summed over {ranks} ranks in bf16, 8 bits of mantissa, in each of "
        f"{steps:,} steps, and small ones are rounded away"
    )
    try:
        full = replace(training, reduce_dtype="fp32", gradient_compression="none")
        other = replace(case, training=full)
        is_legal = legal_layout_problem(other) is None and beside.fits(other, case, estimate)
    except SpecError:
        is_legal = False
    if not is_legal:
        return replace(rule.broken(steps, says, estimate), advice=_COMPARE, risks_run=True)
    longer = beside.seconds(other) / estimate.time.total_seconds - 1
    price = f"{format_percent(longer)} of a step" if longer >= 0.0005 else "nothing that counts"
    change = beside.typed_change(case, other)
    return replace(
        rule.broken(steps, says, estimate),
        advice=f"{change} costs {price}; or {_COMPARE}",
        change=change,
        risks_run=True,
    )


_COMPARE = "compare the losses of both over a thousand steps first"


def _used_fraction(case: Case, peak_device_bytes: float) -> float:
    device = case.cluster.device
    return peak_factor(device) * peak_device_bytes / device.memory_bytes


def _headroom(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    peak = estimate.memory.peak_device_bytes
    used = _used_fraction(case, peak)
    if not case.on_cuda or used <= rule.limit:
        return None
    leaner: list[tuple[float, int, Case]] = []
    for other in dict.fromkeys(
        one for one in beside.leaner(case) if one is not None and one != case
    ):
        if legal_layout_problem(other) is None:
            needed = rank_memory(other).peak_device_bytes
            if _used_fraction(other, needed) <= rule.limit:
                leaner.append((beside.seconds(other), needed, other))
    spare = round((used - rule.limit) * case.cluster.device.memory_bytes)
    do, change, gained = f"{rule.do}; no leaner layout of the same ranks was found", "", 0
    if leaner:
        seconds, needed, other = min(leaner, key=lambda one: one[0])
        change, gained = beside.typed_change(case, other), peak - needed
        more = seconds / estimate.time.total_seconds - 1
        do = f"{change} needs {format_gib(gained)} less, and a step is {_by(more)}"
    return replace(
        rule.broken(
            used,
            f"the peak takes {format_percent(used)} of the device memory, {format_gib(spare)} "
            f"more than {rule.limit_words}",
            estimate,
        ),
        advice=do,
        change=change,
        gain_bytes=gained,
        cost_fraction=used - rule.limit,
        risks_run=True,
    )


def _by(more: float) -> str:
    if abs(more) < 0.0005:
        return "as long"
    return f"{format_percent(abs(more))} {'longer' if more > 0 else 'shorter'}"


LEAST_IDLE_FRACTION = 0.1
"""Of the step, chosen here."""


def hiding_tokens(case: Case) -> float:
    """Tokens a GPU and step from which FSDP over all GPUs hides its gathers in bf16 behind forward.

        t = peak FLOP/s / bus bandwidth of a ring over all

    A token costs 2 FLOPs a parameter, which is gathered in 2 bytes. Assumes away latency, what
    matmuls miss of the peak, and experts. Source: "How to Scale Your Model", Training.
    """
    cluster = case.cluster
    ring = group_placement(cluster=cluster, ranks=cluster.gpus, stride=1)
    peak = cluster.device.peak_flops_per_second(case.training.precision)
    return peak / ring.bandwidth_bytes_per_second


def _small_batch(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    each, least = case.training.tokens_per_step / case.cluster.gpus, hiding_tokens(case)
    time = estimate.time
    idle = (time.exposed_communication_seconds + time.bubble_seconds) / time.total_seconds
    if each >= least or idle <= LEAST_IDLE_FRACTION or not case.on_cuda:
        return None
    found = rule.broken(
        each,
        f"{case.training.global_batch:,} sequences a step are {each:,.0f} tokens for each of "
        f"{case.cluster.gpus:,} GPUs, fewer than the {least:,.0f} behind which gathers hide, and "
        f"{format_percent(idle)} of the step waits",
        estimate,
        remedy=beside.best(case, estimate, beside.larger_batches(case)),
    )
    return replace(found, limit=least)


def _large_batch(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    tokens = case.training.tokens_per_step
    if tokens <= rule.limit:
        return None
    found = rule.broken(
        tokens,
        f"{case.training.global_batch:,} sequences are {format_count(tokens)} tokens a step, more "
        f"than {rule.limit_words}",
        estimate,
    )
    return replace(found, advice=rule.do)


def _sharded_whole(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    whole = beside.whole_copies(case)
    if whole is None or legal_layout_problem(whole) is not None:
        return None
    needed = rank_memory(whole).peak_device_bytes
    available = available_bytes(cluster=case.cluster, training=case.training)
    remedy = None if needed > available else beside.best(case, estimate, [whole])
    if remedy is None:
        return None
    found = rule.broken(
        needed,
        f"whole copies fit: {format_gib(needed)} of {format_gib(available)} that are planned with",
        estimate,
        remedy=remedy,
    )
    return replace(found, limit=float(available))


def _bucket_bytes(case: Case, estimate: Estimate) -> float:
    """What DDP reduces at once, or FSDP gathers: the mean over a step; infinite where no such
    collective leaves an island."""
    inner = case.cluster.levels[0].name
    gathers = case.layout.sharding == "fsdp"
    name, axis = ("all_gather", "dp_shard") if gathers else ("all_reduce", "dp_replicate")
    rows = [
        row
        for row in estimate.communication
        if row.collective == name and row.level != inner and row.axis.startswith(axis)
    ]
    count = sum(row.count for row in rows)
    return sum(row.bytes for row in rows) / count if count else float("inf")


def _small_buckets(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    layout = case.layout
    if layout.sharding not in ("ddp", "fsdp"):
        return None
    size = _bucket_bytes(case, estimate)
    remedy = beside.best(case, estimate, beside.larger_buckets(case)) if size < rule.limit else None
    if remedy is None:
        return None
    what = "reduced" if layout.sharding == "ddp" else "gathered"
    return rule.broken(
        size,
        f"{format_gb(round(size))} are {what} at a time between islands, less than "
        f"{rule.limit_words}",
        estimate,
        remedy=remedy,
    )


def _unaligned(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    """Where rows of logits leave the tensor cores' fast path: what a padded vocabulary would do."""
    model, training, tp = case.model, case.training, case.layout.tp
    rows = model.vocab_rows(tp) // tp
    if training.runtime != "fsdp2" or not program_named(training.program).knows_blocks:
        return None
    if rows % rule.limit == 0:
        return None
    padded = replace(case, model=replace(model, vocab_multiple=OFFERED_MULTIPLE))
    remedy = beside.best(case, estimate, [padded])
    if remedy is None:
        return None
    says = f"a vocabulary of {model.vocab:,} leaves the tensor cores' fast path"
    return replace(
        rule.broken(rows, says, estimate, remedy=remedy),
        advice=f"with {remedy.change}, which pads it to {padded.model.vocab_rows(tp):,} rows, a "
        f"step of this layout is {format_percent(remedy.gain_fraction)} shorter; the padded rows "
        "never learn",
    )


WORTH_FRACTION = 0.5
"""Of what the domains do apart, chosen here."""


def _slow_links(rule: Rule, case: Case, estimate: Estimate) -> BrokenRule | None:
    """Where most of a step waits for the outermost level: what its domains would do apart."""
    cluster = case.cluster
    if cluster.nodes == 1 or len(cluster.levels) == 1:
        return None
    outer, inner_gpus = cluster.levels[-1], cluster.levels[-2].domain_gpus
    waiting = sum(row.exposed_seconds for row in estimate.communication if row.level == outer.name)
    share = waiting / estimate.time.total_seconds
    if share <= rule.limit or cluster.gpus % inner_gpus:
        return None
    # a search, only where links are slow
    from fsdpplan.search.advice.alternatives import INNER_STEPS, apart_of, best_of_all

    apart = apart_of(case)
    if apart is None or estimate.tokens_per_second >= WORTH_FRACTION * apart.tokens_per_second:
        return None
    together = max(estimate.tokens_per_second, best_of_all(case))
    if together >= WORTH_FRACTION * apart.tokens_per_second:
        return None  # not the links are to blame, but the layout
    port = format_bandwidth(outer.port_bandwidth_bytes_per_second)
    each = "one node" if inner_gpus == cluster.gpus_per_node else f"one domain of {inner_gpus} GPUs"
    averaged = apart.step_seconds + apart.exchange_seconds / INNER_STEPS
    gain = 1 - together * averaged / (apart.domains * apart.batch * case.training.seq_len)
    steps = f"{apart.hiding_steps:,} inner step{'s' if apart.hiding_steps > 1 else ''}"
    found = rule.broken(
        share,
        f"{format_percent(share)} of the step waits for the level {outer.name} ({outer.ports} x "
        f"{port} for {each}): what communicates every step, FSDP and DDP alike, cannot live "
        "across it",
        estimate,
    )
    return replace(
        found,
        advice=f"{each[:1].upper()}{each[1:]} alone (--gpus {inner_gpus} --global-batch "
        f"{apart.batch}) trains {format_count(apart.tokens_per_second / apart.domains)} tokens/s, "
        f"all {apart.domains} together {format_count(together)}. Replicate across it by a "
        "low-communication method such as DiLoCo, which is not part of fsdpplan: an average takes "
        f"{format_seconds(apart.exchange_seconds)}, which {steps} of "
        f"{format_seconds(apart.step_seconds)} hide, and one every {INNER_STEPS} steps costs "
        f"{format_percent(1 - apart.step_seconds / averaged)} where it is not hidden; or train "
        "apart",
        gain_seconds=gain * case.training.tokens_per_step / together,
        cost_fraction=gain,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="exposed-communication",
        says="Communication that nothing hides takes no more than 30 % of the step.",
        number="exposed communication over the step",
        limit=0.3,
        limit_words="30 %",
        do="look at the network, or reduce gradients less often",
        source=f"{_COURSE}: all-reduce of more than 30 % of the step",
        find=_exposed,
    ),
    Rule(
        name="pipeline-bubble",
        says="The bubble of a pipeline takes no more than 20 % of the step.",
        number="bubble over the step",
        limit=0.2,
        limit_words="20 %",
        do="give the pipeline more micro-batches or fewer stages",
        source=f"{_COURSE}: micro-batches enough for a bubble below 20 %",
        find=_bubble,
    ),
    Rule(
        name="few-micro-batches",
        says="A pipeline has at least 4 micro-batches a stage.",
        number="micro-batches over stages",
        limit=4,
        limit_words="4",
        where=f"the bubble is over {LEAST_BUBBLE_FRACTION:.0%} of the step ({_OURS}): interleaved "
        "and zero-bubble schedules do with fewer",
        do="give the pipeline more micro-batches or fewer stages",
        source=f"{_COURSE}: k >= 4p",
        find=_few_micro_batches,
    ),
    Rule(
        name="shards-across-islands",
        says="Parameters are sharded inside an island of the fastest links, and replicated "
        "between.",
        number="islands that a shard group lies across",
        limit=1,
        limit_words="1",
        where=f"over {LEAST_WAIT_FRACTION:.0%} of the step waits for it there ({_OURS}): gathers "
        "that computing hides break nothing",
        do="shard inside an island, by --dp-shard, or gather from part of the group, by "
        "--reshard-after-forward",
        source=f"{_RECIPE}: naive 1-D FSDP across nodes; shard dim mismatched to the NVLink domain",
        find=_shards_across,
    ),
    Rule(
        name="uneven-shard-group",
        says="A shard group fills an even part of an island, or whole islands.",
        number="GPUs left over where groups and islands are cut into each other",
        limit=0,
        limit_words="0",
        do="take a --dp-shard that divides the island, or is a multiple of it",
        source=f"{_RECIPE}: match the inner shard dim to the NVLink group",
        find=_uneven,
    ),
    Rule(
        name="tensor-parallel-across",
        says="Tensor parallelism stays inside an island of the fastest links.",
        number="islands that a tensor-parallel group lies across",
        limit=1,
        limit_words="1",
        do="take a --tp that divides the GPUs of an island",
        source=f"{_COURSE}: tensor parallel within a node (NVLink domain)",
        find=_tp_across,
    ),
    Rule(
        name="bf16-reduction",
        says="Long runs reduce gradients in fp32.",
        number="steps with bf16 sums over several ranks",
        limit=1000,
        limit_words="1,000 steps",
        where="the run's tokens are said (--tokens)",
        do=_COMPARE,
        source=f"{_RECIPE}: reduce_dtype=bf16 can diverge on long runs; what is long is {_OURS}",
        find=_rounded_sums,
    ),
    Rule(
        name="head-room",
        says=f"At least {100 * DEFAULT_HEADROOM_FRACTION:g} % of the device memory stay free.",
        number="peak over device memory, as measured runs say where there are some",
        limit=1 - DEFAULT_HEADROOM_FRACTION,
        limit_words=f"{100 * (1 - DEFAULT_HEADROOM_FRACTION):g} %",
        do="use smaller micro-batches, more recomputation or more GPUs",
        source=f"the default of --headroom, {_OURS}; {_RECIPE}: no OOM headroom warnings",
        find=_headroom,
    ),
    Rule(
        name="small-batch",
        says="The batch has tokens enough for each GPU to hide what data parallelism gathers.",
        number="tokens a GPU and step",
        limit=0,
        limit_words="peak FLOP/s over the bus bandwidth of a ring over all GPUs",
        where=f"over {LEAST_IDLE_FRACTION:.0%} of the step waits for communication or a bubble "
        f"({_OURS})",
        do="use a larger --global-batch or fewer GPUs",
        source="How to Scale Your Model, Training: FSDP is bound by communication below it",
        find=_small_batch,
    ),
    Rule(
        name="large-batch",
        says="A step takes no more tokens than published runs were trained with.",
        number="tokens a step",
        limit=2**26,
        limit_words="67 M, past the 63 M of DeepSeek-V3",
        do="use a smaller --global-batch: more tokens a step are fewer updates",
        source="DeepSeek-V3 Technical Report (arXiv 2412.19437), 4.2: 15,360 sequences of 4,096",
        find=_large_batch,
    ),
    Rule(
        name="sharded-although-whole",
        says="What fits whole is not sharded.",
        number="peak of whole copies",
        limit=0,
        limit_words="the memory that is planned with",
        where=f"whole copies are at least {beside.CLAIMED_FRACTION:.0%} faster",
        do="use --sharding ddp",
        source="allenai/OLMo #762: DDP before FSDP where the model fits",
        find=_sharded_whole,
    ),
    Rule(
        name="small-buckets",
        says="Over links between nodes at least 100 MB are sent at a time.",
        number="bytes of a bucket of DDP, or of a gather of FSDP",
        limit=100e6,
        limit_words="100 MB",
        where=f"larger ones are at least {beside.CLAIMED_FRACTION:.0%} faster",
        do="use a larger --ddp-bucket, or more --wrap-blocks",
        source="ApX Machine Learning, communication of FSDP: buckets of 100 MB and more over "
        "Ethernet or InfiniBand",
        find=_small_buckets,
    ),
    Rule(
        name="unaligned-vocabulary",
        says="Rows of logits are multiples of 8, on which tensor cores are fast.",
        number="rows of the head on a rank",
        limit=8,
        limit_words="a multiple of 8",
        where=f"padding gains at least {beside.CLAIMED_FRACTION:.0%}, and the program is ours",
        do=f"use --vocab-multiple {OFFERED_MULTIPLE}",
        source="the cost model's table of matmuls: rows that do not begin at multiples of 16 bytes",
        find=_unaligned,
    ),
    Rule(
        name="slow-links",
        says="What communicates every step does not cross links that most of the step waits for.",
        number="waiting for the outermost level over the step",
        limit=0.2,
        limit_words="20 %",
        where=f"all domains together train less than {WORTH_FRACTION:.0%} of what they do apart "
        f"({_OURS})",
        do="train apart, or by a low-communication method such as DiLoCo",
        source=f"DiLoCo (arXiv 2311.08105): one average every 500 steps; the 20 % are {_OURS}",
        find=_slow_links,
    ),
)
