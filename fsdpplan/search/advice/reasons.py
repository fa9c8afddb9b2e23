"""Reasons: why a row stands where it does, made from how it differs from another row.

A row whose time is not told apart from the fastest is compared with the first of the list, in the
first thing that decided between them (`order.Preference`). A row that is told apart is compared
with the fastest, in the part of the step that makes most of the difference. So nothing is said
that is not so of the two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.search.advice.words import domain_words
from fsdpplan.search.order import (
    Difference,
    Entry,
    Ordered,
    decided_by,
    form,
    kinds,
    preference,
    seconds,
    unusual,
)
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate
from fsdpplan.units import format_gib, format_seconds

FORMS = ("whole copies", "a split optimizer", "split gradients", "shards")
"""How the state is held, by `order.SHARDINGS`."""


LEARNED = "learned"
"""What measured runs add to the parts of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one row stands where it does."""

    quantity: str
    """In what the row differs from the other: a field of `Preference`, or a part of the step."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What all reasons of one list share."""

    order: Ordered[Entry]
    fastest_rank: int
    """Where the fastest stands in the list."""
    difference: Difference
    cluster: Cluster

    @property
    def first(self) -> Entry:
        """The first of the list."""
        return self.order.tied[0]

    def of(self, entry: Entry) -> Reason:
        """Why `entry`, a row of the list, stands where it does."""
        if entry is self.first:
            return self._for_first()
        if any(entry is tied for tied in self.order.tied):
            return self._not_apart(entry)
        return self._apart(entry)

    def behind(self, entry: Entry) -> float:
        """By how much of the fastest step `entry` is slower than it: the one share on a screen."""
        return seconds(entry) / seconds(self.order.fastest) - 1

    def error(self, entry: Entry) -> float:
        """Error of the difference of `entry` and the fastest, as a share of the step."""
        return self.difference(self.order.fastest, entry)

    def _for_first(self) -> Reason:
        first, fastest = self.first, self.order.fastest
        if first is fastest:
            return Reason(quantity="seconds", words="the fastest of all that fit")
        quantity = self._decided_by(first, fastest)
        preferred = comparison(quantity, better=first, worse=fastest, cluster=self.cluster).gain
        most, error = MOST_INDISTINGUISHABLE_FRACTION, self.error(first)
        counted = f" (of which {most:.0%} count)" if error > most else ""
        words = (
            f"{self.behind(first):.1%} slower than the fastest (rank {self.fastest_rank}), a tie "
            f"within the {error:.1%} error of the comparison{counted}. Preferred for {preferred}"
        )
        return Reason(quantity=quantity, words=words)

    def _not_apart(self, entry: Entry) -> Reason:
        quantity = self._decided_by(entry, self.first)
        lost = comparison(quantity, better=self.first, worse=entry, cluster=self.cluster).loss
        if entry is self.order.fastest:
            return Reason(quantity=quantity, words=f"the fastest; {lost}")
        return Reason(quantity=quantity, words=f"{self._share(entry)}, a tie; {lost}")

    def _decided_by(self, one: Entry, other: Entry) -> str:
        return decided_by(preference(one, self.cluster), preference(other, self.cluster))

    def _apart(self, entry: Entry) -> Reason:
        term, words = slowest_term(entry, self.order.fastest)
        return Reason(quantity=term, words=f"{self._share(entry)}: {words}")

    def _share(self, entry: Entry) -> str:
        error = self.error(entry)
        return f"{self.behind(entry):.1%} slower than the fastest (error {error:.1%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One difference of two rows, as a gain of the better and as a loss of the worse."""

    gain: str
    loss: str


def comparison(quantity: str, *, better: Entry, worse: Entry, cluster: Cluster) -> Comparison:
    """What `better` has before `worse` in `quantity`, the first thing in which they differ."""
    match quantity:
        case "kinds":
            return _fewer("kinds of parallelism", kinds, better[0], worse[0])
        case "weight":
            return _instead(_kinds_words(better[0], worse[0]), _kinds_words(worse[0], better[0]))
        case "form":
            return _instead(*(_form_words(form(one[0], cluster)) for one in (better, worse)))
        case "settings":
            return _fewer("unusual settings", unusual, better[0], worse[0])
        case "is_tight":
            return _roomier(better, worse, cluster.device.memory_bytes)
        case "is_wide":
            inside = domain_words(cluster, cluster.levels[-2].domain_gpus)
            return Comparison(
                gain=f"gathers that stay inside {inside}",
                loss=f"gathers that leave {inside}",
            )
        case "seconds":
            return Comparison(gain="faster and no less simple", loss="slower and no simpler")
        case "peak_bytes":
            less = format_gib(_peak(worse) - _peak(better))
            return Comparison(gain=f"{less} less memory", loss=f"{less} more memory")
        case _:
            same = "as fast, as simple and as large"
            return Comparison(gain=same, loss=same)


def _fewer(
    what: str, names: Callable[[Layout], tuple[str, ...]], better: Layout, worse: Layout
) -> Comparison:
    """Fewer things of a kind, and which of them the better one does without."""
    spared = ", ".join(name for name in names(worse) if name not in names(better))
    return Comparison(gain=f"fewer {what} (without {spared})", loss=f"more {what} ({spared})")


def _instead(better: str, worse: str) -> Comparison:
    return Comparison(gain=f"{better} in place of {worse}", loss=f"{worse} in place of {better}")


def _kinds_words(layout: Layout, other: Layout) -> str:
    own = [kind for kind in kinds(layout) if kind not in kinds(other)]
    return f"{' and '.join(own)} parallelism"


def _form_words(number: int) -> str:
    """How the state is held, in words."""
    split, is_odd = divmod(number, 2)
    return f"copies of {FORMS[split]} that fill no domain" if is_odd else FORMS[split]


def _roomier(better: Entry, worse: Entry, device_bytes: int) -> Comparison:
    free, less = (format_gib(device_bytes - _peak(entry)) for entry in (better, worse))
    return Comparison(
        gain=f"more head-room ({free} left free, not {less})",
        loss=f"less head-room ({less} left free, not {free})",
    )


def _peak(entry: Entry) -> int:
    return entry[1].memory.peak_device_bytes


def slowest_term(entry: Entry, other: Entry) -> tuple[str, str]:
    """The part of the step that makes most of what `entry` takes longer than `other`, in words."""
    term, more = _most_longer(_terms, entry, other)
    longer = format_seconds(more)
    match term:
        case "compute":
            return term, f"{longer} more compute{_why_compute(entry, other)}"
        case "communication":
            exposed = _part(_collectives, entry, other)
            return term, f"{longer} more communication that nothing hides{exposed}"
        case "pipeline bubble":
            return term, f"{longer} more bubble in a pipeline of {entry[0].pp} stages"
        case "optimizer":
            return term, f"{longer} more for the optimizer"
        case "host copies":
            return term, f"{longer} more of host copies that nothing hides"
        case _:
            return term, f"{longer} more by what your runs say of such layouts"


def _most_longer(
    parts: Callable[[Estimate], Mapping[str, float]], entry: Entry, other: Entry
) -> tuple[str, float]:
    """The part that takes `entry` longer than `other` by most, and by how many seconds."""
    own, others = parts(entry[1]), parts(other[1])
    longer = {part: seconds - others.get(part, 0.0) for part, seconds in own.items()}
    return max(longer.items(), key=lambda part: part[1], default=("", 0.0))


def _part(parts: Callable[[Estimate], Mapping[str, float]], entry: Entry, other: Entry) -> str:
    """The part that is longer by most, in brackets; nothing where none is."""
    part, more = _most_longer(parts, entry, other)
    return f" ({part} +{format_seconds(more)})" if more > 0 else ""


def _why_compute(entry: Entry, other: Entry) -> str:
    if _executed(entry[1]) > _executed(other[1]):
        return f" (recomputes more: {entry[0].recomputation})"
    return _part(_kernels, entry, other)


def _executed(result: Estimate) -> float:
    """FLOPs executed over useful ones, to a thousandth."""
    return round(result.hfu_fraction / result.mfu_fraction, 3)


def _terms(result: Estimate) -> dict[str, float]:
    time = result.time
    return {**time.terms, LEARNED: result.step_seconds.expected - time.total_seconds}


def _kernels(result: Estimate) -> dict[str, float]:
    """The kinds of kernels that make up compute."""
    time = result.time
    named = time.matmul_seconds + time.attention_seconds + time.launch_seconds
    return {
        "matmuls": time.matmul_seconds,
        "attention": time.attention_seconds,
        "passes too small for the host to keep up": time.launch_seconds,
        "element-wise work": time.compute_seconds - named,
    }


def _collectives(result: Estimate) -> dict[str, float]:
    """What is exposed of each collective on each axis."""
    exposed: dict[str, float] = defaultdict(float)
    for row in result.communication:
        exposed[f"{row.collective} over {row.axis}"] += row.exposed_seconds
    return exposed
