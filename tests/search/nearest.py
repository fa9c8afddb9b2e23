"""Questions that no layout answers: is what is named as the nearest the nearest of all layouts?

    python -m tests.search.nearest [NUMBER]

Small models, dense and mixtures and hybrids, on two GPUs with less memory than any layout
needs, with pins and without. Brute force goes through the product of all settings, offload among
them where FSDP2 has it, and pieces of the loss as small as the search has them: none of the legal
layouts may need less than the one that is named. One line a question; exits 1 where one does, or
where something fits that the search did not find.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.search.enumerate import offloads
from fsdpplan.search.pins import attention_over_cp
from fsdpplan.search.rules.legality import LEAST_PIECE_TOKENS, first_problem
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from tests.search.brute import (
    FOUR,
    HYBRID,
    MIXTURE,
    by_megatron,
    by_program,
    every_layout,
    tight,
)
from tests.search.questions import Question, question

NUMBER = 100
SEED = 11

THREE = replace(FOUR, name="three blocks", layers=3)
THREE_OF_EXPERTS = replace(MIXTURE, name="three with experts", layers=3)
MODELS: tuple[Model, ...] = (
    THREE,
    THREE_OF_EXPERTS,
    FOUR,
    HYBRID,
    replace(THREE, name="many words", vocab=128_256),
    replace(THREE_OF_EXPERTS, name="words and experts", vocab=128_256),
)
MACHINES = ("dgx-h100", "pcie-8xrtx4090", "dgx-a100-80g-hdr", "pcie-8xl40s")
PINNED: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"offload": "none"},
    {"offload": "none"},
    {"offload": "cpu"},
    {"tp": 1},
    {"loss_chunks": 1},
    {"micro_batch": 1},
    {"activation_checkpointing": "none"},
    {"reshard_after_forward": "never"},
    {"pp": 2, "offload": "none"},
    {"sharding": "ddp"},
)


def questions(number: int = NUMBER, *, seed: int = SEED) -> Iterator[Question]:
    """So many questions that brute force can go through, the same ones for a seed."""
    drawn = random.Random(seed)
    for _ in range(number):
        yield _drawn(drawn)


def _drawn(drawn: random.Random) -> Question:
    model, pins = drawn.choice(MODELS), drawn.choice(PINNED)
    batch = 2 if model.layers > 3 else drawn.choice((2, 2, 3, 4))
    asked = question(
        model,
        2,
        drawn.choice(MACHINES),
        seq_len=drawn.choice((512, 1024, 4096, 16384)),
        global_batch=batch,
        **pins,
    )
    software = drawn.choice(("fsdp2", "fsdp2", "fsdp2", "fsdp2", "megatron", "torchtitan"))
    if "offload" not in pins and model.name.startswith("three"):
        if software == "megatron":
            return by_megatron(asked)
        if software == "torchtitan":
            return by_program(asked, "torchtitan")
    return asked


def leanest(asked: Question) -> tuple[int, Layout, int] | None:
    """(bytes, layout, legal ones) of the legal layout that needs least of all; None: none is."""
    found: tuple[int, Layout] | None = None
    legal = 0
    on_host = ("cpu",) if offloads(asked.cluster, asked.training) else ()
    for layout in map(_as_trained(asked), every_layout(asked, offloads=("none", *on_host))):
        case = asked.case(layout)
        tokens = local_tokens(training=asked.training, layout=layout)
        if layout.loss_chunks > max(1, tokens // LEAST_PIECE_TOKENS):
            continue
        if not asked.pins.allows(layout) or first_problem(case) is not None:
            continue
        legal += 1
        needed = rank_memory(case).peak_device_bytes
        if found is None or needed < found[0]:
            found = needed, layout
    return None if found is None else (*found, legal)


def _as_trained(asked: Question) -> Callable[[Layout], Layout]:
    """Context parallelism by the attention that the trainer has tests of."""

    def trained(layout: Layout) -> Layout:
        if layout.cp == 1:
            return layout
        kind = attention_over_cp(
            model=asked.model,
            training=asked.training,
            tp=layout.tp,
            cp=layout.cp,
            pins=asked.pins,
        )
        return replace(layout, cp_attention=kind)

    return trained


def without_room(asked: Question, least_bytes: int) -> Question:
    """The question on devices on which the leanest just does not fit."""
    share = asked.asked.available_bytes / asked.cluster.device.memory_bytes
    gib = (least_bytes - 2**20) / share / 2**30
    short = tight(asked, gib)
    return short if short.asked.available_bytes < least_bytes else tight(asked, 0.999 * gib)


def too_far_bytes(asked: Question) -> tuple[int | None, int]:
    """(by how much the named layout needs more than the leanest of brute force, legal layouts);
    None: it was said that none is legal. Less than nothing: with more pieces of the loss than
    brute force tries."""
    found = leanest(asked)
    if found is None:
        return 0, 0
    least, _, legal = found
    answer = without_room(asked, least).answer()
    if answer.ranked:
        peaks = (one.estimate.memory.peak_device_bytes for one in answer.ranked)
        return min(peaks) - least, legal
    miss = answer.nearest_miss
    return (None if miss is None else miss.needed_bytes - least), legal


def main(numbers: list[str]) -> int:
    """Try them all."""
    further = 0
    for asked in questions(int(numbers[0]) if numbers else NUMBER):
        more, legal = too_far_bytes(asked)
        further += more is None or more > 0
        pins = " ".join(f"{name} {value}" for name, value in asked.pins.given().items())
        steps = f"{asked.training.global_batch} x {asked.training.seq_len}"
        said = "none is named" if more is None else f"{more / 2**20:.1f} MiB from the nearest"
        name = f"{asked.model.name} on {asked.cluster.gpus} of {asked.cluster.name}, {steps}"
        print(f"{name}, {asked.training.runtime} {pins}: {legal} layouts, {said}", flush=True)
    print(f"{further} of the named layouts are not the nearest")
    return 1 if further else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
