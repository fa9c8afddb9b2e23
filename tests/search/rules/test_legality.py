"""Legality: what cannot be trained, and what to use instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import first_problem, legal_layout_problem, question_problem
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES
from fsdpplan.spec.model import Experts
from tests.cost.problems import SMALL, Case, case, cases

MIXTURE = replace(SMALL, name="mixture", experts=Experts(experts=4, active=2, hidden=512))
WINDOWED = replace(SMALL, sliding_window=512, full_attention_every=2)
TP = {"sequence_parallel": True, "loss_parallel": True, "sharding": "ddp"}
PP = {"sharding": "ddp", "gradient_sync": "last", "num_microbatches": 8}

OVER_TP = {
    "sequence_parallel": True,
    "loss_parallel": True,
    "sharding": "zero1",
    "runtime": "megatron",
    "experts_over_tp": True,
}

ILLEGAL = [
    ({"dp_shard": 2, "cp": 2, "seq_len": 1026}, "equal work", "--seq-len 1024"),
    (
        {"dp_shard": 2, "cp": 3, "seq_len": 1026, "profile": "cpu", "compile": False},
        "does not divide the heads",
        "another --cp",
    ),
    ({"dp_shard": 2, "cp": 2, "model": WINDOWED}, "sliding windows", "--cp 1"),
    (
        {"dp_shard": 2, "cp": 2, "model": replace(SMALL, attention_sinks=True)},
        "attention sinks",
        "--cp 1",
    ),
    (
        {"dp_shard": 2, "cp": 3, "seq_len": 1536, "cp_attention": "ulysses"},
        "does not divide the heads",
        "--cp-attention ring",
    ),
    (
        {"dp_shard": 2, "cp": 2, "cp_attention": "ulysses", "sharding": "zero1"}
        | {"runtime": "megatron"},
        "another runtime",
        "--cp-attention ring",
    ),
    ({"dp_shard": 2, "ep": 2}, "without experts", "--ep 1"),
    ({"dp_shard": 3, "ep": 3, "model": MIXTURE}, "does not divide the experts", "--ep 2"),
    ({"tp": 2, "dp_shard": 2, **OVER_TP}, "over tp without experts", "leave"),
    ({"dp_shard": 2, **OVER_TP, "model": MIXTURE}, "without tensor parallelism", "--tp 2"),
    (
        {"tp": 2, "dp_shard": 2, **OVER_TP, "model": MIXTURE, "runtime": "fsdp2"},
        "splits every expert",
        "--runtime megatron",
    ),
    (
        {"tp": 4, "dp_shard": 4, "ep": 4, **OVER_TP, "model": MIXTURE},
        "ep x tp does not divide",
        "smaller --ep",
    ),
    (
        {"dp_shard": 8, "ep": 2, "model": MIXTURE, "reshard_after_forward": 4},
        "fewer ranks",
        "always",
    ),
    (
        TP | {"sharding": "fsdp", "dp_shard": 4, "tp": 2, "reshard_after_forward": 2},
        "fewer ranks with tensor",
        "always",
    ),
    ({"cp": 2, "sharding": "ddp"}, "DDP with context", "--sharding fsdp"),
    ({"cp": 2, "dp_shard": 2, "packed": True}, "ring attention with packed", "--no-pack"),
    (
        {"dp_shard": 2, "precision": "fp8", "profile": "dgx-a100-80g-hdr"},
        "no fp8",
        "--precision bf16",
    ),
    ({"tp": 1, "async_tp": True, "sharding": "ddp"}, "async TP without", "--tp 2"),
    ({"tp": 2, "async_tp": True, "compile": False, **TP}, "without torch.compile", "--compile"),
    (
        {"tp": 2, "async_tp": True, "profile": "pcie-8xrtx4090", **TP},
        "async TP without peer access",
        "leave --async-tp out",
    ),
    ({"sharding": "zero1", "dp_replicate": 2}, "a shard group of one", "--dp-shard of at least 2"),
    (
        {"sharding": "zero2", "dp_shard": 2, "reshard_after_forward": "never"},
        "do not reshard",
        "leave",
    ),
    (
        {"sharding": "ddp", "dp_replicate": 2, "offload": "cpu"},
        "offload without",
        "--sharding fsdp",
    ),
    ({"dp_shard": 2, "offload": "cpu", "profile": "cpu", "compile": False}, "on a CPU", "leave"),
    ({"sharding": "ddp", "dp_replicate": 2, "wrap_blocks": 2}, "without FSDP", "--sharding fsdp"),
    ({"dp_shard": 2, "wrap_blocks": 9}, "more blocks a unit", "--wrap-blocks 8"),
    ({"dp_shard": 2, "ddp_bucket_bytes": 2**20}, "without DDP", "--wrap-blocks"),
    (
        {"dp_replicate": 2, "sharding": "ddp", "precision": "fp8", "fp8_all_gather": True},
        "fp8 all-gather",
        "--sharding fsdp",
    ),
    ({"tp": 2, "sharding": "ddp"}, "TP without sequence", "loss_parallel"),
    ({"tp": 2, "runtime": "autocast", **TP}, "runtime autocast", "--runtime fsdp2"),
    ({"sharding": "ddp", "dp_replicate": 2, "reshard_after_forward": "never"}, "DDP", "leave"),
    (
        {"sharding": "ddp", "dp_replicate": 2, "gradient_sync": "reduce_scatter_only"},
        "DDP has no reduce-scatter",
        "every or last",
    ),
    ({"dp_replicate": 2}, "a shard group of one rank", "--dp-shard of at least 2"),
    ({"dp_shard": 2, "gradient_sync": "reduce_scatter_only"}, "without replicas", "every or last"),
    ({"dp_shard": 8, "reshard_after_forward": 3}, "reshard size", "must divide"),
    ({"dp_shard": 8, "reshard_after_forward": 8}, "reshard size", "be smaller"),
    ({"tp": 3, **TP}, "tp does not divide heads", "heads 16"),
    ({"pp": 2, "schedule": "looped_bfs", **PP}, "stages a rank", "at least 2"),
    ({"pp": 2, "schedule": "interleaved_1f1b", **PP}, "stages a rank", "at least 2"),
    ({"pp": 2, "schedule": "zbv", **PP}, "stages a rank", "--virtual-stages 2"),
    ({"pp": 2, "schedule": "1f1b", "virtual_stages": 2, **PP}, "stages a rank", "interleaved_1f1b"),
    ({"virtual_stages": 2, "sharding": "ddp"}, "stages a rank", "1 with others"),
    (
        {"pp": 4, "schedule": "dualpipev", "virtual_stages": 2, **PP, "num_microbatches": 4},
        "does not take",
        "another --micro-batch",
    ),
    ({"pp": 2, "schedule": "1f1b", "stage_blocks": (3, 4), **PP}, "do not hold all", "add up to 7"),
    ({"pp": 16, "schedule": "1f1b", **PP, "num_microbatches": 16}, "more pipeline", "smaller --pp"),
    (
        {"pp": 4, "schedule": "1f1b", **PP, "num_microbatches": 2},
        "does not take",
        "another --micro",
    ),
    (
        {
            "pp": 4,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 2,
            **PP,
            "num_microbatches": 9,
        },
        "does not take",
        "equal rounds",
    ),
    (
        {"pp": 2, "schedule": "1f1b", "sharding": "ddp", "num_microbatches": 4},
        "a pipeline reduces",
        "--gradient-sync last",
    ),
    (
        {**PP, "pp": 2, "schedule": "1f1b", "sharding": "fsdp", "dp_shard": 2},
        "FSDP inside a pipeline",
        "--reshard-after-forward never",
    ),
]


@pytest.mark.parametrize(
    ("options", "reason", "advice"), ILLEGAL, ids=lambda value: str(value)[:40]
)
def test_each_rule_says_what_and_what_instead(
    options: dict[str, object], reason: str, advice: str
) -> None:
    asked = case(**options)  # type: ignore[arg-type]
    problem = first_problem(asked)
    assert problem is not None
    assert reason in problem.reason
    assert advice in problem.sentence
    assert len(problem.sentence.splitlines()) == 1
    assert legal_layout_problem(asked) == problem.sentence


@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD_SCHEDULES))
def test_schedules_that_split_backward_are_refused_with_resharding(schedule: str) -> None:
    split = {**PP, "pp": 2, "schedule": schedule, "virtual_stages": 2, "sharding": "fsdp"}
    problem = case(dp_shard=2, **split).problem
    assert "split-backward" in problem.reason  # type: ignore[attr-defined]
    assert "silently wrong" in problem.sentence  # type: ignore[attr-defined]
    assert case(dp_shard=2, reshard_after_forward="never", compile=False, **split).problem is None


LEGAL = [
    {"dp_shard": 2, "cp": 4},
    {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True, "packed": True},
    {"dp_shard": 2, "cp": 4, "cp_attention": "ulysses"},
    {"dp_shard": 2, "cp": 2, "cp_attention": "ulysses", "model": WINDOWED},
    {"dp_shard": 4, "ep": 4, "model": MIXTURE},
    {"dp_shard": 2, "cp": 2, "ep": 4, "model": MIXTURE},
    {"dp_shard": 2, "precision": "fp8", "fp8_all_gather": True},
    {"tp": 2, "async_tp": True, **TP},
    {"sharding": "zero1", "dp_shard": 4, "gradient_sync": "last"},
    {"sharding": "zero2", "dp_shard": 4, "dp_replicate": 2},
    {"dp_shard": 4, "offload": "cpu"},
    {"dp_shard": 4, "wrap_blocks": 4},
    {"sharding": "ddp", "dp_replicate": 4, "ddp_bucket_bytes": 2**27},
    {"pp": 2, "schedule": "looped_bfs", "virtual_stages": 2, **PP},
    {"pp": 2, "schedule": "1f1b", "stage_blocks": (5, 3), **PP},
]


@pytest.mark.parametrize("options", LEGAL, ids=str)
def test_what_is_legal_is_priced(options: dict[str, object]) -> None:
    asked = case(**options)  # type: ignore[arg-type]
    assert asked.problem is None
    result = asked.estimate
    step = result.step_seconds
    assert 0 < step.lower <= step.expected <= step.upper
    assert 0 < result.mfu_fraction <= 1


def test_a_question_that_no_layout_answers() -> None:
    asked = case("gpt2", sharding="ddp", seq_len=2048)
    common = {"model": asked.model, "cluster": asked.cluster, "training": asked.training}
    assert "--seq-len 1024" in (question_problem(**common, pins=Pins()) or "")  # type: ignore[arg-type]
    fine = case(dp_shard=2)
    common = {"model": fine.model, "cluster": fine.cluster, "training": fine.training}
    assert question_problem(**common, pins=Pins()) is None  # type: ignore[arg-type]
    assert "use --ep 1" in (question_problem(**common, pins=Pins(ep=2)) or "")  # type: ignore[arg-type]


def test_delayed_scales_are_another_runtimes() -> None:
    asked = case(dp_shard=2, precision="fp8")
    delayed = replace(asked, training=replace(asked.training, fp8_recipe="delayed"))
    assert "--fp8-recipe rowwise" in delayed.problem.sentence  # type: ignore[attr-defined]
    elsewhere = replace(delayed, training=replace(delayed.training, runtime="megatron"))
    assert elsewhere.problem is None


def test_a_vocabulary_that_tp_does_not_divide_is_padded_but_of_a_users_model() -> None:
    asked = case("gpt2", tp=4, seq_len=1024, **TP | {"sharding": "fsdp", "dp_shard": 2})
    assert asked.problem is None
    of_a_user = replace(asked, training=replace(asked.training, program="hf"))
    assert of_a_user.problem.reason == "tp does not divide vocab"  # type: ignore[attr-defined]
    assert "50257" in of_a_user.problem.sentence  # type: ignore[attr-defined]


def test_positions_that_the_table_does_not_have() -> None:
    asked = case("gpt2", sharding="ddp", seq_len=2048)
    assert "--seq-len 1024" in asked.problem.sentence  # type: ignore[attr-defined]


def test_ranks_and_batches_must_be_those_of_the_question() -> None:
    fine = case(dp_shard=8, micro_batch=2)
    assert fine.problem is None
    fewer = replace(fine, cluster=case(dp_shard=4).cluster)
    assert "8 ranks, but there are 4 GPUs" in fewer.problem.sentence  # type: ignore[attr-defined]
    odd = replace(fine, training=replace(fine.training, global_batch=20))
    assert "--global-batch 16" in odd.problem.sentence  # type: ignore[attr-defined]
    short = replace(fine, training=replace(fine.training, global_batch=24))
    assert "--micro-batch that divides 3" in short.problem.sentence  # type: ignore[attr-defined]


@given(cases())
def test_legality_does_not_ask_for_memory(drawn: Case) -> None:
    # it is about counts and shapes: what does not fit is another reason
    device = replace(drawn.cluster.device, memory_bytes=1)
    assert replace(drawn, cluster=replace(drawn.cluster, device=device)).problem is None
    assert drawn.layout.world == drawn.cluster.gpus
