"""Question: what is asked of a search, also of whoever has learned from measured runs, and what it
returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import erf, exp, log, pi, sqrt
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.program import vocabulary_of
from fsdpplan.spec.adapters import adapted
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Estimate, RankedLayout
from fsdpplan.spec.programs.words import Vocabulary
from fsdpplan.spec.training import Training

if TYPE_CHECKING:
    from fsdpplan.search.space import Space

ObjectiveName = Literal["throughput", "goodput", "cost", "energy", "fewest-gpus", "headroom"]
"""What is to be best (`objective.OBJECTIVES`)."""
LEAST_HEADROOM_FRACTION = 0.15
"""Share of the device's memory that a layout should leave free: predicted peaks are seldom further
off. More than this is no reason for anything."""

LEAST_GAIN_FRACTION = 0.002
"""A run that is expected to spare less of every step is not worth its time."""


class Learner(Protocol):
    """A posterior over step times."""

    def corrected(self, layout: Layout, estimate: Estimate) -> Estimate:
        """The cost model's estimate as the runs say."""

    def difference_fraction(
        self, one: tuple[Layout, Estimate], other: tuple[Layout, Estimate]
    ) -> float:
        """80 % half-width of the ratio of two step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """The listed layout that is most worth running beside the first."""

    rank: int
    chance: float
    """That it is faster than the first, 0..1."""
    expected_gain_fraction: float
    """What is spared of every step, on average over what its run may show: nothing where it turns
    out to be slower, since the first is kept then."""


def expected_gain(*, behind_log: float, deviation: float) -> float:
    """Mean of max(0, d) of a normal d with mean -`behind_log`: what a look at it may bring.

    Source: expected improvement, Jones, Schonlau and Welch 1998, *Efficient Global Optimization*,
    equation 15.
    """
    if deviation <= 0:
        return max(0.0, -behind_log)
    z = -behind_log / deviation
    density = exp(-(z**2) / 2) / sqrt(2 * pi)
    return deviation * (density + z * _below(z))


def next_run(listed: list[tuple[int, float, float]], first_seconds: float) -> NextRun | None:
    """The best of (rank, expected seconds, error of its difference from the first, an 80 %
    half-width); None where none may spare enough."""
    found = []
    for rank, seconds, error in listed:
        behind, deviation = log(seconds / first_seconds), log(1 + error) / NORMAL_80
        found.append(
            NextRun(
                rank=rank,
                chance=_below(-behind / deviation) if deviation > 0 else float(behind < 0),
                expected_gain_fraction=expected_gain(behind_log=behind, deviation=deviation),
            )
        )
    best = max(found, key=lambda one: one.expected_gain_fraction, default=None)
    return best if best and best.expected_gain_fraction >= LEAST_GAIN_FRACTION else None


def _below(z: float) -> float:
    """Share of a normal distribution below `z` standard deviations."""
    return (1 + erf(z / sqrt(2))) / 2


CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "op", "full")
"""In the order of growing recomputation and shrinking memory."""


def _said(vocabulary: Vocabulary) -> tuple[ActivationCheckpointing, ...]:
    """What a program of others can recompute, growing."""
    said = vocabulary.words["activation_checkpointing"].values
    return tuple(mode for mode in get_args(ActivationCheckpointing) if said is None or mode in said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: the inputs of the search."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins
    learner: Learner | None = None
    """What measured runs say; None: nothing."""
    least_factor: float = 1.0
    """Least step time over the cost model's that `learner` is taken to say of any layout."""
    most_bytes: int | None = None
    """The highest peak that is planned with; None: by head-room and chance to fit."""

    def __post_init__(self) -> None:
        training = self.training
        if training.adapters is not None or type(self.model) is not Model:
            model = adapted(self.model, training.adapters, training.activation_dtype)
            object.__setattr__(self, "model", model)

    def case(self, layout: Layout) -> Case:
        """With one answer to it."""
        return Case(model=self.model, cluster=self.cluster, training=self.training, layout=layout)

    @property
    def phases(self) -> tuple[tuple[float, Question], ...]:
        """(share of the steps, what is asked of them) of each part of the run."""
        return tuple((share, replace(self, training=each)) for share, each in self.training.phases)

    @property
    def available_bytes(self) -> int:
        """The highest peak that is planned with."""
        if self.most_bytes is not None:
            return self.most_bytes
        return available_bytes(cluster=self.cluster, training=self.training)

    @property
    def modes(self) -> tuple[ActivationCheckpointing, ...]:
        """What backward may recompute, growing."""
        pinned = self.pins.activation_checkpointing
        if pinned:
            return (pinned,)
        is_some = self.pins.checkpoint_blocks not in (None, "all")
        vocabulary = vocabulary_of(self.training.program)
        modes = CHECKPOINTING if vocabulary is None else _said(vocabulary)
        return modes[1:] if is_some else modes

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled: on GPUs, unless the user or the schedule says no."""
        if self.pins.compile is not None:
            return self.pins.compile
        is_split = self.pins.schedule in SPLIT_BACKWARD_SCHEDULES
        return self.cluster.device.kind == "cuda" and not is_split


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """The layout that comes closest to fitting when none does."""

    layout: Layout
    needed_bytes: int
    """Device memory it needs, head-room not included."""
    available_bytes: int
    """The highest peak that is planned with, by head-room and chance to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A layout that is faster than all that are sure enough to fit, and less sure by little."""

    layout: Layout
    estimate: Estimate
    faster_fraction: float
    """Tokens a second more than the fastest that is sure enough, as a share of its."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The ranked list; all of it empty when nothing fits."""

    ranked: tuple[RankedLayout, ...] = ()
    """The best first: of all that are not told apart from the fastest, the one that an expert would
    try first (`order.Preference`). The fastest is among them."""
    tied: tuple[int, ...] = ()
    """Ranks of those beside the first that are not told apart from the fastest."""
    fastest_rank: int | None = None
    """Rank of the least expected step time of all that fits."""
    errors: tuple[float, ...] = ()
    """For each rank, the error of its difference from the fastest, as a share of the step."""
    notes: tuple[str, ...] = ()
    """Each row's reason in a few words."""
    next_run: NextRun | None = None
    """The row that is most worth running beside the first; None where no runs are known, or none
    is worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Ranked layouts and what was seen on the way."""

    listed: Listed
    """What is best, and why."""
    candidates: int
    """Layouts considered, legal or not."""
    feasible: int
    """Layouts that are legal and were found to fit."""
    priced: int
    """Layouts whose step was predicted."""
    pruned: int
    """Layouts that a lower bound of their step left out before it was looked whether they fit."""
    rejected: tuple[tuple[str, int], ...]
    """(reason, number of layouts), largest first."""
    nearest_miss: NearestMiss | None
    """Set when nothing fits."""
    example: str | None = None
    """An illegal layout of the commonest kind: what is wrong with it, and what would be right."""
    explored: tuple[tuple[Layout, Estimate], ...] = field(default=(), repr=False)
    """All layouts whose step was predicted, those too that are not listed."""
    space: Space = field(repr=False, compare=False)
    """The layouts that were looked at, for who looks at them again with other memory."""

    @property
    def ranked(self) -> tuple[RankedLayout, ...]:
        """The ranked layouts, the best first."""
        return self.listed.ranked

    @property
    def fastest(self) -> RankedLayout | None:
        """The fastest of all that fits; None when nothing does."""
        rank = self.listed.fastest_rank
        return None if rank is None else self.listed.ranked[rank - 1]

    @property
    def fastest_seconds(self) -> float | None:
        """Its expected step."""
        return None if self.fastest is None else self.fastest.estimate.step_seconds.expected

    def behind_fastest(self, ranked: RankedLayout) -> float:
        """By how much of the fastest step `ranked`, one of the list, is slower than it."""
        assert self.fastest_seconds is not None
        return ranked.estimate.step_seconds.expected / self.fastest_seconds - 1
