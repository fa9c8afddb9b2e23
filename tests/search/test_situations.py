"""Situations: the first answer is one that an expert would be content with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cost.model.shape import infer_model
from fsdpplan.spec.layout import Layout
from tests.search.questions import Question, question

TABLE = Path(__file__).parents[1] / "golden" / "situations.toml"
SITUATIONS = tomllib.loads(TABLE.read_text(encoding="utf-8"))["situations"]

QUESTION = ("gpus", "hardware", "seq_len", "global_batch")
"""What a situation says beside its model, its accepted layouts and why."""


def asked_in(situation: Mapping[str, Any]) -> Question:
    """The question of a situation, with the defaults of the command line."""
    given = {name: situation[name] for name in QUESTION if name in situation}
    gpus, hardware = given.pop("gpus"), given.pop("hardware")
    sized = "params" in situation
    model = infer_model(int(situation["params"])) if sized else situation["model"]
    return question(model, gpus, hardware, **given)


def is_accepted(layout: Layout, situation: Mapping[str, Any]) -> bool:
    """Whether `layout` keeps all bounds of one line."""
    return any(
        all(_keeps(_property(layout, name), bound) for name, bound in line.items())
        for line in situation["accept"]
    )


def _property(layout: Layout, name: str) -> Any:
    return layout.tp * layout.cp * layout.pp if name == "model_ranks" else getattr(layout, name)


def _keeps(value: Any, bound: Any) -> bool:
    match bound:
        case {**limits}:
            is_number = isinstance(value, int)
            return is_number and limits.get("least", value) <= value <= limits.get("most", value)
        case [*choices]:
            return value in choices
        case _:
            return bool(value == bound)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation["name"])
def test_the_first_answer_is_one_that_an_expert_would_give(situation: Mapping[str, Any]) -> None:
    first = asked_in(situation).answer().ranked[0]
    assert is_accepted(first.layout, situation), f"{situation['why']}; not {first.layout}"


def test_a_bound_is_a_value_a_choice_or_a_range() -> None:
    layout = Layout(dp_shard=8, reshard_after_forward=4)
    for line, kept in (
        ({"dp_shard": 8}, True),
        ({"dp_shard": 4}, False),
        ({"dp_shard": [4, 8]}, True),
        ({"dp_shard": {"least": 9}}, False),
        ({"dp_shard": {"most": 8}, "model_ranks": 1}, True),
        ({"reshard_after_forward": {"most": 8}}, True),
        ({"sharding": {"most": 8}}, False),
    ):
        assert is_accepted(layout, {"accept": [line]}) is kept
