"""What weak nodes cost, and what a plan is without them."""

from __future__ import annotations

from fsdpplan.search.recommend import price_of_weak_nodes, without_excluded
from tests.emit.plans import make_plan
from tests.search.weak import with_a_weak_node

PLAN = make_plan("cuda", nodes=4)


def test_the_price_of_a_weak_node_is_said() -> None:
    slow = with_a_weak_node(PLAN)
    assert price_of_weak_nodes(PLAN, ()) == ()
    (keep,) = price_of_weak_nodes(slow, ())
    assert keep.startswith("keeping n03 (mlx5_3 runs at 100 Gb/s, its equals at 400 Gb/s) makes a")
    assert keep.endswith("; --exclude n03 takes other nodes")
    (leave,) = price_of_weak_nodes(slow, ("n01", "n02", "n03"))
    assert leave.startswith("without n03 (mlx5_3 runs at 100 Gb/s")
    percent = keep.partition("step ")[2].partition(" longer")[0]
    assert f"kept, it would make it {percent} longer" in leave


def test_without_its_weak_node_a_plan_is_as_on_healthy_ones() -> None:
    slow = with_a_weak_node(PLAN)
    assert without_excluded(slow, ("n01",)) is slow
    healthy = without_excluded(slow, ("n03",))
    assert healthy.cluster == PLAN.cluster
    assert healthy.estimate.step_seconds.expected < slow.estimate.step_seconds.expected
