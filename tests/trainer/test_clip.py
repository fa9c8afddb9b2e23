"""Clipping: one norm over gradients on any mesh. Layouts on real ranks are in test_tensor_parallel,
test_context_parallel, test_pipeline and test_expert_parallel."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdpplan.trainer.clip import clip_gradients, copies
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.mesh import Meshes, build_meshes
from fsdpplan.trainer.private_torch import fake_tensors
from fsdpplan.trainer.rehearse.fake_world import fake_world
from tests.trainer import plans
from tests.trainer.parallel_layouts import TP


def meshes_of(**layout: Any) -> Meshes:
    """The meshes of a layout, in a fake world of its ranks."""
    return build_meshes(parse_plan(json.dumps(plans.plan_document(**layout))).layout, "cpu")


def model_of(*gradients: list[float]) -> nn.Module:
    """A model of vectors with these gradients."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(len(values))) for values in gradients)
    for parameter, values in zip(model.parameters(), gradients, strict=True):
        parameter.grad = torch.tensor(values)
    return model


VECTORS = st.lists(st.lists(st.floats(-100, 100, width=32), max_size=4), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def one_rank() -> Meshes:
    with fake_world(1):
        return meshes_of(sharding="ddp")


@given(VECTORS, st.floats(0.01, 1000))
def test_one_rank_clips_as_torch_does(
    one_rank: Meshes, gradients: list[list[float]], limit: float
) -> None:
    mine, torchs = model_of(*gradients), model_of(*gradients)
    norm = clip_gradients(mine, one_rank, limit)
    expected = nn.utils.clip_grad_norm_(torchs.parameters(), limit)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-12)
    for one, other in zip(mine.parameters(), torchs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.tolist() == pytest.approx(other.grad.tolist(), rel=1e-5, abs=1e-12)


def test_an_infinite_limit_leaves_gradients_as_they_are(one_rank: Meshes) -> None:
    model = model_of([3.0], [4.0])
    assert clip_gradients(model, one_rank, math.inf).item() == pytest.approx(5.0)
    assert [parameter.grad.item() for parameter in model.parameters()] == [3.0, 4.0]  # type: ignore[union-attr]


def test_what_another_stage_counts_is_scaled_and_not_counted(one_rank: Meshes) -> None:
    model = model_of([3.0], [4.0])
    norm = clip_gradients(model, one_rank, 0.3, counted_elsewhere={"1"})
    assert norm.item() == pytest.approx(3.0)
    scaled = [parameter.grad.item() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert scaled == pytest.approx([0.3, 0.4], rel=1e-4)


@pytest.mark.parametrize(
    ("axes", "placements", "ranks"),
    [
        (("dp_replicate", "dp_shard"), (Replicate(), Shard(0)), 2),
        (("dp_replicate", "dp_shard", "tp"), (Replicate(), Shard(0), Replicate()), 2),
        (("dp_replicate", "dp_shard", "tp"), (Replicate(), Shard(0), Shard(1)), 1),
        (("tp",), (Shard(0),), 4),
        (("tp",), (Replicate(),), 8),
    ],
)
def test_copies_are_counted_within_a_replica(
    axes: tuple[str, ...], placements: tuple[Placement, ...], ranks: int
) -> None:
    with fake_world(32):
        meshes = meshes_of(pp=2, dp_replicate=2, dp_shard=4, tp=2, schedule="1f1b", **TP)
        local = torch.ones(4, 4)
        gradient = DTensor.from_local(local, meshes.parameters[axes], placements, run_check=False)
        assert copies(gradient, meshes) == ranks
        assert copies(local, meshes) == 8


def test_experts_are_spread_over_the_ranks_of_the_shards() -> None:
    with fake_world(16):
        meshes = meshes_of(dp_replicate=2, dp_shard=4, ep=2, tp=2, **TP)
        assert meshes.experts is not None
        mesh = meshes.experts["dp_replicate", "edp_shard", "ep", "tp"]
        spread = (Replicate(), Shard(1), Shard(0), Shard(2))
        gradient = DTensor.from_local(torch.ones(2, 2, 2), mesh, spread, run_check=False)
        assert copies(gradient, meshes) == 1


def test_the_norm_reads_no_value_so_it_runs_on_fake_tensors() -> None:
    with fake_world(8):
        meshes = meshes_of(dp_shard=4, tp=2, **TP)
        with fake_tensors():
            model = model_of([3.0], [4.0])
            assert clip_gradients(model, meshes, 1.0).shape == ()
