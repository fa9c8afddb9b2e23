"""Remedy: what it says, when typed, makes a layout fit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

import fsdpplan.search.question as search
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.remedies import Asked, remedy
from fsdpplan.search.pins import Pins
from fsdpplan.spec.layout import Layout
from tests.search.brute import tight
from tests.search.nearest import questions
from tests.search.questions import Question, question

TRAINING_FLAGS = {"seq_len": int, "global_batch": int}


def applied(asked: Question, remedy: str) -> Question:
    """The question after typing what the remedy says."""
    told, _, dropped = remedy.partition(", without ")
    if told.startswith("leave out "):
        told, dropped = "", told.removeprefix("leave out ")
    pins = asked.pins.given()
    for flag in shlex.split(dropped):
        del pins[flag.removeprefix("--").replace("-", "_")]
    training, cluster = asked.training, asked.cluster
    for flag, value in re.findall(r"--([a-z-]+) ([0-9a-z_%]+)", told):
        name = flag.replace("-", "_")
        if name == "gpus":
            cluster = load_cluster(cluster.name, gpus=int(value)).cluster
        elif name == "headroom":
            training = replace(training, headroom_fraction=float(value.rstrip("%")) / 100)
        elif name == "fits":
            training = replace(training, fits_fraction=float(value.rstrip("%")) / 100)
        elif name in TRAINING_FLAGS:
            training = replace(training, **{name: int(value)})
        elif name in ("optimizer", "param_dtype"):
            training = replace(training, **{name: value})
        else:
            assert name in {field.name for field in fields(Pins)}
            pins[name] = int(value) if value.isdigit() else value
    return Question(model=asked.model, cluster=cluster, training=training, pins=Pins(**pins))


def trained(asked: Question, **changes: object) -> Question:
    return replace(asked, training=replace(asked.training, **changes))  # type: ignore[arg-type]


MISSES = {
    "70b, Muon": (trained(question("llama-3.1-70b", 8), optimizer="muon"), "--gpus"),
    "a host without room": (
        replace(
            asked := question("llama-3.1-70b", 16, "dgx-h100"),
            cluster=replace(asked.cluster, host_memory_bytes=10 * 2**30),
        ),
        "--optimizer adamw_8bit",
    ),
    "pinned recomputation": (
        question(
            "llama-3.1-8b",
            8,
            "dgx-a100-40g-hdr",
            tp=1,
            pp=1,
            cp=1,
            offload="none",
            activation_checkpointing="none",
        ),
        "--activation-checkpointing full",
    ),
    "pinned micro-batch": (
        question("llama-3.1-8b", 8, tp=1, pp=1, cp=1, offload="none", micro_batch=32),
        "--micro-batch 1",
    ),
    "pinned DDP": (
        question("llama-3.1-8b", 8, sharding="ddp", dp_replicate=8),
        "--dp-shard 8, without --dp-replicate --sharding",
    ),
    "pinned reduction": (
        question("llama-3.1-70b", 64, "dgx-a100-80g-hdr", tp=1, pp=1, gradient_sync="last"),
        "--gradient-sync every",
    ),
    "pinned reshard": (
        question("llama-3.1-70b", 64, tp=1, pp=1, reshard_after_forward="never"),
        "--reshard-after-forward always",
    ),
}


def advised(asked: Question, closest: Layout) -> str | None:
    question = search.Question(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    return remedy(Asked(question=question), closest)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("asked", "told"), MISSES.values(), ids=MISSES.keys())
def test_what_the_remedy_says_makes_it_fit(asked: Question, told: str) -> None:
    result = asked.answer()
    miss = result.nearest_miss
    assert result.ranked == ()
    assert miss is not None
    assert miss.needed_bytes > miss.available_bytes
    words = advised(asked, miss.layout)
    assert words is not None
    assert told in words
    assert applied(asked, words).answer().ranked


def test_the_nearest_miss_is_the_least_that_any_layout_needs() -> None:
    asked = question("llama-3.1-8b", 4, "dgx-a100-40g-hdr", seq_len=8192, offload="none")
    miss = asked.answer().nearest_miss
    assert miss is not None
    for pins in ({"tp": 4}, {"pp": 4, "tp": 1}, {"dp_shard": 4}, {"dp_replicate": 4}):
        pinned = replace(asked, pins=Pins(**pins, offload="none")).answer().nearest_miss  # type: ignore[arg-type]
        assert pinned is None or pinned.needed_bytes >= miss.needed_bytes


def test_a_model_beyond_all_help_says_so() -> None:
    asked = question("llama-3.1-405b", 1, "dgx-a100-40g-hdr", seq_len=131072, global_batch=1)
    deep = replace(asked, model=replace(asked.model, layers=1, hidden=2**18, vocab=10**7))
    miss = deep.answer().nearest_miss
    assert miss is not None
    assert advised(deep, miss.layout) is None


def levers(asked: Question) -> Iterator[Question]:
    """The question with one thing changed that needs no other GPUs."""
    pins, training = asked.pins.given(), asked.training
    for name in pins:
        left = {other: value for other, value in pins.items() if other != name}
        yield replace(asked, pins=Pins(**left))
    if training.runtime == "fsdp2":
        others = {"adamw": "adamw_8bit", "adamw_8bit": "adamw"}
        yield trained(asked, optimizer=others[training.optimizer])
        yield trained(asked, param_dtype="bf16")
    yield trained(asked, seq_len=training.seq_len // 2)


def least_bytes(asked: Question) -> int | None:
    """What the leanest layout of all needs; None: none is legal."""
    miss = tight(asked, 0.5).answer().nearest_miss
    return None if miss is None else miss.needed_bytes


def with_room_for(asked: Question, most_bytes: int) -> Question:
    """On devices on which so much just fits."""
    low, high = most_bytes, 2 * most_bytes + 2**30
    while high - low > 2**20:
        middle = (low + high) // 2
        enough = tight(asked, middle / 2**30).asked.available_bytes >= most_bytes
        low, high = (low, middle) if enough else (middle, high)
    return tight(asked, high / 2**30)


LEVERED = [
    trained(asked, optimizer=name) if asked.training.runtime == "fsdp2" else asked
    for asked, name in zip(questions(40, seed=5), ["adamw", "adamw_8bit"] * 20, strict=True)
    if asked.model.layers == 3
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", LEVERED, ids=range(len(LEVERED)))
def test_no_lever_that_fits_is_left_for_more_gpus(asked: Question) -> None:
    """On devices that just hold the leanest layout of a lever, whatever rare settings it has."""
    own = least_bytes(asked)
    for other in levers(asked):
        least = least_bytes(other)
        if least is None or own is None or least >= own - 2**22:
            continue
        short = with_room_for(asked, least)
        found = short.answer()
        assert found.nearest_miss is not None
        words = advised(short, found.nearest_miss.layout)
        assert words is not None
        assert "--gpus" not in words
        assert applied(short, words).answer().ranked
