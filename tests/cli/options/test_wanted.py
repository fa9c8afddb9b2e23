"""`--why`: a part of a layout in the words of people, or by the names of its fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.wanted import wanted
from fsdpplan.errors import SpecError
from fsdpplan.search.pins import Pins
from fsdpplan.spec.layout import Layout

WORDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp 4": ({"tp": 4}, ()),
    "tp4": ({"tp": 4}, ()),
    "--tp 4": ({"tp": 4}, ()),
    "tp=4, pp=2": ({"tp": 4, "pp": 2}, ()),
    "pp 2 ep 8": ({"pp": 2, "ep": 8}, ()),
    "dp_replicate 4 x dp_shard 8": ({"dp_replicate": 4, "dp_shard": 8}, ()),
    "tensor parallelism": ({}, ("tp",)),
    "a pipeline with 1F1B": ({"schedule": "1f1b"}, ("pp",)),
    "no pipeline": ({"pp": 1}, ()),
    "hsdp": ({"sharding": "fsdp"}, ("dp_replicate",)),
    "hsdp dp_replicate 2": ({"sharding": "fsdp", "dp_replicate": 2}, ()),
    "ZeRO3": ({"sharding": "fsdp"}, ()),
    "zero1": ({"sharding": "zero1"}, ()),
    "no recompute": ({"activation_checkpointing": "none"}, ()),
    "without recomputation": ({"activation_checkpointing": "none"}, ()),
    "recompute": ({"activation_checkpointing": "full"}, ()),
    "full recompute": ({"activation_checkpointing": "full"}, ()),
    "activation checkpointing op": ({"activation_checkpointing": "op"}, ()),
    "selective recompute": ({"activation_checkpointing": "op"}, ()),
    "micro_batch=2": ({"micro_batch": 2}, ()),
    "micro batch 2 and async tp": ({"micro_batch": 2, "async_tp": True}, ()),
    "no async tp": ({"async_tp": False}, ()),
    "eager": ({"compile": False}, ()),
    "reshard never": ({"reshard_after_forward": "never"}, ()),
    "offload": ({"offload": "cpu"}, ()),
    "no offload": ({"offload": "none"}, ()),
    "ulysses cp 2": ({"cp_attention": "ulysses", "cp": 2}, ()),
    "gradient sync last": ({"gradient_sync": "last"}, ()),
    "ddp bucket 50MiB": ({"ddp_bucket_bytes": 50 * 2**20}, ()),
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_people_are_read(text: str) -> None:
    found = wanted(text, name="--why")
    assert (found.pins.given(), found.split) == WORDS[text]


def test_each_field_of_a_layout_can_be_asked_for() -> None:
    values = {"ddp_bucket_bytes": "50MiB", "stage_blocks": None, "compile": "on"}
    values |= {"async_tp": "on", "experts_over_tp": "on", "sharding": "fsdp", "schedule": "1f1b"}
    values |= {"reshard_after_forward": "never", "gradient_sync": "last", "offload": "cpu"}
    values |= {"activation_checkpointing": "full", "cp_attention": "ring"}
    for field in fields(LayoutOptions):
        value = values.get(field.name, "2")
        if value is not None:
            assert set(wanted(f"{field.name}={value}", name="--why").pins.given()) == {field.name}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no part"),
        ("tp 0", "at least 1"),
        ("tp 4 tp 2", "two values of tp"),
        ("bananas", "'bananas' is no part of a layout"),
        ("micro_batch", "needs a value"),
        ("micro_batch many", "whole number"),
        ("no stage_blocks", "says nothing"),
        ("schedule tomorrow", "is not known"),
    ],
)
def test_what_is_none_is_refused_with_what_to_type(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        wanted(text, name="--why")
    assert str(caught.value).startswith("--why: ")


def test_what_is_asked_for_is_told_from_layouts_and_from_what_a_plan_fixed() -> None:
    hsdp = wanted("hsdp", name="--why")
    assert hsdp.allows(Layout(dp_replicate=2, dp_shard=4))
    assert not hsdp.allows(Layout(dp_shard=8))
    assert not hsdp.allows(Layout(dp_replicate=8, sharding="ddp"))
    pins = Pins(tp=2, pp=1, dp_replicate=2)
    assert wanted("tp 4", name="--why").freed(pins).given() == {"pp": 1, "dp_replicate": 2}
    assert hsdp.freed(pins).given() == {"tp": 2, "pp": 1}
