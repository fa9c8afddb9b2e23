"""Pins: what the user has fixed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
from hypothesis import given

from fsdpplan.cli.options.expand import Flag, flag_of
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.pins import Pins, attention_over_cp, pin_flag
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training
from tests.cost.problems import Case, case, cases


def test_every_pin_is_a_field_of_the_layout_and_of_its_type() -> None:
    of_layout, of_pins = get_type_hints(Layout), get_type_hints(Pins)
    assert of_pins == {name: of_layout[name] | None for name in of_pins}


def test_every_pin_is_an_option_of_its_type_and_every_option_a_pin() -> None:
    # The options hold what the command line reads, which this room does not know of.
    assert get_type_hints(LayoutOptions) == {
        **get_type_hints(Pins),
        "HEADING": ClassVar[str],
    }


def test_no_pin_allows_everything() -> None:
    assert Pins().given() == {}
    assert Pins().allows(case(dp_shard=8).layout)


def test_false_and_one_are_given() -> None:
    assert Pins(compile=False, tp=1).given() == {"tp": 1, "compile": False}
    assert not Pins(compile=False).allows(case(dp_shard=8, compile=True).layout)


def test_a_pin_is_typed_as_its_option_is_called() -> None:
    hints = get_type_hints(LayoutOptions, include_extras=True)
    for field in fields(Pins):
        found = next(item for item in get_args(hints[field.name]) if isinstance(item, Flag))
        assert flag_of(field.name, found).split("/")[0] == pin_flag(field.name)


@given(cases())
def test_a_layout_keeps_the_pins_that_it_gives(drawn: Case) -> None:
    pinned = {field.name: getattr(drawn.layout, field.name) for field in fields(Pins)}
    assert Pins(**pinned).allows(drawn.layout)
    other = {**pinned, "micro_batch": drawn.layout.micro_batch + 1}
    assert not Pins(**other).allows(drawn.layout)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"tp": 1, "cp": 1}, "ring"),  # of none: nothing to say
        ({"tp": 1, "cp": 8}, "ulysses"),
        ({"tp": 4, "cp": 8}, "ulysses"),  # of whose heads each has one
        ({"tp": 8, "cp": 8}, "ring"),
        ({"tp": 1, "cp": 3}, "ring"),
        ({"tp": 1, "cp": 8, "program": "hf"}, "ulysses"),
        ({"tp": 1, "cp": 8, "program": "torchtitan"}, "ring"),
        ({"tp": 1, "cp": 8, "runtime": "megatron"}, "ring"),
        ({"tp": 1, "cp": 8, "pins": Pins(cp_attention="ring")}, "ring"),
    ],
)
def test_heads_are_traded_where_cp_divides_them(options: dict[str, Any], kind: str) -> None:
    """Of 32 heads, by programs of FSDP2's that can."""
    asked = {"pins": Pins(), **options}
    names = {name: asked.pop(name) for name in ("program", "runtime") if name in asked}
    training = Training(seq_len=4096, global_batch=64, **names)
    model = load_model("llama-3.1-8b")
    assert attention_over_cp(model=model, training=training, **asked) == kind


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_what_is_said_of_refused_layouts_is_of_the_pin(name: str) -> None:
    found = recommend(
        model=load_model("qwen3-next-80b-a3b"),
        cluster=load_cluster("dgx-h100", gpus=8).cluster,
        training=Training(seq_len=4096, global_batch=8, program="hf"),
        pins=Pins(**{name: 2}),
    )
    assert not found.ranked
    assert found.example is not None
    assert f"use --{name} 1" in found.example
