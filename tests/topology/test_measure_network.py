"""Between two nodes whose link is shaped, what is measured is the shape."""

from __future__ import annotations

import pytest

from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.spec.measurement import MeasuredMachine, Measurement
from tests.topology.measuring import calls
from tests.topology.over_link import BYTES_PER_SECOND, RANKS_PER_NODE, largest, measured_over_link
from tests.topology.shaped_link import missing

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(missing() is not None, reason=missing() or "")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, ...]:
    """Measured on two nodes of two ranks."""
    return measured_over_link(tmp_path_factory.mktemp("shaped") / "log.jsonl")


def test_ranks_are_numbered_node_by_node(rows: tuple[Measurement, ...]) -> None:
    machine = rows[0]
    assert isinstance(machine, MeasuredMachine)
    assert machine.hosts == ("n0", "n1")
    across = {(one.first_rank, one.stride) for one in calls(rows) if one.group == "across"}
    assert across == {(0, 2), (1, 2)}
    pairs = {(one.first_rank, one.stride) for one in calls(rows) if one.group == "pair"}
    assert pairs == {(0, 1), (2, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize("group", ["across", "pair"])
def test_between_nodes_nothing_is_measured_faster_than_the_link(
    rows: tuple[Measurement, ...], group: str
) -> None:
    """However busy the machine is. That it is reached is seen on a quiet one: `make link`."""
    crossing = [
        one for one in largest(rows, "send_recv", group=group) if one.stride == RANKS_PER_NODE
    ]
    assert len(crossing) == RANKS_PER_NODE
    for one in crossing:
        sent_bytes = wire_bytes(
            collective="send_recv", gathered_bytes=one.gathered_bytes, ranks=one.ranks
        )
        # a bucket of tokens is full at first
        assert sent_bytes / min(one.seconds) < 1.15 * BYTES_PER_SECOND
