"""`explain --why`: what is printed, at each width and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fsdpplan import api
from fsdpplan.cli.options.wanted import wanted
from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.why import kind, verdict_words, why_json, why_screen
from fsdpplan.search.advice import why as module
from fsdpplan.search.advice.difference import Priced, difference, lost_and_won
from fsdpplan.search.advice.why import Side, Threshold, Turned, Why, With, knobs, why
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.spec.training import Training
from tests.schemas import obeys

QUESTION = Question(
    model=api.load_model("llama-3.2-1b"),
    cluster=api.load_cluster("dgx-h100", gpus=4),
    training=Training(seq_len=4096, global_batch=64),
    pins=Pins(cp=1, pp=1, micro_batch=1, wrap_blocks=1, loss_chunks=1, async_tp=False),
)
INPUTS = Inputs(
    model=QUESTION.model,
    cluster=QUESTION.cluster,
    training=QUESTION.training,
    pins=QUESTION.pins,
    sources=(),
    assumptions=(),
    warnings=(),
)


def answer(words: str) -> Why:
    """Without inputs turned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "knobs", lambda *_: ())
        found = why(QUESTION, wanted(words, name="--why"), resized=None, say=lambda _: None)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def slower() -> Why:
    """A layout that is slower, with a threshold made up, and an input without one."""
    found = answer("tp 4")
    link, *_, batch = knobs(QUESTION, None)
    assert found.with_it.best is not None
    threshold = Threshold(
        near=Side(value=5.9e11, first=found.first, has_it=False),
        far=Side(value=6e11, first=found.with_it.best, has_it=True),
        lasts=True,
    )
    return replace(
        found,
        turned=(
            Turned(knob=batch, thresholds=(), searches=4),
            Turned(knob=link, thresholds=(threshold,), searches=7),
        ),
    )


@pytest.mark.parametrize("width", [60, 80])
def test_it_keeps_to_the_width_and_says_where_it_would_win(slower: Why, width: int) -> None:
    screen = why_screen(slower, INPUTS, width=width)
    assert max(map(len, screen.splitlines())) <= width
    text = " ".join(screen.split())
    assert text.startswith("Why not tp 4: llama-3.2-1b on 4 x h100-sxm-80g")
    assert (
        "bandwidth of nvlink within a node, each GPU: from 600 GB/s up, at 590 GB/s not yet" in text
    )
    assert "global batch: nowhere from 8 to 512 (now 64)" in text
    assert text.index("bandwidth of nvlink") < text.index("global batch: nowhere")


def test_the_terms_that_lost_add_up_to_what_is_lost(slower: Why) -> None:
    assert kind(slower) == "slower"
    best = slower.with_it.best
    assert best is not None
    lost, won = module_terms(slower.first, best)
    steps = [one.estimate.step_seconds.expected for one in (slower.first, best)]
    assert sum(lost) + sum(won) == pytest.approx(steps[1] - steps[0], rel=1e-9)
    assert "loses" in verdict_words(slower)
    assert "waits for the host" in verdict_words(slower)  # small products, and collectives to call


def module_terms(first: Priced, other: Priced) -> tuple[list[float], list[float]]:
    lost, won = lost_and_won(first, other)
    assert all(term.change > 0 for term in lost)
    assert all(term.change < 0 for term in won)
    return [term.change for term in lost], [term.change for term in won]


def test_json_has_both_sides_of_each_threshold(slower: Why) -> None:
    document = json.loads(why_json(slower, INPUTS))
    obeys("explain_why", document)
    assert document["verdict"] == "slower"
    assert document["pins"] == {"tp": 4}
    assert document["with_it"]["layout"]["tp"] == 4
    assert document["difference"]["told_apart"]
    batch, link = document["inputs"]
    assert batch["thresholds"] == []
    (threshold,) = link["thresholds"]
    assert threshold["way"] == "up"
    assert (threshold["near"]["has_it"], threshold["far"]["has_it"]) == (False, True)
    assert threshold["far"]["layout"]["tp"] == 4


def test_a_tie_is_said_to_be_one() -> None:
    found = answer("fsdp")
    assert found.with_it.best is not None
    if found.has_it:
        found = answer("ddp")
    assert found.with_it.best is not None
    assert not difference(found.first, found.with_it.best).told_apart
    assert kind(found) == "tie"
    assert "That is a tie" in verdict_words(found)


def test_what_has_it_already_says_so(slower: Why) -> None:
    found = answer("tp 1")
    assert kind(found) == "first"
    assert verdict_words(found) == "What is recommended has it (tp 1)."
    assert why_screen(found, INPUTS, width=80).startswith("Why tp 1: ")
    lost = replace(
        found,
        turned=(
            Turned(
                knob=slower.turned[1].knob,
                thresholds=slower.turned[1].thresholds,
                searches=1,
            ),
        ),
    )
    text = " ".join(why_screen(lost, INPUTS, width=80).split())
    assert "no longer be recommended" in text
    assert "at 590 GB/s it still is (tp 4)" in text


def test_bounds_that_are_broken_are_named(slower: Why) -> None:
    broken = replace(slower, with_it=With(best=None, problem="8 heads do not split over 3 ranks"))
    assert kind(broken) == "not legal"
    assert "8 heads do not split over 3 ranks" in why_screen(broken, INPUTS, width=80)
    document = json.loads(why_json(broken, INPUTS))
    obeys("explain_why", document)
    assert document["with_it"] is None
    large = With(
        best=None,
        needed_bytes=90 * 2**30,
        available_bytes=70 * 2**30,
        nearest=slower.first.case.layout,
    )
    said = verdict_words(replace(slower, with_it=large))
    assert (
        "needs 90.0 GiB of the 70.0 GiB of a GPU that are planned with, 20.0 GiB too much" in said
    )
