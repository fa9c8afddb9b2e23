"""Weights: from names and a seed, tied where they are tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.weights import initialise, materialise, named_parameters
from fsdpplan.trainer.parallel.assemble import assemble
from tests.trainer import plans

CPU = torch.device("cpu")


def decoder(*, seed: int, device: str = "cpu", **model: Any) -> Decoder:
    plan = parse_plan(plans.plan_text(model=model))
    with torch.device(device):
        built = Decoder(plan.model)
    if device == "meta":
        materialise(built, CPU)
    initialise(built, seed=seed, layers=plan.model.layers)
    return built


def test_weights_depend_on_the_seed_and_the_name() -> None:
    first, again, other = decoder(seed=0), decoder(seed=0), decoder(seed=1)
    for mine, same, changed in zip(
        first.parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(mine, same)
        assert mine.ndim == 1 or not torch.equal(mine, changed)
    named = dict(first.named_parameters())
    first_block, second_block = (named[f"layers.{i}.attention.wq.weight"] for i in range(2))
    assert not torch.equal(first_block, second_block)


def test_their_spread_is_gpt2s() -> None:
    model = decoder(seed=0, hidden=256, ffn_hidden=512, layers=8)
    assert model.tok_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    residual = model.get_parameter("layers.3.feed_forward.w2.weight")
    assert residual.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)
    assert torch.equal(model.get_parameter("norm.weight"), torch.ones(256))


def test_tied_embeddings_stay_tied_off_the_meta_device() -> None:
    model = decoder(seed=0, device="meta", **plans.GPT2_STYLE)
    assert model.output.weight is model.tok_embeddings.weight
    untied = decoder(seed=0, device="meta")
    assert untied.output.weight is not untied.tok_embeddings.weight


def test_buffers_stay_on_the_device_when_parameters_are_offloaded() -> None:
    experts = {"experts": 4, "active": 2, "hidden": 24}
    with torch.device("meta"):
        built = Decoder(plans.config_of(experts=experts))
    materialise(built, CPU, buffers=torch.device("meta"))
    assert all(parameter.device == CPU for parameter in built.parameters())
    assert all(buffer.is_meta for buffer in built.buffers())
    assert "layers.0.feed_forward.counts" not in built.state_dict()


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [{}, {"sharding": "ddp"}])
@pytest.mark.parametrize("model", [{}, plans.GPT2_STYLE], ids=["untied", "tied"])
def test_a_layout_begins_with_the_weights_of_the_plain_model(
    alone: None, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    plan = parse_plan(plans.plan_text(model=model, **layout))
    built = dict(named_parameters(assemble(plan, CPU, seed=3).model))
    plain = dict(decoder(seed=3, **model).named_parameters())
    assert built.keys() == plain.keys()
    for name, parameter in built.items():
        whole: Any = parameter if layout else parameter.full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(whole, plain[name]), name
