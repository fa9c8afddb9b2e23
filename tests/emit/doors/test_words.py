"""A target that brings its own program says every field of a plan, or refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.emit.targets import Target, render
from fsdpplan.errors import SpecError
from fsdpplan.spec.adapters import Adapters
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs import accelerate, megatron, torchtitan
from fsdpplan.spec.programs.words import Words, field_names
from fsdpplan.spec.training import Dropout, Training
from tests.emit.doors.orders import SAYABLE, body, make_order, plan_of
from tests.emit.plans import make_plan
from tests.refusals import check_one_line

WORDS: dict[Target, Words] = {
    "torchtitan": torchtitan.WORDS,
    "megatron": megatron.WORDS,
    "accelerate": accelerate.WORDS,
}
FIELDS = (*field_names(Layout), *field_names(Training))

BLOCKS = 4
"""As many as two ranks of two stages each must have."""

VALUES: dict[str, list[Any]] = {
    "dp_replicate": [1, 2],
    "dp_shard": [1, 2, 4],
    "cp": [1, 2],
    "cp_attention": ["ring", "ulysses"],
    "tp": [1, 2],
    "pp": [1, 2],
    "ep": [1, 2],
    "experts_over_tp": [False, True],
    "sharding": ["ddp", "zero1", "zero2", "fsdp"],
    "reshard_after_forward": ["always", "never", 2],
    "gradient_sync": ["every", "reduce_scatter_only", "last"],
    "wrap_blocks": [1, 2],
    "ddp_bucket_bytes": [25 * 2**20, 2**20],
    "micro_batch": [1, 2],
    "num_microbatches": [1, 2, 4],
    "schedule": ["none", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv"],
    "virtual_stages": [1, 2],
    "stage_blocks": [(), (2, 2), (1, 3)],
    "activation_checkpointing": ["none", "attention", "op", "full"],
    "checkpoint_blocks": ["all", 1],
    "sequence_parallel": [False, True],
    "loss_parallel": [False, True],
    "async_tp": [False, True],
    "offload": ["none", "cpu"],
    "compile": [False, True],
    "loss_chunks": [1, 2],
    "adapters": [None, Adapters(rank=8, alpha=16.0)],
    "seq_len": [64, 128],
    "precision": ["bf16", "fp16", "fp32", "fp8"],
    "reduce_dtype": ["fp32", "bf16"],
    "param_dtype": ["fp32", "bf16"],
    "optimizer": ["adamw", "adamw_8bit", "muon"],
    "precision_switch": ["none", "fp8@0.8"],
    "gradient_compression": ["none", "bf16", "powersgd:1:1000"],
    "dropout": [None, Dropout(), Dropout(residual=0.1)],
    "tokens": [None, 10**6, 2 * 10**6],
    "runtime": ["fsdp2", "autocast", "megatron", "megatron_lm", "fsdp1"],
    "program": ["reference", "own", "hf"],
    "fp8_recipe": ["tensorwise", "rowwise", "delayed"],
    "fp8_all_gather": [False, True],
    "torch": [None, "2.9", "2.13"],
    "packed": [False, True],
    "mean_document_tokens": [None, 32],
    "headroom_fraction": [0.08, 0.1],
    "fits_fraction": [0.95, 0.5],
}


@pytest.mark.parametrize("target", WORDS)
def test_every_field_of_a_plan_has_a_word(target: Target) -> None:
    assert set(WORDS[target]) == set(FIELDS)


def test_every_field_is_varied_here() -> None:
    assert set(VALUES) | {"global_batch"} == set(FIELDS)


@pytest.mark.parametrize("target", WORDS)
def test_a_plain_plan_is_said(target: Target) -> None:
    assert body(target, make_plan("cuda", nodes=2, per_node=4, **SAYABLE[target])) is not None


def idle(target: Target, name: str, plan: Plan) -> bool:
    """Fields that change nothing in what runs, for this plan."""
    layout, training = plan.layout, plan.training
    match name:
        case "headroom_fraction" | "fits_fraction" | "torch" | "program":
            return True
        case "packed" | "mean_document_tokens":
            return target == "torchtitan"
        case "gradient_sync":
            return layout.num_microbatches == 1
        case "fp8_recipe":
            return training.precision != "fp8"
        case "compile":
            return target == "megatron"
        case "runtime":
            # Both are DDP under autocast; Megatron's own names are told apart by overlaps.
            return layout.sharding == "ddp" or target == "megatron"
        case "stage_blocks":
            return layout.stage_blocks in ((), (2, 2))
    return False


@st.composite
def layouts(draw: st.DrawFn, target: Target) -> Layout:
    """Layouts near those that the target can say: a few fields are drawn, the others plain."""
    names = draw(st.lists(st.sampled_from(field_names(Layout)), max_size=4, unique=True))
    values = {name: draw(st.sampled_from(VALUES[name])) for name in names}
    try:
        return Layout(**{"dp_shard": 2, **SAYABLE[target], **values})
    except SpecError:
        assume(False)
        raise


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    names = draw(st.lists(st.sampled_from(field_names(Training)[2:]), max_size=3, unique=True))
    values = {name: draw(st.sampled_from(VALUES[name])) for name in names}
    try:
        return Training(**{"seq_len": 64, "global_batch": 1, "precision": "fp32", **values})
    except SpecError:
        assume(False)
        raise


@pytest.mark.parametrize("target", WORDS)
@given(data=st.data())
def test_plans_that_differ_are_told_apart_or_refused(target: Target, data: st.DataObject) -> None:
    layout, training = data.draw(layouts(target)), data.draw(trainings())
    name = data.draw(st.sampled_from(sorted(VALUES)))
    value = data.draw(st.sampled_from(VALUES[name]))
    plan = plan_of(layout, training, layers=BLOCKS)
    try:
        if name in field_names(Layout):
            other = plan_of(replace(layout, **{name: value}), training, layers=BLOCKS)
        else:
            other = plan_of(layout, replace(training, **{name: value}), layers=BLOCKS)
    except SpecError:
        assume(False)
    texts = body(target, plan), body(target, other)
    if None in texts or (plan.layout, plan.training) == (other.layout, other.training):
        return
    if not (idle(target, name, plan) and idle(target, name, other)):
        assert texts[0] != texts[1]


@pytest.mark.parametrize("target", WORDS)
@pytest.mark.parametrize(("name", "values"), VALUES.items())
def test_a_refused_value_is_named(target: Target, name: str, values: list[Any]) -> None:
    """One sentence that says which field and what to type."""
    word = WORDS[target][name]
    for value in values:
        problem = word.problem(name, value)
        if problem is not None:
            assert problem.startswith(f"{name} {value} (")
            assert "plan again with" in problem
        else:
            assert word.values is None or value in word.values


@pytest.mark.parametrize("target", WORDS)
def test_many_problems_make_one_short_line(target: Target) -> None:
    plan = plan_of(
        Layout(
            dp_shard=2,
            pp=2,
            schedule="zbv",
            virtual_stages=2,
            wrap_blocks=2,
            offload="cpu",
            loss_chunks=2,
            reshard_after_forward=2,
        ),
        Training(seq_len=64, global_batch=2, precision="fp16", runtime="fsdp1"),
        layers=BLOCKS,
    )
    with pytest.raises(
        SpecError, match=f"--target {target} cannot express .* more; recommend"
    ) as refusal:
        render(target, make_order(plan))
    check_one_line(refusal.value)


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_stages_that_a_plan_does_not_name_are_not_made_up(target: Target) -> None:
    layout = Layout(**{"pp": 2, "schedule": "1f1b", "num_microbatches": 2, **SAYABLE[target]})
    plan = plan_of(layout, Training(seq_len=64, global_batch=2))
    assert plan.layout.stage_blocks
    unnamed = replace(plan, layout=replace(plan.layout, stage_blocks=()))
    with pytest.raises(SpecError, match="pp 2 of a plan that does not name its stage_blocks"):
        render(target, make_order(unnamed))
