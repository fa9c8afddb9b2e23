"""What a backward pass in two halves keeps between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.memory.weight_gradients import output_gradient_bytes, split_backward_bytes
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.schedule.actions import PassOrder
from fsdpplan.cost.schedule.order import peak_in_flight, peak_weights_pending
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.files.catalogue import load_model
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster
from tests.cost.works import work

LLAMA_8B = load_model("llama-3.1-8b")
BASE = Layout(
    pp=2,
    dp_shard=4,
    virtual_stages=2,
    schedule="zbv",
    num_microbatches=8,
    reshard_after_forward="never",
    gradient_sync="last",
    compile=False,
)


def _held(layout: Layout) -> list[int]:
    training = Training(seq_len=2048, global_batch=layout.global_batch)
    asked = Case(model=LLAMA_8B, cluster=cluster(gpus=8), training=training, layout=layout)
    return [
        split_backward_bytes(asked, rank, remade_bytes=0)
        for rank in pipeline_ranks(model=LLAMA_8B, layout=layout)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "looped_bfs"])
def test_whole_backward_passes_keep_nothing(schedule: Schedule) -> None:
    virtual = 1 if schedule == "1f1b" else 2
    assert _held(replace(BASE, schedule=schedule, virtual_stages=virtual)) == [0, 0]


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_halves_keep_gradients_of_outputs(schedule: Schedule) -> None:
    layout = replace(BASE, schedule=schedule)
    assert min(_held(layout)) > 0
    split = replace(layout, tp=2, sequence_parallel=True, loss_parallel=True)
    assert all(less < more for less, more in zip(_held(split), _held(layout), strict=True))


def outputs(model: Model, *, tokens: int = 10, **changes: object) -> int:
    """Elements of the gradients of all outputs of a block in bf16."""
    block = work(model, tokens=tokens, seq_len=tokens, compiled=False, **changes)
    return output_gradient_bytes(block) // 2


def test_output_gradients_of_a_block_by_hand() -> None:
    """8B: four of width hidden (two norms, two projections), query, key, value, gate and up."""
    assert outputs(LLAMA_8B) == 10 * (4 * 4096 + 4096 + 2 * 1024 + 2 * 14336)


def test_outputs_of_norms_by_hand() -> None:
    """A bias has no output of its own; norms of queries and keys see every head."""
    assert outputs(load_model("gpt2")) == 10 * (4 * 768 + 3 * 768 + 4 * 768)
    qwen3 = load_model("qwen3-4b")
    assert outputs(qwen3) == 10 * (4 * 2560 + 2 * 4096 + 3 * 1024 + 2 * 9728)


def test_a_rank_with_whole_experts_has_outputs_of_its_own_rows() -> None:
    mixtral, tokens = load_model("mixtral-8x7b"), 64
    split, whole = (
        outputs(mixtral, tokens=tokens, tp=4, ep=2, experts_over_tp=over) for over in (False, True)
    )
    # a token's rows come back to one of the ranks, not to each of them in part
    assert split - whole == tokens * 2 * mixtral.hidden * 3 // 4


@given(st.sampled_from(sorted(SPLIT_BACKWARD_SCHEDULES)), st.integers(2, 6), st.integers(2, 6))
def test_no_more_wait_for_their_weights_than_are_alive(
    schedule: Schedule, pp: int, rounds: int
) -> None:
    shape = {"pp": pp, "num_microbatches": rounds * pp, "virtual_stages": 2}
    alive = peak_in_flight(PassOrder(schedule=schedule, **shape))
    waiting = peak_weights_pending(PassOrder(schedule=schedule, **shape))
    for held, pending in zip(alive, waiting, strict=True):
        assert all(few <= many for few, many in zip(pending, held, strict=True))


def test_the_first_stage_is_never_split() -> None:
    """It has no input to differentiate by: nothing of it waits."""
    layout = replace(BASE, schedule="interleaved_zero_bubble", virtual_stages=1)
    first, last = pipeline_ranks(model=LLAMA_8B, layout=layout)
    assert first.waiting_blocks == 0
    assert last.waiting_blocks > 0
    assert isinstance(first, Stage)


@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD_SCHEDULES))
def test_blocks_that_recompute_keep_what_they_made_for_the_half_by_weights(
    schedule: Schedule,
) -> None:
    """Less than what nobody recomputes keeps, and more than where backward is whole."""
    peaks = {}
    for mode in ("none", "full"):
        layout = replace(BASE, schedule=schedule, activation_checkpointing=mode)
        training = Training(seq_len=8192, global_batch=layout.global_batch)
        asked = Case(model=LLAMA_8B, cluster=cluster(gpus=8), training=training, layout=layout)
        assert legal_layout_problem(asked) is None
        peaks[mode] = rank_memory(asked).activations_bytes
    assert 0.1 * peaks["none"] < peaks["full"] < peaks["none"]


@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD_SCHEDULES))
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_checkpointing": "op"}, "--activation-checkpointing full or none"),
        ({"compile": True}, "--no-compile"),
        ({"reshard_after_forward": "always"}, "silently wrong"),
    ],
)
def test_what_torch_cannot_split_is_refused(
    schedule: Schedule, change: dict[str, object], words: str
) -> None:
    layout = replace(BASE, schedule=schedule)
    training = Training(seq_len=2048, global_batch=layout.global_batch)
    asked = Case(model=LLAMA_8B, cluster=cluster(gpus=8), training=training, layout=layout)
    assert legal_layout_problem(asked) is None
    refused = replace(layout, **change)  # type: ignore[arg-type]
    problem = legal_layout_problem(replace(asked, layout=refused))
    assert problem
    assert words in problem
