"""Mixtures of experts on gloo ranks lose as in one process, however they are spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdpplan.trainer.model.decoder import Block
from fsdpplan.trainer.parallel.expert_parallel import expert_placement
from tests.trainer import jobs, losses, plans
from tests.trainer.expert_layouts import LAYOUTS, MODELS

pytestmark = pytest.mark.gloo

FP32 = [name for name in LAYOUTS if not name.startswith("bf16")]
BF16 = [name for name in LAYOUTS if name.startswith("bf16")]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[str, Any]:
    """What 4 ranks report of each layout, and one process of each model."""
    out = tmp_path_factory.mktemp("experts") / "results.json"
    return jobs.measured(4, "tests.trainer.expert_layouts:measure_all", out, asked=asked("name"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FP32)
def test_losses_and_norms_are_those_of_one_process(measured: dict[str, Any], name: str) -> None:
    found, expected = measured[name], measured[losses.reference_name(*LAYOUTS[name])]
    assert found["losses"] == pytest.approx(expected["losses"], abs=5e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["auxiliary"] == pytest.approx(expected["auxiliary"], abs=1e-5)


@pytest.mark.parametrize("name", BF16)
def test_losses_in_bf16_are_near_those_in_fp32(measured: dict[str, Any], name: str) -> None:
    expected = measured[LAYOUTS[name][0]]
    assert measured[name]["losses"] == pytest.approx(expected["losses"], abs=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_the_model_learns(measured: dict[str, Any], model: str) -> None:
    first, *_, last = measured[model]["losses"]
    assert last < first - 0.1


def test_experts_fewer_than_ranks_are_split_by_their_own_rows() -> None:
    with torch.device("meta"):
        block = Block(plans.config_of(**MODELS["few"]), layer=0)
    experts: nn.Module = block.feed_forward.experts  # type: ignore[assignment]
    weight = experts.get_parameter("w1.weight")  # (3, 20, 48)
    router = block.get_parameter("feed_forward.router.weight")  # (3, 48)
    assert expert_placement([block], 4)(weight) == Shard(1)
    assert expert_placement([block], 4)(router) is None
    assert expert_placement([block], 3)(weight) is None
    assert expert_placement([block], 8)(weight) is None  # 8 does not divide 20 rows


def test_a_run_reports_its_busiest_expert(tmp_path: Path) -> None:
    spread = {"model": MODELS["shared"], "dp_shard": 2, "ep": 2}
    jobs.train(tmp_path / "spread", 2, "--steps", "2", **spread)
    # of 8 experts that get 3/8 of the tokens in the mean
    imbalances = [line["expert_imbalance"] for line in jobs.lines(tmp_path / "spread", "step")]
    assert all(1 <= imbalance <= 8 / 3 for imbalance in imbalances)
