"""`why`: the best layout with a part that was asked for, and thresholds that hold on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

import pytest

from fsdpplan import api
from fsdpplan.cli.options.wanted import wanted
from fsdpplan.errors import NoFeasibleLayout
from fsdpplan.search.advice import why as module
from fsdpplan.search.advice.why import CLOSE, Knob, Why, knobs, why
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.training import Training

FIXED = {"cp": 1, "pp": 1, "micro_batch": 1, "wrap_blocks": 1, "loss_chunks": 1, "async_tp": False}
"""Of the questions here, so that their searches are quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A question, what is missed in its answer, and which inputs are turned."""

    model: str
    hardware: str
    gpus: int
    batch: int
    words: str
    turned: tuple[str, ...]
    """Beginnings of names of inputs."""
    fixed: tuple[tuple[str, object], ...] = ()
    """Beside what is fixed of all."""
    seq_len: int = 4096

    @property
    def question(self) -> Question:
        return Question(
            model=api.load_model(self.model),
            cluster=self.resized(self.gpus),
            training=Training(seq_len=self.seq_len, global_batch=self.batch),
            pins=Pins(**{**FIXED, **dict(self.fixed)}),  # type: ignore[arg-type]
        )

    def resized(self, gpus: int) -> Cluster:
        return api.load_cluster(self.hardware, gpus=gpus)


def situation(
    model: str, hardware: str, gpus: int, batch: int, words: str, *turned: str
) -> Situation:
    return Situation(
        model=model, hardware=hardware, gpus=gpus, batch=batch, words=words, turned=turned
    )


SITUATIONS = {
    "dense, many nodes, links": situation(
        "llama-3.2-1b", "dgx-h100", 16, 256, "hsdp", "bandwidth of nvlink"
    ),
    "dense, many nodes, latency": situation("llama-3.2-1b", "dgx-h100", 16, 256, "hsdp", "latency"),
    "dense, many nodes, nowhere": situation("llama-3.2-1b", "dgx-h100", 16, 256, "fsdp", "bf16"),
    "dense, many nodes, sequences": situation(
        "llama-3.2-1b", "dgx-h100", 16, 256, "hsdp", "sequence"
    ),
    "dense, one node, memory": situation(
        "llama-3.1-8b", "dgx-h100", 8, 64, "no recompute", "GPU memory"
    ),
    "dense, one node, links": situation(
        "llama-3.1-8b", "dgx-h100", 8, 64, "no recompute", "bandwidth of nvlink"
    ),
    "dense, many nodes, tp": situation(
        "llama-3.1-8b", "dgx-h100", 16, 64, "tp 2", "bandwidth of nvlink"
    ),
    "dense, many nodes, GPUs": situation("llama-3.1-8b", "dgx-h100", 16, 64, "tp 2", "GPUs"),
    "dense, many nodes, batch": situation(
        "llama-3.1-8b", "dgx-h100", 16, 64, "tp 2", "global batch"
    ),
    "experts, links": situation(
        "mixtral-8x7b", "dgx-h100", 32, 256, "ep 4", "bandwidth of infiniband"
    ),
    "experts, memory": situation("mixtral-8x7b", "dgx-h100", 32, 256, "no recompute", "GPU memory"),
    "many nodes, pipeline, nowhere": situation(
        "llama-3.1-8b", "dgx-h100", 16, 64, "pp 2", "bandwidth of infiniband"
    ),
    "dense, does not fit, nowhere": replace(
        situation("llama-3.1-8b", "dgx-h100", 8, 64, "ddp", "GPU memory"), fixed=(("tp", 1),)
    ),
}
"""Each with a threshold, or with none where its name says so."""


def answered(one: Situation, monkeypatch: pytest.MonkeyPatch) -> Why:
    """The answer, where only some inputs are turned."""
    every: Callable[..., tuple[Knob, ...]] = knobs

    def some(*given: object) -> tuple[Knob, ...]:
        return tuple(knob for knob in every(*given) if knob.name.startswith(one.turned))

    monkeypatch.setattr(module, "knobs", some)
    asked_for = wanted(one.words, name="--why")
    asked = one.question
    asked = replace(asked, pins=asked_for.freed(asked.pins))
    found = why(asked, asked_for, resized=one.resized, say=lambda _: None)
    assert found is not None
    assert len(found.turned) == len(one.turned)
    return found


def planned_with(question: Question, found: Why) -> bool:
    """Whether a plan of its own, which knows of nothing before, has what was asked for."""
    try:
        plan = api.recommend(
            question.model, question.cluster, question.training, **question.pins.given()
        )
    except NoFeasibleLayout:
        return False
    return found.wanted.allows(plan.layout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SITUATIONS)
def test_planning_on_both_sides_of_a_threshold_shows_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = SITUATIONS[name]
    found = answered(one, monkeypatch)
    assert any(turn.thresholds for turn in found.turned) == ("nowhere" not in name)
    for turn in found.turned:
        knob = turn.knob
        for threshold in turn.thresholds:
            near, far = threshold.near, threshold.far
            assert near.has_it == found.has_it != far.has_it
            assert planned_with(knob.at(near.value), found) == near.has_it
            assert planned_with(knob.at(far.value), found) == far.has_it
            if not knob.steps:
                high, low = max(near.value, far.value), min(near.value, far.value)
                assert 1 < high / low <= CLOSE * (1 + 1e-9)
            assert min(knob.range) <= far.value <= max(knob.range)
        if not turn.thresholds and not knob.steps:
            least, most = knob.range
            for value in (least, sqrt(least * knob.now), sqrt(knob.now * most), most):
                assert planned_with(knob.at(value), found) == found.has_it


def test_what_does_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SITUATIONS["dense, does not fit, nowhere"]
    monkeypatch.setattr(module, "knobs", lambda *_: ())
    asked_for = wanted(one.words, name="--why")
    found = why(one.question, asked_for, resized=None, say=lambda _: None)
    assert found is not None
    having = found.with_it
    assert (having.best, having.problem) == (None, "")
    assert having.needed_bytes is not None
    assert having.available_bytes == one.question.available_bytes < having.needed_bytes
    assert having.nearest is not None
    assert having.nearest.sharding == "ddp"


@pytest.mark.parametrize(("words", "said"), [("tp 5", "no degrees"), ("ep 2", "experts")])
def test_what_is_not_legal_says_why(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "knobs", lambda *_: ())
    one = SITUATIONS["dense, many nodes, links"]
    found = why(one.question, wanted(words, name="--why"), resized=None, say=lambda _: None)
    assert found is not None
    assert found.with_it.best is None
    assert said in found.with_it.problem


def test_links_are_turned_by_what_a_gpu_has() -> None:
    """So that a threshold can be typed as --inter-bw and --intra-bw."""
    one = SITUATIONS["dense, many nodes, tp"]
    named = {
        knob.name.partition(" of ")[2].partition(" ")[0]: knob
        for knob in knobs(one.question, None)
        if "each GPU" in knob.name
    }
    for flag, name in (("intra", "nvlink"), ("inter", "infiniband")):
        typed = api.load_cluster(
            "dgx-h100", gpus=16, **{f"{flag}_bandwidth_bytes_per_second": 2e11}
        )
        turned = named[name].at(2e11).cluster
        rates = [
            [level.ports * level.port_bandwidth_bytes_per_second for level in cluster.levels]
            for cluster in (typed, turned)
        ]
        if flag == "inter":
            assert typed == turned
        assert named[name].now == (450e9 if flag == "intra" else 50e9)
        assert rates[0][1] == rates[1][1]
