"""Collectives that do not match between ranks: where the job would hang, or mix up its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest

from ..config import LayoutConfig
from ..parallel.mesh import place
from .counting import Call

GroupCalls = dict[tuple[str, tuple[int, ...]], list[Call]]
"""A rank's calls in order, by (axis, ranks of the group), in the order of first use."""

Groups = dict[tuple[int, ...], list[Call]]
"""The same along one axis."""

MESSAGES = ("send", "recv")
MESSAGE = "message"
UNEVEN = "all_to_all"
"""A collective whose ranks may give and get other numbers of bytes each."""


def mismatches(layout: LayoutConfig, calls_of: dict[int, GroupCalls]) -> list[str]:
    """A sentence for each pair of ranks whose calls do not go together, at their first difference.

    Ranks of one group must make the same calls in the same order. So must those of different
    groups that are alike, along an axis and in one pipeline stage: they run the same program on
    the same shapes. What one stage sends to another must be what that one receives from it.
    """
    found: list[str] = []
    for first, second in combinations(sorted(calls_of), 2):
        found += _different_calls(layout, first, second, calls_of)
    return found + list(_unanswered_messages(layout, calls_of))


def _different_calls(
    layout: LayoutConfig, first: int, second: int, calls_of: dict[int, GroupCalls]
) -> Iterator[str]:
    one, other = calls_of[first], calls_of[second]
    same_stage = place(layout, first).pp == place(layout, second).pp
    for axis in sorted({axis for axis, _ in (*one, *other)}):
        mine, theirs = _groups(one, axis), _groups(other, axis)
        shared = sorted(ranks for ranks in {*mine, *theirs} if {first, second} <= {*ranks})
        pairs = [(mine.pop(ranks, []), theirs.pop(ranks, [])) for ranks in shared]
        if same_stage:
            pairs += _alike(mine, theirs)
        for calls, others in pairs:
            yield from _first_difference(axis, first, calls, second, others)


def _groups(calls: GroupCalls, axis: str) -> Groups:
    """Calls along `axis`, without messages, by group."""
    return {
        ranks: [_comparable(call) for call in made if call.collective not in MESSAGES]
        for (name, ranks), made in calls.items()
        if name == axis
    }


def _alike(mine: Groups, theirs: Groups) -> list[tuple[list[Call], list[Call]]]:
    """Groups that play the same part for two ranks: as many ranks, as far apart. An axis has
    several where part of it keeps parameters; of several alike, in the order of their first use."""
    pairs: list[tuple[list[Call], list[Call]]] = []
    for part in dict.fromkeys(map(_offsets, (*mine, *theirs))):
        pairs += zip_longest(_playing(part, mine), _playing(part, theirs), fillvalue=[])
    return pairs


def _playing(part: tuple[int, ...], groups: Groups) -> list[list[Call]]:
    return [calls for ranks, calls in groups.items() if _offsets(ranks) == part]


def _offsets(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank - ranks[0] for rank in ranks)


def _comparable(call: Call) -> Call:
    return call._replace(bytes=0) if call.collective == UNEVEN else call


def _first_difference(
    axis: str, first: int, calls: Sequence[Call], second: int, others: Sequence[Call]
) -> Iterator[str]:
    for number, (one, other) in enumerate(zip_longest(calls, others), start=1):
        if one != other:
            yield (
                f"ranks {first} and {second} do not make the same calls over {axis}: call {number} "
                f"is {_said(one)} on rank {first} and {_said(other)} on rank {second}, so the job "
                "would hang there"
            )
            return


def _unanswered_messages(layout: LayoutConfig, calls_of: dict[int, GroupCalls]) -> Iterator[str]:
    """Of all pairs of stages that were rehearsed."""
    rank_of_stage = {place(layout, rank).pp: rank for rank in sorted(calls_of, reverse=True)}
    for (here, sender), (there, receiver) in combinations_both_ways(rank_of_stage):
        sent = _messages(layout, calls_of[sender], "send", there)
        received = _messages(layout, calls_of[receiver], "recv", here)
        for number, (one, other) in enumerate(zip_longest(sent, received), start=1):
            if one != other:
                yield (
                    f"message {number} from stage rank {here} to {there} is {_said(one)} where it "
                    f"is sent (rank {sender}) and {_said(other)} where it is received (rank "
                    f"{receiver}), so the job would hang there"
                )
                break


def combinations_both_ways(
    items: dict[int, int],
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ordered pairs of different items."""
    for one, other in combinations(sorted(items.items()), 2):
        yield one, other
        yield other, one


def _messages(layout: LayoutConfig, calls: GroupCalls, kind: str, stage: int) -> list[Call]:
    """Messages of a rank to or from pipeline rank `stage`, as both ends see them."""
    return [
        Call(MESSAGE, call.dtype, call.bytes)
        for made in calls.values()
        for call in made
        if call.collective == kind
        and call.peer is not None
        and place(layout, call.peer).pp == stage
    ]


def _said(call: Call | None) -> str:
    if call is None:
        return "none"
    size = f" of {call.bytes:,} bytes" if call.bytes else ""
    kind = "" if call.collective == MESSAGE else f"{call.collective} in "
    return f"{kind}{call.dtype}{size}"
