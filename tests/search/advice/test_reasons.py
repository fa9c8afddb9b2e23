"""Reasons: none is false of its two rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import difference_fraction
from fsdpplan.search.advice.reasons import FORMS, Reasons
from fsdpplan.search.order import (
    Difference,
    Entry,
    Ordered,
    form,
    in_order,
    listed,
    seconds,
    simplicity,
    unusual,
)
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.units import format_gib, format_seconds
from tests.search.entries import CLUSTER, any_entry, entry, uncertain
from tests.search.questions import Question, question

TP = {"sequence_parallel": True, "loss_parallel": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A list with the reason of each row, and what the reasons speak of."""

    rows: tuple[Entry, ...]
    words: tuple[str, ...]
    order: Ordered[Entry]
    cluster: Cluster

    @property
    def first(self) -> Entry:
        """Rank 1."""
        return self.rows[0]

    @property
    def fastest(self) -> Entry:
        """The fastest of all."""
        return self.order.fastest


def shown(
    entries: list[Entry], *, difference: Difference, cluster: Cluster = CLUSTER, limit: int = 8
) -> Shown:
    """The list of `entries` as the search makes it."""
    order = in_order(entries, difference=difference, cluster=cluster)
    assert order is not None
    rows = listed(order, limit=limit)
    reasons = Reasons(
        order=order,
        fastest_rank=1 + next(i for i, row in enumerate(rows) if row is order.fastest),
        difference=difference,
        cluster=cluster,
    )
    words = tuple(reasons.of(row).words for row in rows)
    return Shown(rows=tuple(rows), words=words, order=order, cluster=cluster)


def told(*entries: Entry, error: float = 0.025) -> list[str]:
    """The reasons of the rows that these make."""
    return list(shown(list(entries), difference=uncertain(error)).words)


def test_the_fastest_says_so() -> None:
    assert told(entry()) == ["the fastest of all that fit"]


def test_a_first_that_is_behind_says_by_how_much_of_what_error_and_what_it_has() -> None:
    fast = entry(compute=10, dp_shard=8, tp=2, **TP)
    assert told(fast, entry(compute=10.2)) == [
        "2.0% slower than the fastest (rank 2), a tie within the 2.5% error of the comparison. "
        "Preferred because it needs no tensor parallelism",
        "the fastest; it needs tensor parallelism",
    ]
    said, _ = told(fast, entry(compute=10.2), error=0.1)
    assert "within the 10.0% error of the comparison. Preferred" in said
    roomy = entry(compute=10.2, micro_batch=2, device_bytes=53 * 2**30)
    said, of_fast = told(entry(compute=10, device_bytes=73 * 2**30), roomy)
    assert said.endswith("because it leaves more memory free (26.1 GiB, not 6.1 GiB)")
    assert of_fast == "the fastest; it leaves less memory free (6.1 GiB, not 26.1 GiB)"


def test_one_that_ties_says_what_stands_against_it() -> None:
    first = entry(compute=10.0)
    for other, loss in (
        (entry(compute=10.1, dp_shard=8, cp=2), "it needs context parallelism"),
        (entry(compute=10.1, dp_shard=2, dp_replicate=8), "copies of shards that fill no domain"),
        (entry(compute=10.1, dp_shard=8, dp_replicate=2), "slower and no simpler"),
    ):
        _, said = told(first, other)
        assert said.startswith("1.0% slower than the fastest (error 2.5%), a tie; ")
        assert loss in said


def test_a_loser_names_its_largest_loss_against_the_fastest() -> None:
    best = entry(dp_shard=16)
    for loser, cause in (
        (entry(compute=12, dp_shard=8, tp=2), "2.00 s more compute (element-wise work +2.00 s)"),
        (entry(optimizer=1, dp_shard=8, tp=2), "1.00 s more for the optimizer"),
        (entry(bubble=2, exposed=1, dp_shard=8, pp=2, schedule="1f1b"), "2.00 s more bubble"),
        (entry(exposed=3, dp_shard=8, tp=2), "3.00 s more communication that nothing hides"),
    ):
        _, said = told(best, loser)
        assert cause in said
        assert "a tie" not in said


def test_recomputation_is_named_where_more_is_executed() -> None:
    layout, result = entry(compute=12, dp_shard=8, tp=2, activation_checkpointing="full")
    more = replace(result, hfu_fraction=result.hfu_fraction * 1.3)
    _, said = told(entry(), (layout, more))
    assert said.endswith("2.00 s more compute (recomputes more: full)")


ROWS = st.lists(any_entry(), min_size=1, max_size=8, unique_by=lambda one: repr(one[0]))


@given(ROWS, st.sampled_from([0.0, 0.01, 0.025, 0.1]), st.integers(1, 8))
def test_no_reason_is_false_of_made_up_rows(entries: list[Entry], error: float, limit: int) -> None:
    nothing_is_false(shown(entries, difference=uncertain(error), limit=limit))


REAL = {
    "dense": ("llama-3.1-8b", 32, "p5-48xlarge", {"seq_len": 8192}),
    "one port": ("llama-3.1-8b", 16, "dgx-a100-80g-hdr1", {}),
    "small": ("llama-3.2-1b", 8, "dgx-h100", {}),
    "large": ("llama-3.1-70b", 64, "dgx-h100", {}),
    "mixture": ("qwen3-30b-a3b", 16, "dgx-h100", {}),
    "long": ("llama-3.1-8b", 16, "dgx-h100", {"seq_len": 65536, "global_batch": 8}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REAL)
def test_no_reason_is_false_of_real_rows(name: str) -> None:
    model, gpus, profile, settings = REAL[name]
    asked = question(model, gpus, profile, **settings)
    result = asked.answer()
    rows = [(one.layout, one.estimate) for one in result.ranked]

    def difference(one: Entry, other: Entry) -> float:
        return difference_fraction(one[1], other[1], cluster=asked.cluster)

    again = shown(rows, difference=difference, cluster=asked.cluster, limit=len(rows))
    assert [row[0] for row in again.rows] == [one.layout for one in result.ranked]
    assert list(again.words) == [one.reason for one in result.ranked]
    nothing_is_false(again)


def nothing_is_false(list_: Shown) -> None:
    """Each sentence is read again, and each word of it held against the rows."""
    for rank, (row, words) in enumerate(zip(list_.rows, list_.words, strict=True), start=1):
        share = seconds(row) / seconds(list_.fastest) - 1
        if rank == 1:
            _the_first_is_true(list_, words)
        elif "; " in words:
            head, _, loss = words.partition("; ")
            assert row is list_.fastest or any(row is tied for tied in list_.order.tied)
            if head == "the fastest":
                assert row is list_.fastest
            else:
                assert re.fullmatch(r"\S+ slower than the fastest \(error \S+\), a tie", head)
                assert head.startswith(f"{share:.1%} ")
            _comparison_is_true(loss, worse=row, better=list_.first, cluster=list_.cluster)
        else:
            head, _, cause = words.partition("): ")
            assert head.startswith(f"{share:.1%} slower than the fastest (error ")
            _cause_is_true(cause, row=row, fastest=list_.fastest)


def _the_first_is_true(list_: Shown, words: str) -> None:
    if words == "the fastest of all that fit":
        assert list_.first is list_.fastest
        return
    found = re.match(r"(\S+) slower than the fastest \(rank (\d+)\), a tie", words)
    assert found is not None
    share = seconds(list_.first) / seconds(list_.fastest) - 1
    assert found[1] == f"{share:.1%}"
    assert list_.rows[int(found[2]) - 1] is list_.fastest
    gain = words.rpartition("Preferred because it ")[2]
    _comparison_is_true(gain, worse=list_.fastest, better=list_.first, cluster=list_.cluster)


def used(layout: Layout) -> set[str]:
    """The kinds of parallelism in use."""
    degrees = {
        "data": layout.dp_replicate * layout.dp_shard,
        "tensor": layout.tp,
        "context": layout.cp,
        "expert": layout.ep,
        "pipeline": layout.pp,
    }
    return {kind for kind, degree in degrees.items() if degree > 1}


def _comparison_is_true(words: str, *, worse: Entry, better: Entry, cluster: Cluster) -> None:
    """The one is worse than the other in what `words` name, and in nothing named before it."""
    named = re.search(r"\((?:without )?(.+)\)", words)
    if kinds := re.fullmatch(r"(?:needs no|it needs) (.+) parallelism", words):
        assert len(used(worse[0])) > len(used(better[0]))
        assert set(re.split(" or | and ", kinds[1])) == used(worse[0]) - used(better[0])
    elif "unusual settings" in words:
        assert named
        assert len(used(worse[0])) == len(used(better[0]))
        own, others = unusual(worse[0]), unusual(better[0])
        assert len(own) > len(others)
        assert named[1].split(", ") == [name for name in own if name not in others]
    elif "parallelism in place of" in words:
        assert len(used(worse[0])) == len(used(better[0]))
        of_worse, of_better = used(worse[0]) - used(better[0]), used(better[0]) - used(worse[0])
        assert all(kind in words for kind in of_worse | of_better)
    elif "in place of" in words:
        assert _held(worse[0], cluster) in words
        assert _held(better[0], cluster) in words
        assert form(worse[0], cluster) > form(better[0], cluster)
    elif "memory free" in words:
        assert named
        free, less = (_free(one, cluster) for one in (better, worse))
        assert free > less
        assert {format_gib(free), format_gib(less)} == set(re.findall(r"[\d.]+ \wi?B", words))
    elif "no simpler" in words or "no less simple" in words:
        assert seconds(worse) > seconds(better)
        assert simplicity(worse[0], cluster) == simplicity(better[0], cluster)
    elif "memory" in words:
        assert seconds(worse) == seconds(better)
        assert format_gib(_free(better, cluster) - _free(worse, cluster)) in words
    else:
        assert words.removeprefix("it ") == "is as fast, as simple and as large"
        assert seconds(worse) == seconds(better)
        assert _free(worse, cluster) == _free(better, cluster)
        assert simplicity(worse[0], cluster) == simplicity(better[0], cluster)


def _held(layout: Layout, cluster: Cluster) -> str:
    if layout.dp_shard * layout.cp == 1:
        return FORMS[0]
    words = FORMS[("ddp", "zero1", "zero2", "fsdp").index(layout.sharding)]
    sizes = {level.domain_gpus for level in cluster.levels}
    is_odd = layout.dp_replicate > 1 and layout.dp_shard * layout.cp * layout.tp not in sizes
    return f"copies of {words} that fill no domain" if is_odd else words


def _free(one: Entry, cluster: Cluster) -> int:
    return cluster.device.memory_bytes - one[1].memory.peak_device_bytes


def _cause_is_true(words: str, *, row: Entry, fastest: Entry) -> None:
    """The named part is longer by so much, and no other part by more."""
    terms = {
        "compute": "compute_seconds",
        "communication": "exposed_communication_seconds",
        "bubble": "bubble_seconds",
        "for the optimizer": "optimizer_seconds",
    }
    longer = {
        words: getattr(row[1].time, name) - getattr(fastest[1].time, name)
        for words, name in terms.items()
    }
    (term,) = (term for term in terms if f"more {term}" in words)
    assert longer[term] == max(longer.values()) > 0
    assert words.startswith(f"{format_seconds(longer[term])} more ")
    if "recomputes more" in words:
        shares = [one[1].hfu_fraction / one[1].mfu_fraction for one in (row, fastest)]
        assert shares[0] > shares[1]
        assert row[0].activation_checkpointing in words
    elif part := re.search(r"\((\w+) over (\S+) \+(.+)\)", words):
        exposed = [
            sum(
                cost.exposed_seconds
                for cost in one[1].communication
                if (cost.collective, cost.axis) == (part[1], part[2])
            )
            for one in (row, fastest)
        ]
        assert part[3] == format_seconds(exposed[0] - exposed[1])
        assert exposed[0] > exposed[1]
    if term == "bubble":
        assert words.endswith(f"of {row[0].pp} stages")


OWN_NAMES = {
    "compute": "more compute",
    "communication": "more communication",
    "pipeline bubble": "more bubble",
    "optimizer": "more for the optimizer",
    "host copies": "more of host copies",
}


@pytest.mark.parametrize(
    "asked",
    [
        question("qwen3-14b", 4, "pcie-8xrtx4090"),
        question("llama-3.1-8b", 16, "dgx-a100-80g-hdr1", global_batch=16),
        question("llama-3.1-8b", 16, global_batch=32),
    ],
    ids=["on the host", "few sequences", "inside nodes"],
)
def test_a_reason_names_the_term_whose_difference_it_states(asked: Question) -> None:
    found = asked.answer()
    assert found.fastest is not None
    fastest = found.fastest.estimate.time.terms
    for ranked in found.ranked:
        if ranked.rank == 1 or ranked.rank in (found.listed.fastest_rank, *found.listed.tied):
            continue
        own = ranked.estimate.time.terms
        more = {name: own[name] - fastest[name] for name in own}
        term = max(more, key=lambda name: more[name])
        assert f"{format_seconds(more[term])} {OWN_NAMES[term]}" in ranked.reason
