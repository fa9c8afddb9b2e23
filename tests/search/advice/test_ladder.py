"""Layouts to try after one that ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.ladder import changed_words, leaner_layouts
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Plan
from fsdpplan.spec.training import Training

GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A layout that keeps much: whole blocks' activations, gathered parameters, two replicas."""
    model = load_model("llama-3.2-1b")
    cluster = load_cluster("dgx-h100", gpus=8, gpus_per_node=None).cluster
    training = Training(seq_len=4096, global_batch=32)
    layout = Layout(
        dp_replicate=2, dp_shard=4, reshard_after_forward="never", micro_batch=4, num_microbatches=1
    )
    return Plan(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=estimate(Case(model=model, cluster=cluster, training=training, layout=layout)),
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )


def test_every_rung_needs_less_and_keeps_the_batch(plan: Plan) -> None:
    rungs = leaner_layouts(plan, needed_bytes=None)
    assert rungs
    for rung in rungs:
        assert rung.layout.global_batch == plan.layout.global_batch
        assert rung.layout.world == plan.layout.world
        assert rung.estimate.memory.peak_device_bytes < plan.estimate.memory.peak_device_bytes
        assert rung.estimate.runnable
        assert rung.words


def test_the_fastest_is_first(plan: Plan) -> None:
    seconds = [rung.estimate.step_seconds.expected for rung in leaner_layouts(plan, needed_bytes=1)]
    assert seconds == sorted(seconds)


def test_the_whole_ladder_is_on_it(plan: Plan) -> None:
    layouts = [rung.layout for rung in leaner_layouts(plan, needed_bytes=None)]
    assert {layout.activation_checkpointing for layout in layouts} >= {"none", "op", "full"}
    assert {layout.reshard_after_forward for layout in layouts} == {"never", "always"}
    assert {layout.micro_batch for layout in layouts} == {1, 2, 4}
    assert {layout.dp_shard for layout in layouts} == {4, 8}
    assert any(layout.loss_chunks > 1 for layout in layouts)


def test_a_prediction_that_was_too_low_counts_for_every_rung(plan: Plan) -> None:
    predicted = plan.estimate.memory.peak_allocated_bytes
    available = available_bytes(cluster=plan.cluster, training=plan.training)
    factor = 2 * available / predicted
    rungs = leaner_layouts(plan, needed_bytes=int(factor * predicted))
    assert rungs
    assert all(rung.estimate.memory.peak_device_bytes * factor <= available for rung in rungs)
    assert len(rungs) < len(leaner_layouts(plan, needed_bytes=None))


def test_at_the_end_of_the_ladder_there_is_nothing(plan: Plan) -> None:
    assert leaner_layouts(plan, needed_bytes=10_000 * GIB) == ()


def test_changes_are_named_by_their_options() -> None:
    failed = Layout(dp_replicate=2, dp_shard=2, micro_batch=4)
    leaner = replace(failed, micro_batch=2, num_microbatches=2, activation_checkpointing="full")
    assert changed_words(failed, leaner) == "--micro-batch 2 --activation-checkpointing full"
