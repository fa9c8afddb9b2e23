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
    note: str
    """The same in a few words, for a row of a table that has the times beside it."""


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
        if entry is self.order.fastest or any(entry is tied for tied in self.order.tied):
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
            fastest_of_all = "the fastest of all that fit"
            return Reason(quantity="seconds", words=fastest_of_all, note="the fastest")
        quantity = self._decided_by(first, fastest)
        preferred = comparison(quantity, better=first, worse=fastest, cluster=self.cluster).gain
        words = (
            f"{self.behind(first):.1%} slower than the fastest (rank {self.fastest_rank}), a tie "
            f"within the {self.error(first):.1%} error of the comparison. Preferred because it "
            f"{preferred}"
        )
        return Reason(quantity=quantity, words=words, note=preferred)

    def _not_apart(self, entry: Entry) -> Reason:
        quantity = self._decided_by(entry, self.first)
        compared = comparison(quantity, better=self.first, worse=entry, cluster=self.cluster)
        lost, short = compared.loss, compared.short or compared.loss.removeprefix("it ")
        if entry is self.order.fastest:
            words, note = f"the fastest; {lost}", f"the fastest; {short}"
            return Reason(quantity=quantity, words=words, note=note)
        words = f"{self._share(entry)}, a tie; {lost}"
        return Reason(quantity=quantity, words=words, note=f"a tie; {short}")

    def _decided_by(self, one: Entry, other: Entry) -> str:
        return decided_by(preference(one, self.cluster), preference(other, self.cluster))

    def _apart(self, entry: Entry) -> Reason:
        term, words = slowest_term(entry, self.order.fastest)
        cause, _, _ = words.partition(" (")
        note = f"{self.behind(entry):.1%} slower: {cause}"
        return Reason(quantity=term, words=f"{self._share(entry)}: {words}", note=note)

    def _share(self, entry: Entry) -> str:
        error = self.error(entry)
        return f"{self.behind(entry):.1%} slower than the fastest (error {error:.1%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One difference of two rows: what is said of the better after "because it", and of the worse
    in a clause of its own."""

    gain: str
    loss: str
    short: str = ""
    """The loss in a row of a table; empty: its own words."""


def comparison(quantity: str, *, better: Entry, worse: Entry, cluster: Cluster) -> Comparison:
    """What `better` has before `worse` in `quantity`, the first thing in which they differ."""
    match quantity:
        case "kinds":
            spared = _without(kinds, better[0], worse[0])
            return Comparison(
                gain=f"needs no {' or '.join(spared)} parallelism",
                loss=f"it needs {' and '.join(spared)} parallelism",
            )
        case "weight":
            return _instead(
                "uses", _kinds_words(better[0], worse[0]), _kinds_words(worse[0], better[0])
            )
        case "form":
            return _instead(
                "holds", *(_form_words(form(one[0], cluster)) for one in (better, worse))
            )
        case "settings":
            more = ", ".join(_without(unusual, better[0], worse[0]))
            return Comparison(
                gain=f"has fewer unusual settings (without {more})",
                loss=f"it has more unusual settings ({more})",
                short=more,
            )
        case "is_tight":
            return _roomier(better, worse, cluster.device.memory_bytes)
        case "is_wide":
            inside = domain_words(cluster, cluster.levels[-2].domain_gpus)
            return Comparison(
                gain=f"gathers parameters inside {inside}",
                loss=f"it gathers parameters beyond {inside}",
            )
        case "seconds":
            return Comparison(
                gain="is faster and no less simple", loss="it is slower and no simpler"
            )
        case "peak_bytes":
            less = format_gib(_peak(worse) - _peak(better))
            return Comparison(gain=f"needs {less} less memory", loss=f"it needs {less} more memory")
        case _:
            same = "is as fast, as simple and as large"
            return Comparison(gain=same, loss=f"it {same}")


def _without(
    names: Callable[[Layout], tuple[str, ...]], better: Layout, worse: Layout
) -> tuple[str, ...]:
    """The things of a kind that `worse` has and `better` has not."""
    return tuple(name for name in names(worse) if name not in names(better))


def _instead(verb: str, better: str, worse: str) -> Comparison:
    return Comparison(
        gain=f"{verb} {better} in place of {worse}", loss=f"it {verb} {worse} in place of {better}"
    )


def _kinds_words(layout: Layout, other: Layout) -> str:
    return f"{' and '.join(_without(kinds, other, layout))} parallelism"


def _form_words(number: int) -> str:
    """How the state is held, in words."""
    split, is_odd = divmod(number, 2)
    return f"copies of {FORMS[split]} that fill no domain" if is_odd else FORMS[split]


def _roomier(better: Entry, worse: Entry, device_bytes: int) -> Comparison:
    free, less = (format_gib(device_bytes - _peak(entry)) for entry in (better, worse))
    return Comparison(
        gain=f"leaves more memory free ({free}, not {less})",
        loss=f"it leaves less memory free ({less}, not {free})",
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
