"""Pieces of the loss: tried where they spare recomputation, or let a layout fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.model.shape import infer_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.bounds.fitting import needed_bytes
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import in_pieces, legal_layout_problem, most_saved_bytes
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL, Case, cases
from tests.search.questions import NO_PINS, question

LARGE_VOCAB = replace(SMALL, name="large vocabulary", vocab=4_000_000, tied_embeddings=True)


@given(cases())
def test_pieces_never_spare_more_than_the_bound(drawn: Case) -> None:
    pieces = in_pieces(drawn.layout, training=drawn.training, pins=NO_PINS)
    if pieces is None:
        return
    asked = question(SMALL, 8).asked
    asked = replace(asked, model=drawn.model, cluster=drawn.cluster, training=drawn.training)
    spared = needed_bytes(asked, drawn.layout) - needed_bytes(asked, pieces)
    assert spared <= most_saved_bytes(drawn)


def test_8b_on_8_gpus_need_not_recompute_with_its_loss_in_pieces() -> None:
    """Uncompiled: a compiled loss holds no fp32 copies of the logits."""
    first = (
        question("llama-3.1-8b", 8, compile=False, pp=1, offload="none").answer(limit=3).ranked[0]
    )
    assert first.layout.loss_chunks > 1
    assert first.layout.activation_checkpointing == "none"
    whole = question("llama-3.1-8b", 8, compile=False, pp=1, offload="none", loss_chunks=1).answer(
        limit=1
    )
    assert whole.fastest_seconds is not None
    assert whole.fastest_seconds > first.estimate.step_seconds.expected


def test_a_whole_loss_comes_first_where_nothing_recomputes() -> None:
    first, *_ = question(infer_model(10**8), 8, seq_len=1024).answer().ranked
    assert first.layout.loss_chunks == 1


def test_pieces_are_what_makes_a_large_vocabulary_fit() -> None:
    asked = question(
        LARGE_VOCAB,
        8,
        global_batch=8,
        seq_len=16384,
        tp=1,
        pp=1,
        cp=1,
        reshard_after_forward="always",
    )
    assert (
        not question(LARGE_VOCAB, 8, global_batch=8, seq_len=16384, tp=1, pp=1, cp=1, loss_chunks=1)
        .answer()
        .ranked
    )
    ranked = asked.answer().ranked
    assert ranked
    assert all(entry.layout.loss_chunks > 1 for entry in ranked)
    most = available_bytes(cluster=asked.cluster, training=asked.training)
    assert ranked[0].estimate.memory.peak_device_bytes <= most


def problem(layout: Layout, training: Training | None = None) -> str | None:
    case = Case(
        model=SMALL,
        cluster=load_cluster("dgx-h100", gpus=8).cluster,
        training=training or Training(seq_len=512, global_batch=layout.global_batch),
        layout=layout,
    )
    return legal_layout_problem(case)


PIPED = Layout(
    dp_shard=4,
    pp=2,
    schedule="1f1b",
    num_microbatches=4,
    reshard_after_forward="never",
    gradient_sync="last",
    loss_chunks=4,
)


@pytest.mark.parametrize(
    ("layout", "runtime", "words"),
    [
        (Layout(dp_shard=8, loss_chunks=4), "fsdp2", None),
        (PIPED, "fsdp2", None),
        (Layout(dp_shard=8, loss_chunks=4), "fsdp1", "--runtime fsdp2"),
        (Layout(dp_shard=8, loss_chunks=513), "fsdp2", "--loss-chunks of at most 512"),
        (replace(PIPED, schedule="gpipe"), "fsdp2", "use --schedule 1f1b"),
    ],
)
def test_pieces_that_cannot_be_are_refused_in_words(
    layout: Layout, runtime: str, words: str | None
) -> None:
    training = Training(
        seq_len=512,
        global_batch=layout.global_batch,
        runtime=runtime,  # type: ignore[arg-type]
    )
    found = problem(layout, training)
    assert (found is None) == (words is None), found
    assert words is None or words in (found or "")


def test_a_pinned_number_is_not_changed() -> None:
    training = Training(seq_len=4096, global_batch=8)
    layout = Layout(dp_shard=8)
    assert in_pieces(layout, training=training, pins=Pins(loss_chunks=1)) is None
    found = in_pieces(layout, training=training, pins=NO_PINS)
    assert found is not None
    assert found.loss_chunks == 4
