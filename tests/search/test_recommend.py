"""Recommend: the winner is the one that pricing everything would find."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.shape import infer_model
from fsdpplan.cost.step import estimate
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.profiles import load_cluster
from fsdpplan.search import recommend as searching
from fsdpplan.search.defaults import default_global_batch
from fsdpplan.search.enumerate import (
    degrees,
    layout_of,
    micro_batches,
    reshard_policies,
    schedules,
    sync_policies,
)
from fsdpplan.search.legality import first_problem
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import CHECKPOINTING, SIMPLER_WINS_FRACTION, recommend
from fsdpplan.search.result import SearchResult
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL

NO_PINS = Pins()

WIDE = replace(SMALL, name="wide", layers=12, hidden=4096, ffn_hidden=16384, head_dim=256)
"""3.1 B parameters: tight on a few GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the search."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins = NO_PINS

    def answer(self, *, limit: int = 10) -> SearchResult:
        """What the search says."""
        return recommend(
            model=self.model,
            cluster=self.cluster,
            training=self.training,
            pins=self.pins,
            limit=limit,
        )


def question(
    model: str | Model,
    gpus: int,
    profile: str = "dgx-h100",
    *,
    seq_len: int = 4096,
    global_batch: int | None = None,
    **pins: object,
) -> Question:
    """A question with the defaults of the command line."""
    return Question(
        model=load_model(model) if isinstance(model, str) else model,
        cluster=load_cluster(profile, gpus=gpus).cluster,
        training=Training(
            seq_len=seq_len,
            global_batch=global_batch or default_global_batch(seq_len=seq_len, gpus=gpus),
        ),
        pins=Pins(**pins),  # type: ignore[arg-type]
    )


def all_layouts(asked: Question) -> Iterator[Layout]:
    """Every leaf of the search, whatever bound would skip it."""
    pins, cluster, training = asked.pins, asked.cluster, asked.training
    for d in degrees(cluster=cluster, pins=pins):
        if d.tp > cluster.levels[0].domain_gpus:
            continue
        for micro_batch in micro_batches(
            training=training, data_parallel=d.data_parallel, pins=pins
        ):
            number = max(1, training.global_batch // (d.data_parallel * micro_batch))
            for schedule, virtual_stages in schedules(
                d=d, model=asked.model, num_microbatches=number, pins=pins
            ):
                for reshard in reshard_policies(d=d, cluster=cluster, pins=pins):
                    for sync in sync_policies(d=d, num_microbatches=number, pins=pins):
                        for mode in CHECKPOINTING:
                            yield layout_of(
                                d,
                                micro_batch=micro_batch,
                                num_microbatches=number,
                                reshard=reshard,
                                sync=sync,
                                schedule=schedule,
                                virtual_stages=virtual_stages,
                                checkpointing=mode,
                                compiled=cluster.device.kind == "cuda",
                            )


def priced(asked: Question) -> list[tuple[Layout, Estimate]]:
    """Everything that is legal and fits, priced."""
    available = available_bytes(cluster=asked.cluster, training=asked.training)
    found = []
    for layout in all_layouts(asked):
        given_ = {
            "model": asked.model,
            "cluster": asked.cluster,
            "training": asked.training,
            "layout": layout,
        }
        if first_problem(**given_) is None:  # type: ignore[arg-type]
            result = estimate(**given_)  # type: ignore[arg-type]
            if result.memory.peak_device_bytes <= available:
                found.append((layout, result))
    return found


def kinds(layout: Layout) -> int:
    """Kinds of parallelism beyond whole copies."""
    return sum((layout.tp > 1, layout.pp > 1, layout.sharding == "fsdp"))


SMALL_QUESTIONS = {
    "8 GPUs": question(SMALL, 8, seq_len=1024, global_batch=32),
    "8 tight GPUs": question(WIDE, 8, "dgx-a100-40g-hdr", global_batch=16),
    "two nodes on one port": question(WIDE, 16, "dgx-a100-80g-hdr1", global_batch=32),
    "6 GPUs": question(SMALL, 6, "dgx-a100-80g-hdr", seq_len=1024, global_batch=36),
    "24 GPUs": question(SMALL, 24, "dgx-a100-80g-hdr1", seq_len=1024, global_batch=48),
    "4 GPUs of GPT-2": question("gpt2", 4, seq_len=1024, global_batch=16),
}


@pytest.mark.parametrize("asked", SMALL_QUESTIONS.values(), ids=SMALL_QUESTIONS.keys())
def test_the_winner_is_that_of_brute_force(asked: Question) -> None:
    everything = priced(asked)
    fastest = min(result.step_seconds.expected for _, result in everything)
    bound = fastest * (1 + SIMPLER_WINS_FRACTION)
    close = [entry for entry in everything if entry[1].step_seconds.expected <= bound]
    simplest = min(kinds(layout) for layout, _ in close)
    expected = min(
        (result.step_seconds.expected, result.memory.peak_allocated_bytes, repr(layout))
        for layout, result in close
        if kinds(layout) == simplest
    )
    winner = asked.answer().ranked[0]
    assert repr(winner.layout) == expected[2]
    assert winner.estimate.step_seconds.expected == expected[0]


@pytest.mark.parametrize("asked", SMALL_QUESTIONS.values(), ids=SMALL_QUESTIONS.keys())
def test_the_list_is_the_best_of_each_spread_of_ranks(asked: Question) -> None:
    best: dict[tuple[int, ...], float] = {}
    for layout, result in priced(asked):
        spread = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
        seconds = result.step_seconds.expected
        best[spread] = min(seconds, best.get(spread, seconds))
    ranked = asked.answer(limit=5).ranked
    listed = sorted(entry.estimate.step_seconds.expected for entry in ranked[:5])
    assert listed[:4] == pytest.approx(sorted(best.values())[:4])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(SMALL_QUESTIONS)), st.integers(0, 2**32))
def test_the_order_of_the_search_never_changes_the_answer(name: str, seed: int) -> None:
    asked = SMALL_QUESTIONS[name]

    def shuffled(**given_: object) -> list[object]:
        found = list(degrees(**given_))  # type: ignore[arg-type]
        random.Random(seed).shuffle(found)
        return found  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "degrees", shuffled)
        other = asked.answer()
    assert other.ranked == asked.answer().ranked
    assert sorted(other.rejected) == sorted(asked.answer().rejected)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Small questions, some of them pinned."""
    gpus = draw(st.sampled_from([1, 2, 3, 6, 8, 16, 24, 48]))
    profile = draw(st.sampled_from(["dgx-a100-40g-hdr", "dgx-a100-80g-hdr1", "dgx-h100"]))
    pins: dict[str, object] = {}
    if draw(st.booleans()):
        pins["micro_batch"] = draw(st.sampled_from([1, 2, 3]))
    if draw(st.booleans()):
        pins["activation_checkpointing"] = draw(st.sampled_from(["none", "attention", "op"]))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["tp", "pp", "dp_shard", "dp_replicate"]))
        pins[name] = draw(st.sampled_from([1, 2, 3, 8]))
    if draw(st.booleans()):
        pins["reshard_after_forward"] = draw(st.sampled_from(["always", "never", 2]))
    if draw(st.booleans()):
        pins["gradient_sync"] = draw(st.sampled_from(["every", "last", "reduce_scatter_only"]))
    return question(
        draw(st.sampled_from([SMALL, WIDE, load_model("llama-3.1-8b"), load_model("gpt2-large")])),
        gpus,
        profile,
        seq_len=1024,
        global_batch=gpus * draw(st.integers(1, 12)),
        **pins,
    )


@settings(max_examples=80, deadline=None)
@given(questions())
def test_every_layout_is_legal_fits_and_keeps_the_pins(asked: Question) -> None:
    available = available_bytes(cluster=asked.cluster, training=asked.training)
    for number, entry in enumerate(asked.answer().ranked, start=1):
        assert entry.rank == number
        assert entry.reason
        assert asked.pins.allows(entry.layout)
        assert entry.layout.schedule not in SPLIT_BACKWARD_SCHEDULES
        assert entry.estimate.memory.peak_device_bytes <= available
        assert entry.layout.global_batch == asked.training.global_batch
        problem = first_problem(
            model=asked.model, cluster=asked.cluster, training=asked.training, layout=entry.layout
        )
        assert problem is None


@settings(max_examples=80, deadline=None)
@given(questions())
def test_the_counts_add_up(asked: Question) -> None:
    result = asked.answer()
    assert result.candidates == result.feasible + sum(number for _, number in result.rejected)
    assert (result.feasible == 0) == (result.ranked == ())
    assert result.nearest_miss is None or not result.ranked
    if result.nearest_miss:
        assert result.nearest_miss.needed_bytes > result.nearest_miss.available_bytes


@settings(max_examples=30, deadline=None)
@given(questions())
def test_the_best_layouts_that_people_look_for_are_in_the_list(asked: Question) -> None:
    every = asked.answer(limit=1000).ranked
    few = asked.answer(limit=3).ranked
    assert [entry.layout for entry in few[:1]] == [entry.layout for entry in every[:1]]

    def is_data_parallel(layout: Layout) -> bool:
        return layout.tp == layout.pp == 1

    if any(is_data_parallel(entry.layout) for entry in every):
        best = min(
            (entry for entry in every if is_data_parallel(entry.layout)),
            key=lambda entry: entry.estimate.step_seconds.expected,
        )
        assert any(is_data_parallel(entry.layout) for entry in few)
        assert any(entry.layout == best.layout for entry in asked.answer(limit=10).ranked)


def test_8b_over_nodes_on_one_port_each_is_not_sharded_flat() -> None:
    result = question("llama-3.1-8b", 128, "dgx-a100-80g-hdr1").answer()
    chosen = result.best_runnable
    assert chosen is not None
    flat = chosen.layout.dp_shard == 128 and chosen.layout.reshard_after_forward in (
        "always",
        "never",
    )
    assert not flat
    per_node = 8
    assert chosen.layout.dp_replicate > 1 or chosen.layout.reshard_after_forward == per_node


@pytest.mark.parametrize("global_batch", [128, 256, 1024])
def test_what_8b_gets_there_beats_flat_sharding(global_batch: int) -> None:
    def best(**pins: object) -> float:
        asked = question(
            "llama-3.1-8b",
            128,
            "dgx-a100-80g-hdr1",
            global_batch=global_batch,
            tp=1,
            pp=1,
            **pins,
        )
        return asked.answer().ranked[0].estimate.step_seconds.expected

    chosen = best()
    for reshard in ("always", "never"):
        assert chosen < best(dp_shard=128, reshard_after_forward=reshard)


def test_70b_on_64_keeps_the_heavy_traffic_inside_the_node() -> None:
    result = question("llama-3.1-70b", 64, "dgx-a100-80g-hdr1").answer()
    winner = result.ranked[0]
    assert 1 < winner.layout.tp <= 8
    data_parallel = [entry for entry in result.ranked if entry.layout.tp == entry.layout.pp == 1]
    assert data_parallel
    assert "a step:" in data_parallel[0].reason
    assert data_parallel[0].estimate.step_seconds.expected > (winner.estimate.step_seconds.expected)


def test_1b_on_8_gpus_is_ddp_where_memory_does_not_need_shards() -> None:
    winner = question(infer_model(10**9), 8, "dgx-h200").answer().ranked[0]
    assert winner.layout.sharding == "ddp"
    assert winner.layout.dp_replicate == 8


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100-80g-hdr", "dgx-h200"])
def test_1b_is_sharded_only_for_more_than_the_error(profile: str) -> None:
    # on 80 GB, shards make room for twice the micro-batch of DDP
    ranked = question(infer_model(10**9), 8, profile).answer().ranked
    ddp = next(entry for entry in ranked if entry.layout.sharding == "ddp")
    fastest = min(entry.estimate.step_seconds.expected for entry in ranked)
    loses = ddp.estimate.step_seconds.expected > fastest * (1 + SIMPLER_WINS_FRACTION)
    assert loses == (ranked[0].layout.sharding != "ddp")


@pytest.mark.parametrize(("gpus", "profile"), [(48, "dgx-h100"), (24, "dgx-a100-80g-hdr1")])
def test_numbers_of_nodes_that_are_no_power_of_two(gpus: int, profile: str) -> None:
    result = question("llama-3.1-8b", gpus, profile).answer()
    assert {entry.layout.world for entry in result.ranked} == {gpus}
    assert any((entry.layout.pp * entry.layout.data_parallel) % 3 == 0 for entry in result.ranked)
    assert result.best_runnable is not None


def test_6_gpus_of_a_node_split_by_2_3_and_6() -> None:
    result = question("llama-3.2-1b", 6).answer()
    assert result.ranked[0].layout.sharding == "ddp"
    shards = {entry.layout.dp_shard for entry in result.ranked if entry.layout.tp == 1}
    assert {1, 2, 3, 6} <= shards


def test_one_gpu_has_nothing_to_spread() -> None:
    (only,) = question("gpt2", 1, seq_len=1024).answer().ranked
    assert only.layout.world == 1
    assert only.layout.sharding == "ddp"
    assert only.estimate.runnable


def test_a_vocabulary_that_tp_does_not_divide_is_a_reason() -> None:
    result = question("gpt2", 8, seq_len=1024, tp=4).answer()
    assert result.ranked == ()
    assert dict(result.rejected)["tp does not divide vocab"] > 0
    assert result.nearest_miss is None


def test_more_stages_than_blocks_is_a_reason() -> None:
    result = question("gpt2", 16, seq_len=1024, pp=16).answer()
    assert result.ranked == ()
    assert dict(result.rejected) == {"more pipeline stages than blocks": result.candidates}


def test_autocast_is_priced_and_not_run() -> None:
    asked = question("gpt2-large", 2, "lambda-2xh100", seq_len=1024, global_batch=32)
    priced_only = replace(asked, training=replace(asked.training, runtime="autocast")).answer()
    assert priced_only.ranked
    assert priced_only.best_runnable is None
