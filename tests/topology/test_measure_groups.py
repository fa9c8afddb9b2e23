"""Who talks with whom while links are measured."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.measure.collectives import Groups, axis_groups, level_groups, pair_rounds
from fsdpplan.topology.measure.settings import Axis

NODES, PER_NODE = st.integers(1, 12), st.integers(1, 12)


def ranks_of(groups: Groups) -> list[int]:
    return list(chain.from_iterable(groups.members))


def edges(rounds: tuple[Groups, ...]) -> list[tuple[int, ...]]:
    return [pair for one in rounds for pair in one.members]


def test_two_nodes_of_four_have_three_kinds_of_groups() -> None:
    inside, across, everyone = level_groups(world=8, ranks_per_node=4)
    assert (inside.kind, inside.stride) == ("inside", 1)
    assert inside.members == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (across.kind, across.stride) == ("across", 4)
    assert across.members == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert everyone.members == (tuple(range(8)),)


def test_the_same_ranks_are_not_measured_under_two_names() -> None:
    assert [one.kind for one in level_groups(world=8, ranks_per_node=8)] == ["inside"]
    assert [one.kind for one in level_groups(world=8, ranks_per_node=1)] == ["across"]
    assert level_groups(world=1, ranks_per_node=1) == ()
    levels = level_groups(world=8, ranks_per_node=4)
    axes = [
        Axis(name="dp_replicate", ranks=2, stride=4),
        Axis(name="dp_shard", ranks=2, stride=2),
        Axis(name="tp", ranks=2, stride=1),
    ]
    found, notes = axis_groups(axes, world=8, known=levels)
    assert [one.axis for one in found] == ["dp_shard", "tp"]
    assert notes == ()


def test_an_axis_that_does_not_fit_the_ranks_is_named() -> None:
    found, notes = axis_groups([Axis(name="pp", ranks=4, stride=8)], world=8, known=())
    assert found == ()
    assert notes == ("axis pp is not measured: groups of 4 ranks, 8 apart, do not fit 8 ranks",)


@given(nodes=NODES, per_node=PER_NODE)
def test_groups_of_a_level_are_all_ranks_once_and_evenly_spaced(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    for groups in level_groups(world=world, ranks_per_node=per_node):
        assert sorted(ranks_of(groups)) == list(range(world))
        assert groups.ranks > 1
        for group in groups.members:
            assert group == tuple(range(group[0], group[-1] + 1, groups.stride))


@given(nodes=NODES, per_node=PER_NODE)
def test_every_link_to_a_neighbour_is_measured_once_and_no_rank_has_two_at_a_time(
    nodes: int, per_node: int
) -> None:
    rounds = pair_rounds(world=nodes * per_node, ranks_per_node=per_node)
    for one in rounds:
        assert len(set(ranks_of(one))) == len(ranks_of(one))
        assert all(last - first == one.stride for first, last in one.members)
    inside = {
        (node * per_node + place, node * per_node + place + 1)
        for node in range(nodes)
        for place in range(per_node - 1)
    }
    across = {(rank, rank + per_node) for rank in range((nodes - 1) * per_node)}
    assert sorted(edges(rounds)) == sorted(inside | across)


def test_a_rank_knows_its_group_or_that_it_has_none() -> None:
    first, second = pair_rounds(world=3, ranks_per_node=3)
    assert first.of(1) == (0, 1)
    assert first.of(2) == ()
    assert second.of(2) == (1, 2)
