"""What adapters and a frozen base are made of: the figures of the field, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.memory.sizes import saved_bytes_a_block
from fsdpplan.cost.model.params import (
    adapter_parameter_count,
    block_tensors,
    parameter_count,
    useful_flops_per_token,
)
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.files.catalogue import load_model
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.adapters import Adapters, plain
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster

LLAMA = load_model("llama-3.1-8b")
LORA = Adapters(rank=16, alpha=32.0)
QLORA = replace(LORA, base="nf4")


def _case(adapters: Adapters | None, layout: Layout, gpus: int = 1) -> Case:
    training = Training(seq_len=2048, global_batch=layout.global_batch, adapters=adapters)
    return Case(
        model=LLAMA, cluster=cluster("dgx-h100", gpus=gpus), training=training, layout=layout
    )


ALONE = Layout(sharding="ddp")


def test_a_case_has_the_adapters_and_a_plan_of_it_does_not() -> None:
    case = _case(LORA, ALONE)
    assert plain(case.model) == LLAMA != case.model
    without = replace(case, training=replace(case.training, adapters=None))
    assert without.model == LLAMA


def test_adapters_have_r_times_inputs_and_outputs() -> None:
    h, kv, f = 4096, 1024, 14336
    pairs = 2 * (h + h) + 2 * (h + kv) + 3 * (h + f)
    assert adapter_parameter_count(_case(LORA, ALONE).model) == 32 * 16 * pairs
    assert parameter_count(_case(LORA, ALONE).model) == parameter_count(LLAMA)


def test_the_base_is_kept_in_its_format() -> None:
    """8B: N_b in 0.5159 bytes and N_e in 2, or all in 2."""
    blocks = sum(t.elements for t in block_tensors(LLAMA) if t.is_matrix) * LLAMA.layers
    rest = parameter_count(LLAMA) - blocks
    for adapters, a_weight in ((LORA, 2.0), (QLORA, 0.5 + 1 / 64 + 4 / 16384)):
        state = rank_state(_case(adapters, ALONE), whole_model(LLAMA))
        assert state.frozen == pytest.approx(a_weight * blocks + 2 * rest, rel=1e-6)


def test_adapters_in_fp32_take_16_bytes_each_and_in_bf16_8() -> None:
    trained = adapter_parameter_count(_case(LORA, ALONE).model)
    for dtype, each in (("fp32", 12), ("bf16", 6)):  # and the gradient, while there is one
        state = rank_state(_case(replace(LORA, dtype=dtype), ALONE), whole_model(LLAMA))
        assert state.parameters - state.frozen + state.optimizer == each * trained


def test_over_ranks_all_is_split() -> None:
    state = rank_state(_case(QLORA, Layout(dp_shard=8), gpus=8), whole_model(LLAMA))
    alone = rank_state(_case(QLORA, ALONE), whole_model(LLAMA))
    assert state.parameters == pytest.approx(alone.parameters / 8, rel=1e-4)
    assert state.optimizer == pytest.approx(alone.optimizer / 8, rel=1e-4)


def test_a_block_keeps_the_inputs_that_adapters_read_and_what_is_between_them() -> None:
    """2 (2h + f) + 14 r bytes a token more than where none is adapted: as much as full training,
    and what A returns."""
    kept = {
        adapters: saved_bytes_a_block(_case(adapters, ALONE))["none"]
        for adapters in (LORA, replace(LORA, targets=("o",)), None)
    }
    h, f, r, tokens = 4096, 14336, 16, 2048
    whole, out = kept[LORA], kept[replace(LORA, targets=("o",))]
    assert whole - out == tokens * (2 * (2 * h + f) + 12 * r)
    assert whole - kept[None] == tokens * 14 * r


def test_frozen_weights_take_four_flops_a_token() -> None:
    trained = adapter_parameter_count(_case(LORA, ALONE).model)
    whole = useful_flops_per_token(model=LLAMA, seq_len=2048)
    with_adapters = useful_flops_per_token(model=_case(LORA, ALONE).model, seq_len=2048)
    matmul = parameter_count(LLAMA) - LLAMA.vocab * LLAMA.hidden - 65 * LLAMA.hidden
    assert whole - with_adapters == pytest.approx(2 * matmul - 6 * trained)


@pytest.mark.parametrize(
    ("layout", "gpus", "said"),
    [
        (Layout(sharding="ddp", activation_checkpointing="op"), 1, "checkpointing full"),
        (Layout(dp_shard=2, offload="cpu"), 2, "--base nf4"),
        (
            Layout(dp_shard=1, tp=2, sequence_parallel=True, loss_parallel=True),
            2,
            "--base bf16",
        ),
        (Layout(sharding="ddp", pp=2, schedule="1f1b", num_microbatches=2), 2, "--pp 1"),
    ],
)
def test_what_is_not_planned_is_said(layout: Layout, gpus: int, said: str) -> None:
    problem = legal_layout_problem(_case(QLORA, layout, gpus=gpus))
    assert problem is not None
    assert said in problem


def test_models_and_ranks_without_a_price_are_said() -> None:
    case = _case(replace(LORA, rank=2048), ALONE)
    assert "--lora 1024" in str(legal_layout_problem(case))
    mixture = replace(case, model=load_model("qwen3-30b-a3b"))
    assert "routed experts" in str(legal_layout_problem(mixture))
