"""Words: layouts as a person would say them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fsdpplan.search.words import describe, name
from tests.cost.problems import Case, case, cases

TP = {"sequence_parallel": True, "loss_parallel": True}
PP = {"gradient_sync": "last", "num_microbatches": 8, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("layout", "family", "sentence"),
    [
        ({"sharding": "ddp"}, "one GPU", "one GPU: nothing to spread"),
        (
            {"sharding": "ddp", "dp_replicate": 8},
            "DDP",
            "DDP: a whole copy on each of the 8 GPUs of a node",
        ),
        (
            {"sharding": "ddp", "dp_replicate": 128},
            "DDP",
            "DDP: a whole copy on each of the 128 GPUs",
        ),
        ({"dp_shard": 64}, "FSDP", "FSDP: shard over all 64 GPUs"),
        ({"dp_shard": 8}, "FSDP", "FSDP: shard over the 8 GPUs of a node"),
        (
            {"dp_replicate": 16, "dp_shard": 8},
            "HSDP",
            "HSDP: shard over the 8 GPUs of a node, replicate over 16 nodes",
        ),
        (
            {"tp": 8, "dp_shard": 8, **TP},
            "TP + FSDP",
            "FSDP: shard over 8 nodes, tensor parallel over the 8 GPUs of a node",
        ),
        (
            {"pp": 4, "dp_shard": 8, "reshard_after_forward": "never", **PP},
            "PP + FSDP",
            "FSDP: shard over the 8 GPUs of a node, pipeline of 4 stages (1F1B)",
        ),
    ],
)
def test_what_a_layout_is_called(layout: dict[str, object], family: str, sentence: str) -> None:
    asked = case(**layout)  # type: ignore[arg-type]
    assert name(asked.layout) == family
    assert describe(asked.layout, asked.cluster) == sentence


def test_processes_are_not_gpus() -> None:
    local = case(profile="cpu", dp_replicate=2, dp_shard=2)
    assert "processes" in describe(local.layout, local.cluster)


@settings(max_examples=100)
@given(cases())
def test_every_axis_in_use_is_named(drawn: Case) -> None:
    layout = drawn.layout
    said = describe(layout, drawn.cluster)
    assert ("tensor parallel" in said) == (layout.tp > 1)
    assert ("pipeline" in said) == (layout.pp > 1)
    assert ("shard over" in said) == (layout.shard_ranks > 1)
    assert ("HSDP" in name(layout)) == (layout.shard_ranks > 1 and layout.dp_replicate > 1)
