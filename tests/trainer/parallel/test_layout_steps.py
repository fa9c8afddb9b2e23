"""The steps of a layout: one order for the reference decoder and for a user's own model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel import assemble
from fsdpplan.trainer.parallel.assemble import REFERENCE_STEPS
from fsdpplan.trainer.parallel.data_parallel import Ends
from fsdpplan.trainer.parallel.layout_steps import LAST, ORDER, Part, Steps, skip
from fsdpplan.trainer.parallel.parallelize import Whole, parallelize, user_steps
from tests.trainer import plans

CPU = torch.device("cpu")
PLAN = {"activation_checkpointing": "full"}


class Recorder:
    """Steps that do nothing but write down that they were taken."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def steps(self) -> Steps:
        recorded = {field.name: self._step(field.name) for field in fields(Steps)}
        return Steps(**recorded)  # type: ignore[arg-type]

    def _step(self, name: str) -> Callable[[Part], nn.Module]:
        def step(part: Part) -> nn.Module:
            self.taken.append(name)
            return part.model

        return step


def users_own() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def by_parallelize(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setitem(parallelize.__globals__, "user_steps", lambda *_: steps)
    return parallelize(users_own(), parse_plan(plans.plan_text(**PLAN)), numbers=False)


def by_assemble(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setitem(assemble.__dict__, "REFERENCE_STEPS", steps)
    return assemble.assemble(parse_plan(plans.plan_text(**PLAN)), CPU, seed=0).model


@pytest.mark.gloo
@pytest.mark.parametrize("entry", [by_parallelize, by_assemble])
def test_a_model_takes_all_steps_in_the_one_order_and_nothing_else_changes_it(
    alone: None, monkeypatch: pytest.MonkeyPatch, entry: Callable[..., nn.Module]
) -> None:
    recorder = Recorder()
    model = entry(recorder.steps(), monkeypatch)
    assert recorder.taken == [*ORDER, LAST]
    assert recorder.taken == [field.name for field in fields(Steps)]
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_the_two_kinds_of_models_differ_in_what_must_know_their_parts_only() -> None:
    model = nn.Linear(2, 2)
    whole = Whole(model=model, blocks=[model], head=None, styles={}, ends=Ends())
    of_users = user_steps(whole, model, model)
    differing = {
        field.name
        for field in fields(Steps)
        if getattr(REFERENCE_STEPS, field.name) is not getattr(of_users, field.name)
    }
    of_parts = {"tensors", "experts", "sequences", "head", "sequence_end", "replicas"}
    assert differing == {*of_parts, "adapters"}
    # a user's sequences are shared before, by the whole model
    assert of_users.experts is of_users.sequences is REFERENCE_STEPS.sequence_end is skip


def test_layers_of_8_bits_are_there_before_matrices_are_split() -> None:
    assert ORDER.index("float8") < ORDER.index("tensors") < ORDER.index("recomputation")
    assert ORDER.index("compilation") < ORDER.index("shards") < ORDER.index("sequence_end")
