"""Difference: two predicted steps side by side, term by term, and whether they can be told apart.

The terms of a step add up to it, and those of memory to the peak of the fullest device, so that the
differences of the terms add up to the difference of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import exp

from fsdpplan.cost.band import NORMAL_80, Step, faster_chance, ratio_log_error
from fsdpplan.errors import SpecError
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, CollectiveCost, Estimate
from fsdpplan.spec.training import Training

TOLD_APART_CHANCE = 0.9
"""A step is told apart from another where it is the faster with this chance: where the 80 % band of
their ratio lies on one side of 1."""

LEAST_SECONDS = 1e-12
"""Of a step's remainder: less is what rounding leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of two wholes."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """What it adds to the difference of the wholes."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of two priced layouts, which may be of two questions."""

    time: tuple[Term, ...]
    """Seconds of a step; they add up to the expected steps."""
    memory: tuple[Term, ...]
    """Bytes of the fullest device; they add up to the predicted peaks."""
    ratio: float
    """Time of a token after over that before: below 1 is faster."""
    error_fraction: float
    """80 % half-width of that ratio."""
    faster_chance: float
    """That the second takes less time for a token than the first."""

    @property
    def told_apart(self) -> bool:
        """Whether the model can tell which is the faster."""
        chance = max(self.faster_chance, 1 - self.faster_chance)
        return self.ratio != 1 and chance >= TOLD_APART_CHANCE

    @property
    def ratio_band(self) -> tuple[float, float]:
        """80 % band of the ratio."""
        return self.ratio / (1 + self.error_fraction), self.ratio * (1 + self.error_fraction)

    @property
    def first(self) -> Term:
        """The part of the step that changes most."""
        return max(self.time, key=lambda term: abs(term.change))


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout of a question, and its prediction."""

    case: Case
    estimate: Estimate
    price_per_gpu_hour: float | None = None
    """In dollars; None: not said."""

    @property
    def step(self) -> Step:
        """What the error of its time hangs on."""
        return Step(time=self.estimate.time, cluster=self.case.cluster, training=self.case.training)

    @property
    def token_seconds(self) -> float:
        """Of all devices together, for one token."""
        return self.estimate.step_seconds.expected / self.case.training.tokens_per_step

    def seconds_for(self, tokens: int) -> float:
        """Of whole steps, for so many tokens."""
        return self.case.training.steps_for(tokens) * self.estimate.step_seconds.expected

    def gpu_seconds_for(self, tokens: int) -> float:
        """Of all devices, one after another."""
        return self.seconds_for(tokens) * self.case.cluster.gpus

    def gpu_hours_for(self, tokens: int) -> float:
        """The same in the unit that is paid for."""
        return self.gpu_seconds_for(tokens) / 3600

    def cost_for(self, tokens: int) -> float | None:
        """The same in dollars; None: the price of a GPU hour was not said."""
        price = self.price_per_gpu_hour
        return None if price is None else self.gpu_hours_for(tokens) * price


def difference(before: Priced, after: Priced) -> Difference:
    """From one to the other."""
    ratio = after.token_seconds / before.token_seconds
    log_error = ratio_log_error(before.step, after.step)
    return Difference(
        time=_terms(step_terms(before.estimate), step_terms(after.estimate)),
        memory=_terms(memory_terms(before.estimate), memory_terms(after.estimate)),
        ratio=ratio,
        error_fraction=exp(NORMAL_80 * log_error) - 1,
        faster_chance=faster_chance(ratio=ratio, log_error=log_error),
    )


def _terms(before: dict[str, float], after: dict[str, float]) -> tuple[Term, ...]:
    """The parts of both, in the order of the first and then of the second."""
    names = dict.fromkeys((*before, *after))
    return tuple(
        Term(name=name, before=before.get(name, 0), after=after.get(name, 0)) for name in names
    )


def by_axis(cost: CollectiveCost) -> str:
    """`exposed dp_shard`: all collectives of a mesh axis as one term."""
    return f"exposed {cost.axis}"


def by_collective(cost: CollectiveCost) -> str:
    """`exposed all_gather over dp_shard (infiniband)`: each collective of a group by itself."""
    return f"exposed {cost.collective} over {cost.axis} ({cost.level})"


def step_terms(
    estimate: Estimate, named: Callable[[CollectiveCost], str] = by_axis
) -> dict[str, float]:
    """Seconds of the parts of a step; they add up to its expected time, which measured runs may
    have moved."""
    time = estimate.time
    kernels = time.matmul_seconds + time.attention_seconds + time.launch_seconds
    parts = {
        "matmuls": time.matmul_seconds,
        "attention": time.attention_seconds,
        "waits for the host": time.launch_seconds,
        "other kernels": time.compute_seconds - kernels,
        **_exposed(estimate.communication, time.exposed_communication_seconds, named),
        "pipeline bubble": time.bubble_seconds,
        "optimizer": time.optimizer_seconds,
        "host copies": time.host_seconds,
        "your runs": estimate.step_seconds.expected - time.total_seconds,
    }
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > LEAST_SECONDS}


def _exposed(
    costs: tuple[CollectiveCost, ...],
    exposed_seconds: float,
    named: Callable[[CollectiveCost], str],
) -> dict[str, float]:
    """Exposed communication by name, and what no collective of this rank accounts for."""
    terms: dict[str, float] = {}
    for cost in costs:
        name = named(cost)
        terms[name] = terms.get(name, 0.0) + cost.exposed_seconds
    return {**terms, "exposed, other": exposed_seconds - sum(terms.values())}


def lost_and_won(before: Priced, after: Priced) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """In which terms `after` loses time for the same tokens, and in which it wins some, each the
    largest first. Of a step of `before`: they add up to what that step would take `after` it."""
    scale = before.case.training.tokens_per_step / after.case.training.tokens_per_step
    then = step_terms(after.estimate, by_collective)
    terms = _terms(
        step_terms(before.estimate, by_collective),
        {name: scale * seconds for name, seconds in then.items()},
    )
    ordered = sorted(terms, key=lambda term: -abs(term.change))
    lost = tuple(term for term in ordered if term.change > LEAST_SECONDS)
    return lost, tuple(term for term in ordered if term.change < -LEAST_SECONDS)


def memory_terms(estimate: Estimate) -> dict[str, float]:
    """Bytes of the parts of the fullest device's peak."""
    return {name: float(size) for name, size in estimate.memory.terms.items() if size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A layout under other inputs, or why it cannot be kept."""

    layout: Layout | None = None
    problem: str = ""


def kept_layout(before: Case, question: Case) -> Kept:
    """The layout of `before` for the inputs of `question`, whose own layout is not looked at.

    Its policies, and its tensor-, context-, pipeline- and expert-parallel degrees stay. What GPUs
    come or go, data parallelism takes: more or fewer whole copies where it has several, or keeps
    whole ones, else as many more shards. The batch is kept by more or fewer forward passes.
    """
    layout, gpus = before.layout, question.cluster.gpus
    inner = layout.pp * layout.cp * layout.tp
    ranks, left = divmod(gpus, inner)
    if left:
        return Kept(problem=f"its pp x cp x tp = {inner} does not divide {gpus} GPUs")
    try:
        spread = _spread(layout, ranks)
    except SpecError as error:  # no such layout: experts that do not divide the shards
        return Kept(problem=str(error))
    if spread is None:
        return Kept(
            problem=f"its copies of {layout.dp_shard * inner} ranks do not fill {gpus} GPUs evenly"
        )
    whole = ranks * layout.micro_batch
    if question.training.global_batch % whole:
        return Kept(
            problem=f"a global batch of {question.training.global_batch} sequences does not split "
            f"over its {ranks} data-parallel ranks x micro-batch {layout.micro_batch}"
        )
    same_blocks = before.model.layers == question.model.layers
    kept = replace(
        spread,
        num_microbatches=question.training.global_batch // whole,
        stage_blocks=layout.stage_blocks if same_blocks else (),
    )
    problem = legal_layout_problem(replace(question, layout=kept))
    return Kept(layout=kept) if problem is None else Kept(problem=problem)


def _spread(layout: Layout, ranks: int) -> Layout | None:
    """`layout` over as many data-parallel ranks."""
    if layout.data_parallel == ranks:
        return layout
    if layout.dp_replicate == 1 and layout.dp_shard > 1:
        return replace(layout, dp_shard=ranks)
    copies, left = divmod(ranks, layout.dp_shard)
    return None if left or not copies else replace(layout, dp_replicate=copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """An input that two questions do not share."""

    name: str
    before: object
    after: object


def changed_inputs(before: Case, after: Case) -> tuple[Changed, ...]:
    """Which inputs of two questions differ, as they were asked and not what follows from them."""
    found = [
        Changed(name="model", before=before.model.name, after=after.model.name),
        Changed(name="hardware", before=before.cluster.name, after=after.cluster.name),
        Changed(name="device", before=before.cluster.device.name, after=after.cluster.device.name),
        Changed(name="gpus", before=before.cluster.gpus, after=after.cluster.gpus),
        Changed(
            name="gpus_per_node",
            before=before.cluster.gpus_per_node,
            after=after.cluster.gpus_per_node,
        ),
        *_changed_links(before, after),
        *(
            Changed(
                name=field.name,
                before=getattr(before.training, field.name),
                after=getattr(after.training, field.name),
            )
            for field in fields(Training)
        ),
    ]
    named = tuple(one for one in found if one.before != one.after)
    if before.model != after.model and before.model.name == after.model.name:
        return (Changed(name="model", before="its shape", after="another shape"), *named)
    return named


def _changed_links(before: Case, after: Case) -> list[Changed]:
    """Bandwidth of each level that both have, a GPU and one direction where its ports are so."""
    if before.cluster.name != after.cluster.name:
        return []
    others = {level.name: level for level in after.cluster.levels}
    return [
        Changed(
            name=f"{level.name}_bytes_per_second",
            before=level.ports * level.port_bandwidth_bytes_per_second,
            after=others[level.name].ports * others[level.name].port_bandwidth_bytes_per_second,
        )
        for level in before.cluster.levels
        if level.name in others
    ]
