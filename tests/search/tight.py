"""Tight questions: models that hardly fit, on machines where little is free. Does a pin ever win?

    python -m tests.search.tight [NUMBER [SMALL]]

Consumer cards, V100, L4, A10, A100 of 40 GB, dense models and mixtures. What the search finds
freely must be as fast as what it finds with a pin, where the pin is offload, the micro-batch, the
recomputation or a degree. Then small questions: up to four nodes of one, two or four GPUs and few
micro-batches, where other stages of a pipeline gain most; there stages and policies are pinned,
too. One line a question; exits 1 where a pin wins.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.enumerate import divisors
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.spec.training import Training

NUMBER, SMALL = 60, 40
SEED = 7
ROUNDING = 1 + 1e-9

MODELS = [
    "llama-3.1-8b",
    "llama-3.2-3b",
    "llama-2-13b",
    "gemma-2-9b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "mistral-small-24b",
    "qwen2.5-32b",
    "gpt-oss-20b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
]
MACHINES = [
    "pcie-8xrtx4090",
    "dgx-1v-32g",
    "gcp-g2-standard-96",
    "oci-bm-gpu-a10-4",
    "p4d-24xlarge",
    "pcie-8xl40s",
    "dgx-a100-80g-hdr",
]

SMALL_MACHINES = [*MACHINES, "lan-1x4090", "dgx-1v-16g", "gcp-a2-ultragpu-8g"]

MIXTRAL = Question(
    model=load_model("mixtral-8x7b"),
    cluster=load_cluster("dgx-a100-80g-hdr", gpus=24).cluster,
    training=Training(seq_len=4096, global_batch=384),
    pins=Pins(),
)
"""What full recomputation of all blocks makes more than a tenth slower than that of a few."""

CARDS = Question(
    model=load_model("llama-3.1-8b"),
    cluster=load_cluster("pcie-8xrtx4090", gpus=8).cluster,
    training=Training(seq_len=4096, global_batch=64),
    pins=Pins(),
)
"""What fits on the device split by tensor parallelism alone, over links that are slow."""

ALONE = Question(
    model=load_model("llama-3.2-1b"),
    cluster=load_cluster("dgx-h100", gpus=1).cluster,
    training=Training(seq_len=4096, global_batch=1024),
    pins=Pins(),
)
"""What fits with its loss in many pieces, and is faster with fewer and a block recomputed."""


SMALL_FIXED = [
    ("mixtral-8x7b", "dgx-1v-32g", 4, 2, 1024, 6),
    ("mixtral-8x7b", "p4d-24xlarge", 8, 2, 4096, 3),
    ("llama-3.1-8b", "gcp-a2-ultragpu-8g", 4, 1, 4096, 1),
    ("llama-3.1-8b", "gcp-a2-ultragpu-8g", 4, 4, 2048, 1),
]
"""What fits with the most stages alone, what is far from the fastest until it has more, and what is
until its bare copy is FSDP over one rank."""


def questions(number: int = NUMBER, *, seed: int = SEED) -> Iterator[Question]:
    """So many questions that a layout answers, the same ones for a seed."""
    return islice(chain((MIXTRAL, CARDS), _answered(_drawn, seed)), number)


def _answered(draw: Callable[[random.Random], Question | None], seed: int) -> Iterator[Question]:
    """Of what is drawn, what a layout answers."""
    drawn = random.Random(seed)
    asked = (draw(drawn) for _ in count())
    return (one for one in asked if one is not None and seconds(one) is not None)


def _drawn(drawn: random.Random) -> Question | None:
    machine, gpus = drawn.choice(MACHINES), drawn.choice([2, 4, 8, 8, 16, 32])
    model, seq_len = drawn.choice(MODELS), drawn.choice([2048, 4096, 8192])
    return _asked(model, machine, gpus, seq_len=seq_len, share=drawn.choice([2, 4, 8, 16]))


def small_questions(number: int = SMALL, *, seed: int = SEED) -> Iterator[Question]:
    """So many of few GPUs a node and few micro-batches that a layout answers."""
    fixed = (
        _asked(model, machine, gpus, a_node=a_node, seq_len=seq_len, share=share)
        for model, machine, gpus, a_node, seq_len, share in SMALL_FIXED
    )
    sold = (one for one in fixed if one is not None)
    return islice(chain(sold, _answered(_drawn_small, seed)), number)


def _drawn_small(drawn: random.Random) -> Question | None:
    machine, model = drawn.choice(SMALL_MACHINES), drawn.choice([*MODELS, "llama-3.2-1b"])
    a_node, nodes = drawn.choice([1, 2, 2, 4]), drawn.choice([1, 1, 2, 2, 3, 4])
    seq_len, share = drawn.choice([1024, 2048, 4096, 8192]), drawn.choice([1, 2, 3, 4, 6, 8])
    gpus = a_node * nodes
    return _asked(model, machine, gpus, a_node=a_node, seq_len=seq_len, share=share)


def _asked(
    model: str, machine: str, gpus: int, *, a_node: int | None = None, seq_len: int, share: int
) -> Question | None:
    """None where such machines are not sold, or it is refused."""
    try:
        cluster = load_cluster(machine, gpus=gpus, gpus_per_node=a_node).cluster
    except SpecError:
        return None
    precision: Any = "fp16" if machine.startswith("dgx-1v") else "bf16"
    training = Training(seq_len=seq_len, global_batch=gpus * share, precision=precision)
    asked = Question(model=load_model(model), cluster=cluster, training=training, pins=Pins())
    problem = question_problem(
        model=asked.model, cluster=cluster, training=training, pins=asked.pins
    )
    return None if problem else asked


def stage_pins_of(asked: Question) -> Iterator[dict[str, Any]]:
    """Pins of stages and policies."""
    for pp in divisors(asked.cluster.gpus)[1:]:
        yield {"pp": pp}
    yield {"virtual_stages": 4}
    yield {"sharding": "fsdp"}
    yield {"wrap_blocks": asked.model.layers}
    yield {"checkpoint_blocks": asked.model.layers // 2, "activation_checkpointing": "full"}
    if asked.cluster.gpus > 1:
        yield {"reshard_after_forward": "never"}
        yield {"gradient_sync": "last"}


def pins_of(asked: Question) -> Iterator[dict[str, Any]]:
    """Pins that a user may try on it."""
    gpus = asked.cluster.gpus
    for offload in ("none", "cpu"):
        yield {"offload": offload}
    for micro_batch in (1, 2, 4):
        yield {"micro_batch": micro_batch}
    yield {"micro_batch": 1, "offload": "cpu"}
    yield {"dp_shard": gpus}
    yield {"tp": min(gpus, asked.cluster.gpus_per_node)}
    yield {"activation_checkpointing": "full"}


def seconds(asked: Question) -> float | None:
    """The fastest that is found; None where nothing fits."""
    found = recommend(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    return found.fastest_seconds


def winners(
    asked: Question, *pinning: Callable[[Question], Iterator[dict[str, Any]]]
) -> list[tuple[dict[str, Any], float]]:
    """The pins with which a faster layout is found, each with how much faster it is."""
    free = seconds(asked)
    assert free is not None
    won = []
    for pins in chain.from_iterable(pins_of(asked) for pins_of in pinning):
        pinned = seconds(replace(asked, pins=Pins(**pins)))
        if pinned is not None and pinned * ROUNDING < free:
            won.append((pins, free / pinned))
    return won


def main(numbers: list[str]) -> int:
    """Try them all."""
    lost = tried = 0
    defaults = [NUMBER, SMALL][len(numbers) :]
    number, small = [*map(int, numbers), *defaults]
    tight = ((asked, winners(asked, pins_of)) for asked in questions(number))
    others = ((one, winners(one, pins_of, stage_pins_of)) for one in small_questions(small))
    for asked, won in chain(tight, others):
        tried, lost = tried + 1, lost + bool(won)
        gpus = f"{asked.cluster.gpus} ({asked.cluster.gpus_per_node} a node)"
        name = f"{asked.model.name} on {gpus} of {asked.cluster.name}"
        steps = f"{asked.training.global_batch} x {asked.training.seq_len}"
        said = "; ".join(f"{pins} is {ratio - 1:.2%} faster" for pins, ratio in won)
        print(f"{name}, {steps}: {said or 'no pin wins'}", flush=True)
    print(f"{tried} questions, in {lost} a pin wins")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
