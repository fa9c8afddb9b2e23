"""Tight questions: models that hardly fit, on machines where little is free. Does a pin ever win?

    python -m tests.search.tight [NUMBER]

Consumer cards, V100, L4, A10, A100 of 40 GB, dense models and mixtures. What the search finds
freely must be as fast as what it finds with a pin, where the pin is offload, the micro-batch, the
recomputation or a degree. One line a question; exits 1 where a pin wins.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.spec.training import Training

NUMBER = 60
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


def questions(number: int = NUMBER, *, seed: int = SEED) -> Iterator[Question]:
    """So many questions that a layout answers, the same ones for a seed."""
    drawn = random.Random(seed)
    found = 0
    for fixed in (MIXTRAL, CARDS)[:number]:
        found += 1
        yield fixed
    while found < number:
        asked = _drawn(drawn)
        if asked is not None and seconds(asked) is not None:
            found += 1
            yield asked


def _drawn(drawn: random.Random) -> Question | None:
    machine, gpus = drawn.choice(MACHINES), drawn.choice([2, 4, 8, 8, 16, 32])
    model, seq_len = load_model(drawn.choice(MODELS)), drawn.choice([2048, 4096, 8192])
    precision: Any = "fp16" if machine.startswith("dgx-1v") else "bf16"
    training = Training(
        seq_len=seq_len, global_batch=gpus * drawn.choice([2, 4, 8, 16]), precision=precision
    )
    try:
        cluster = load_cluster(machine, gpus=gpus).cluster
    except SpecError:
        return None
    asked = Question(model=model, cluster=cluster, training=training, pins=Pins())
    problem = question_problem(model=model, cluster=cluster, training=training, pins=Pins())
    return None if problem else asked


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


def winners(asked: Question) -> list[tuple[dict[str, Any], float]]:
    """The pins with which a faster layout is found, each with how much faster it is."""
    free = seconds(asked)
    assert free is not None
    won = []
    for pins in pins_of(asked):
        pinned = seconds(replace(asked, pins=Pins(**pins)))
        if pinned is not None and pinned * ROUNDING < free:
            won.append((pins, free / pinned))
    return won


def main(numbers: list[str]) -> int:
    """Try them all."""
    lost = tried = 0
    for asked in questions(int(numbers[0]) if numbers else NUMBER):
        won = winners(asked)
        tried, lost = tried + 1, lost + bool(won)
        name = f"{asked.model.name} on {asked.cluster.gpus} of {asked.cluster.name}"
        steps = f"{asked.training.global_batch} x {asked.training.seq_len}"
        said = "; ".join(f"{pins} is {ratio - 1:.2%} faster" for pins, ratio in won)
        print(f"{name}, {steps}: {said or 'no pin wins'}", flush=True)
    print(f"{tried} questions, in {lost} a pin wins")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
