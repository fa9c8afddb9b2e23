"""One layout that pins name, and the nearest to it that fits."""

from __future__ import annotations

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.nearest import nearest_that_fits
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.spec.training import Training

CLUSTER = load_cluster("dgx-h100", gpus=8).cluster
TRAINING = Training(seq_len=4096, global_batch=64)


def test_the_data_parallel_degree_that_is_not_named_is_what_is_left() -> None:
    found = named_layout(Pins(tp=2, dp_replicate=1), cluster=CLUSTER, training=TRAINING)
    assert (found.layout.tp, found.layout.dp_shard, found.layout.world) == (2, 4, 8)
    assert found.layout.global_batch == TRAINING.global_batch
    assert found.assumptions[0] == "dp_shard 4, the GPUs left by the other degrees"


def test_what_is_not_named_is_a_default_and_said() -> None:
    found = named_layout(Pins(dp_shard=8, micro_batch=2), cluster=CLUSTER, training=TRAINING)
    assert (found.layout.sharding, found.layout.micro_batch) == ("fsdp", 2)
    (said,) = found.assumptions
    assert "--sharding fsdp" in said
    assert "--micro-batch" not in said


def test_gpus_that_no_degree_splits_hold_a_shard_each() -> None:
    found = named_layout(Pins(tp=2), cluster=CLUSTER, training=TRAINING)
    assert (found.layout.dp_replicate, found.layout.dp_shard) == (1, 4)
    assert found.assumptions[0].startswith("dp_shard 4: all GPUs that no degree splits")
    with pytest.raises(SpecError, match="leaves 2 of 8 GPUs to split: give more of a degree"):
        named_layout(Pins(dp_shard=4, dp_replicate=1), cluster=CLUSTER, training=TRAINING)


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        ("llama-3.1-8b", Pins(dp_shard=8, micro_batch=8)),
        ("llama-3.1-8b", Pins(dp_replicate=8, sharding="ddp")),
    ],
    ids=["too large a micro-batch", "whole copies"],
)
def test_the_nearest_fits_and_says_what_changes(model: str, pins: Pins) -> None:
    asked = Question(model=load_model(model), cluster=CLUSTER, training=TRAINING, pins=pins)
    layout = named_layout(pins, cluster=CLUSTER, training=TRAINING).layout
    priced = estimate(asked.case(layout))
    room = available_bytes(cluster=CLUSTER, training=TRAINING)
    assert priced.memory.peak_device_bytes > room
    found = nearest_that_fits(asked, layout, priced)
    assert found is not None
    assert found.estimate.memory.peak_device_bytes <= room
    assert found.words.startswith("--")
