"""Runnable: whatever the search may return, the trainer takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import pytest

from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.search.variants import buckets, changed, restaged
from fsdpplan.spec.layout import Layout
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.support import require_runnable
from tests.search.questions import Question, policies, question

STRIDE = 13
"""Of so many layouts of the search one is tried: neighbours differ in the micro-batch."""


def legal_layouts(asked: Question) -> Iterator[Layout]:
    """Layouts that the search makes and its rules let through, whether they fit or not; of each
    usual one some that are changed."""
    for number, usual in enumerate(islice(policies(asked), 0, None, STRIDE)):
        others = (*buckets(asked.asked, usual), *changed(asked.asked, usual))
        if usual.pp * usual.virtual_stages <= asked.model.layers:
            others += tuple(restaged(asked.asked, usual))
        for layout in (usual, *others[number % STRIDE :: STRIDE]):
            if first_problem(asked.case(layout)) is None:
                yield layout


def document(asked: Question, layout: Layout) -> str:
    """The plan as the trainer is handed it, its stages named."""
    return json.dumps(
        {
            "schema_version": 1,
            "model": asdict(asked.model),
            "cluster": asdict(asked.cluster),
            "training": asdict(asked.training),
            "layout": asdict(named_stages(model=asked.model, layout=layout)),
        }
    )


QUESTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("llama-3.1-8b", 16, {"seq_len": 8192}),
    "long": ("llama-3.1-8b", 32, {"seq_len": 131072, "global_batch": 8}),
    "not a power of two": ("llama-3.1-8b", 24, {"seq_len": 8192, "global_batch": 96}),
    "packed": ("llama-3.1-8b", 16, {"seq_len": 32768, "packed": True}),
    "tied and learned": ("gpt2-large", 8, {"seq_len": 1024}),
    "mixture": ("mixtral-8x7b", 16, {"seq_len": 8192}),
    "fine-grained mixture": ("qwen3-30b-a3b", 16, {"seq_len": 4096}),
    "long mixture": ("qwen3-30b-a3b", 32, {"seq_len": 32768, "global_batch": 16}),
    "latent attention": ("deepseek-v2-lite", 16, {"seq_len": 4096}),
    "long latent attention": ("deepseek-v2-lite", 16, {"seq_len": 32768, "global_batch": 8}),
    "norms over all heads": ("olmo-2-7b", 16, {"seq_len": 4096}),
    "windows": ("mistral-7b-v0.1", 16, {"seq_len": 32768, "global_batch": 8}),
    "sinks and windows": ("gpt-oss-20b", 16, {"seq_len": 32768, "global_batch": 8}),
    "norms behind": ("gemma-2-9b", 16, {"seq_len": 8192}),
    "alibi": ("bloom-7b1", 16, {"seq_len": 2048}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_trainer_takes_every_layout_of_the_search(name: str) -> None:
    model, gpus, settings = QUESTIONS[name]
    asked = question(model, gpus, **settings)
    taken = [
        require_runnable(parse_plan(document(asked, layout))) for layout in legal_layouts(asked)
    ]
    assert len(taken) > 5


@pytest.mark.parametrize("name", ["dense", "mixture", "sinks and windows"])
def test_no_layout_that_is_listed_is_marked_as_not_runnable(name: str) -> None:
    model, gpus, settings = QUESTIONS[name]
    asked = question(model, gpus, **settings)
    listed = asked.answer().ranked
    assert listed
    for line in listed:
        assert line.estimate.runnable
        require_runnable(parse_plan(document(asked, line.layout)))


@pytest.mark.parametrize("model", ["llama-3.2-1b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_the_trainer_takes_every_layout_for_cpu_processes(model: str) -> None:
    asked = question(model, 8, "cpu", seq_len=16384, global_batch=4)
    for layout in legal_layouts(asked):
        require_runnable(parse_plan(document(asked, layout)))
