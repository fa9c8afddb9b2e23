"""Program rules: a layout is refused at plan time exactly where `parallelize` would refuse it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.search.rules.program import (
    program_problems,
    program_question_problems,
    script_problem,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.training import Precision, ProgramName, Training
from fsdpplan.trainer.config import LayoutConfig, load_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.parallelize import find_blocks
from fsdpplan.trainer.parallel.recompute import apply_checkpointing
from fsdpplan.trainer.user.context_parallel import require_plain_attention
from fsdpplan.trainer.user.model import require_applicable
from fsdpplan.trainer.user.tensor_parallel import planned_styles
from tests.search.questions import question
from tests.trainer import plans

DENSE = Model(
    name="small", layers=4, hidden=64, ffn_hidden=128, heads=8, kv_heads=4, head_dim=8, vocab=256
)
MIXTURE = replace(DENSE, experts=Experts(experts=4, active=2, hidden=64))
WINDOWS = replace(DENSE, sliding_window=16)
WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}


class Own(nn.Module):
    """A model of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"down": nn.Linear(64, 64)}) for _ in range(4))


def built(program: ProgramName, model: Model) -> nn.Module:
    with torch.device("meta"):
        if program == "own":
            return Own()
        if model.experts:
            return transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**WIDTHS, num_local_experts=4, sliding_window=None)
            )
        if model.sliding_window:
            return transformers.MistralForCausalLM(
                transformers.MistralConfig(**WIDTHS, sliding_window=16)
            )
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDTHS))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of all kinds that a program may not know, each as often as not."""
    pp, tp, cp = (draw(st.sampled_from([1, 1, 1, 2])) for _ in range(3))
    tp, cp = tp * draw(st.sampled_from([1, 2])), cp * draw(st.sampled_from([1, 1, 2, 3]))
    dp_shard = draw(st.sampled_from([1, 2, 4]))
    return Layout(
        pp=pp,
        tp=tp,
        cp=cp,
        dp_shard=dp_shard,
        ep=dp_shard if draw(st.integers(0, 3)) == 0 else 1,
        sharding="fsdp" if dp_shard * cp > 1 else draw(st.sampled_from(["ddp", "fsdp"])),
        schedule="1f1b" if pp > 1 else "none",
        stage_blocks=draw(st.sampled_from([(2, 2), (0, 4), (4, 0)])) if pp > 1 else (),
        loss_chunks=draw(st.sampled_from([1, 1, 1, 2])),
        activation_checkpointing=draw(st.sampled_from(["none", "attention", "op", "full"])),
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
    )


def trainer_refuses(
    model: nn.Module, planned: Model, layout: Layout, precision: Precision
) -> str | None:
    """What `parallelize` says of the layout, without its process groups."""
    config = LayoutConfig(**asdict(layout))
    text = plans.plan_text(training={"precision": precision})
    plan = replace(load_plan(text), layout=config, model=plans.config_of_model(planned))
    given = {"layers.*.down": "rowwise"} if isinstance(model, Own) else None
    try:
        require_applicable(model, plan)
        if layout.tp > 1:
            planned_styles(model, layout.tp, given)
        if layout.cp > 1:
            require_plain_attention(model, config)
        apply_checkpointing(find_blocks(model), config)
    except TrainerError as error:
        return str(error)
    return None


def case_of(model: Model, training: Training, layout: Layout) -> Case:
    here = load_cluster("dgx-h100", gpus=8).cluster
    return Case(model=model, cluster=here, training=training, layout=layout)


@pytest.mark.parametrize("program", ["own", "hf"])
@pytest.mark.parametrize("model", [DENSE, MIXTURE, WINDOWS], ids=["dense", "mixture", "windows"])
@given(layout=layouts(), precision=st.sampled_from(["bf16", "fp16"]))
def test_the_rule_says_what_parallelize_would(
    program: ProgramName, model: Model, layout: Layout, precision: Precision
) -> None:
    batch = layout.global_batch
    training = Training(seq_len=64, global_batch=batch, program=program, precision=precision)
    said = next(program_problems(case_of(model, training, layout)), None)
    refused = trainer_refuses(built(program, model), model, layout, precision)
    assert (said is None) == (refused is None), (said, refused)


@given(layouts(), st.sampled_from([DENSE, MIXTURE, WINDOWS]))
def test_the_reference_decoder_is_refused_nothing_by_the_program(
    layout: Layout, model: Model
) -> None:
    training = Training(seq_len=64, global_batch=layout.global_batch)
    assert list(program_problems(case_of(model, training, layout))) == []
    # a program that nobody named may be the one that can run most
    anyone = script_problem(case_of(model, training, layout))
    hf = replace(training, program="hf")
    assert anyone == script_problem(case_of(model, hf, layout))


@pytest.mark.parametrize(
    ("name", "gpus", "profile", "settings"),
    [
        ("llama-3.1-8b", 16, "dgx-h100", {"seq_len": 8192}),
        ("qwen3-30b-a3b", 16, "dgx-h100", {}),
    ],
)
@pytest.mark.parametrize("program", ["own", "hf"])
def test_only_what_the_program_runs_is_listed_and_the_rest_is_counted(
    name: str, gpus: int, profile: str, settings: dict[str, Any], program: ProgramName
) -> None:
    free = question(name, gpus, profile, **settings)
    asked = replace(free, training=replace(free.training, program=program))
    found = asked.answer()
    assert found.ranked
    for line in found.ranked:
        assert first_problem(asked.case(line.layout)) is None
        assert line.layout.ep == 1
        assert program == "hf" or line.layout.cp == 1
    reasons = dict(found.rejected)
    assert any("program" in reason for reason in reasons)


def test_a_program_goes_with_runtime_fsdp2_only() -> None:
    with pytest.raises(SpecError, match="leave --program out, or use --runtime fsdp2"):
        Training(seq_len=64, global_batch=8, runtime="megatron", program="own")


@pytest.mark.parametrize("program", ["torchtitan", "megatron"])
@pytest.mark.parametrize("model", ["qwen3.5-35b-a3b", "nemotron-h-8b", "mixtral-8x7b"])
def test_what_is_named_in_place_of_a_program_is_no_other_refusal(
    program: ProgramName, model: str
) -> None:
    """The trainer behind `--target slurm` is named only for what it can build."""
    asked = load_model(model)
    training = Training(seq_len=2048, global_batch=8, program=program, runtime=RUNTIME[program])
    found = program_question_problems(
        model=asked,
        cluster=load_cluster("dgx-h100", gpus=8).cluster,
        training=training,
        pins=Pins(),
    )
    for sentence in (one.sentence for one in found):
        if "--target slurm" in sentence:
            assert ("--script" in sentence) == bool(asked.unlike_reference)


RUNTIME: dict[ProgramName, RuntimeName] = {"torchtitan": "fsdp2", "megatron": "megatron"}
