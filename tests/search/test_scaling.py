"""Scaling: the knee by hand, the points, and the fewest GPUs against a scan of whole searches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.scaling import (
    Rate,
    doublings,
    efficiency,
    fits_at_all,
    kept_of_doubling,
    knee,
    node_counts,
)
from fsdpplan.spec.model import Model
from tests.cost.problems import SMALL
from tests.search.questions import WIDE, Question, question


def rates(*pairs: tuple[int, float]) -> list[Rate]:
    """Points from (GPUs, tokens a second)."""
    return [Rate(gpus=gpus, tokens_per_second=rate) for gpus, rate in pairs]


def test_the_knee_is_the_last_point_before_a_doubling_brings_too_little() -> None:
    points = rates((8, 100), (16, 198), (32, 380), (64, 560), (128, 1100))
    found = knee(points)
    assert found is not None
    assert (found.gpus, found.next_gpus) == (32, 64)
    assert found.kept_fraction == pytest.approx(560 / 380 / 2)
    assert efficiency(points[0], points[2]) == pytest.approx(380 / 400)
    beyond = knee(points[:3])
    assert beyond is not None
    assert (beyond.gpus, beyond.next_gpus) == (32, None)
    assert knee([]) is None


def test_steps_that_are_no_doubling_are_judged_by_their_slope() -> None:
    one, other = rates((8, 100), (24, 100 * 1.6 ** (1.584962500721156)))
    assert kept_of_doubling(one, other) == pytest.approx(0.8)


def test_points_are_powers_of_two_of_whole_nodes() -> None:
    assert doublings(8, 1024, 8) == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert doublings(1, 100, 8) == (1, 2, 4, 8, 16, 32, 64)
    assert doublings(6, 100, 6) == (6, 12, 24, 48, 96)
    assert doublings(1, 9, 1) == (1, 2, 4, 8)
    assert [*node_counts(8, most=32)] == [1, 2, 4, 8, 16, 24, 32]
    assert [*node_counts(6, most=13)] == [1, 2, 3, 6, 12]


SOME = (
    SMALL,
    WIDE,
    replace(WIDE, name="deep", layers=30),
    replace(WIDE, name="odd", layers=21, heads=24, kv_heads=8, hidden=6144),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", SOME, ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("profile", "nodes", "pins"),
    [
        ("dgx-h100", 2, {"cp": 1, "pp": 1, "micro_batch": 1}),
        ("dgx-a100-40g-hdr", 3, {"tp": 1, "micro_batch": 2}),
        ("oci-bm-gpu-a10-4", 5, {"sharding": "fsdp", "cp": 1, "pp": 1, "micro_batch": 1}),
    ],
)
def test_the_fewest_are_those_of_a_scan(
    model: Model, profile: str, nodes: int, pins: dict[str, Any]
) -> None:
    node = load_cluster(profile).cluster.gpus_per_node
    asked: list[Question] = [
        question(model, gpus, profile, seq_len=1024, **pins)
        for gpus in node_counts(node, most=nodes * node)
    ]
    scan = [bool(one.answer(limit=1).ranked) for one in asked]
    assert [fits_at_all(one.asked) for one in asked] == scan
    assert any(scan) or profile == "oci-bm-gpu-a10-4"
