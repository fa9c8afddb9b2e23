"""float8: which layers it takes, where it is refused, and that it changes no parameter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.parallel.float8 import apply_float8, float8_layers, require_float8
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer import jobs, plans
from tests.trainer.float8_layouts import TRAININGS, plan_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

LOSS_TOLERANCE = 5e-3
"""e4m3 has 4 bits; losses near 4 differ by less than 1e-3."""

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
quiet = pytest.mark.filterwarnings("ignore")  # torchao's own, at its import


def decoder(plan: PlanConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(plan.model)


def test_it_takes_the_matrices_of_the_blocks_whose_shapes_the_kernels_take() -> None:
    plan = plan_of(TRAININGS["tensorwise"])
    block = decoder(plan).layers["0"]
    projections = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")]
    projections += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]
    assert set(float8_layers(block, tp=1)) == set(projections)
    # kv heads are 32 wide together: 8 on each of 4 ranks
    assert "attention.wk" not in float8_layers(block, tp=4)


def test_the_router_stays_in_16_bits() -> None:
    mixture = {"experts": {"experts": 16, "active": 2, "hidden": 32}}
    plan = parse_plan(plans.plan_text(model={"hidden": 64, "head_dim": 16, **mixture}))
    names = float8_layers(decoder(plan).layers["0"], tp=1)
    assert names
    assert not [name for name in names if "router" in name]


def test_it_is_refused_on_a_plan_for_cpus() -> None:
    plan = parse_plan(plans.plan_text(training={"precision": "fp8"}))
    with pytest.raises(TrainerError, match=r"needs GPUs.*--precision bf16"):
        require_float8(plan, CPU)


def test_it_is_refused_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpplan.trainer.parallel.float8.find_spec", lambda name: None)
    with pytest.raises(TrainerError, match=r"pip install torchao\S*, or plan again with"):
        require_float8(plan_of(TRAININGS["tensorwise"]), CPU)


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_it_is_refused_on_gpus_without_8_bit_products(
    capability: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpplan.trainer.parallel.float8.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    plan = plan_of(TRAININGS["tensorwise"])
    if works:
        require_float8(plan, GPU)
        return
    with pytest.raises(TrainerError, match="A100 has no 8-bit products"):
        require_float8(plan, GPU)


@pytest.mark.parametrize(
    ("training", "layout", "refused"),
    [
        ({"fp8_recipe": "delayed"}, {}, "fp8_recipe delayed"),
        ({"fp8_all_gather": True}, {"sharding": "ddp"}, "fp8_all_gather with ddp"),
        ({"fp8_all_gather": True, "fp8_recipe": "rowwise"}, {}, "fp8_all_gather with fp8_recipe"),
    ],
)
def test_what_torchao_has_not_is_refused(
    training: dict[str, object], layout: dict[str, object], refused: str
) -> None:
    plan = plan_of({"precision": "fp8", **training}, **layout)
    with pytest.raises(TrainerError, match=refused):
        require_runnable(plan)


@needs_torchao
@quiet
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "gathered"])
def test_a_converted_model_has_the_same_parameters(name: str) -> None:
    plan = plan_of(TRAININGS[name])
    before, after = decoder(plan), decoder(plan)
    apply_float8(list(after.layers.values()), plan, CPU)
    assert type(after.layers["0"].attention.wq) is not torch.nn.Linear
    assert type(after.output) is torch.nn.Linear
    described = [
        [(key, value.shape, value.dtype) for key, value in model.state_dict().items()]
        for model in (before, after)
    ]
    assert described[0] == described[1]


@needs_torchao
@pytest.mark.gloo
def test_it_learns_as_bf16_also_from_a_checkpoint_of_bf16(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    results = jobs.measured(2, "tests.trainer.float8_layouts:measure_all", out)
    for name, measured in results.items():
        exact = results["bf16_resumed" if name.endswith("_resumed") else "bf16"]
        assert measured == pytest.approx(exact, abs=LOSS_TOLERANCE)
        assert (measured == exact) == name.startswith("bf16")
