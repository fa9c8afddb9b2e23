"""Peak memory of models whose blocks differ from Llama's equals that of the trainer's own step:
windows, sinks, ALiBi, norms behind branches, latent attention, routed experts and gates; in all
modes of recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.trainer.torch_versions import RELEASE
from tests.ground_truth.fsdp_step import case_of, measured_step, training_for


def shallow(name: str, layers: int, **parts: object) -> Model:
    """A family's shapes, few layers, a small vocabulary."""
    return replace(load_model(name), layers=layers, vocab=8192, **parts)  # type: ignore[arg-type]


def all_with_experts(model: Model) -> Model:
    """Without dense blocks at the start."""
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, dense_layers=0))


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    seq_len: int
    mode: ActivationCheckpointing
    tolerance_fraction: float = 0.002
    ep: int = 1


STARCODER = shallow("starcoder2-15b", 3)
GEMMA = shallow("gemma-3-12b", 6)
SINKS = shallow("gpt-oss-20b", 2)
ALIBI = shallow("mpt-7b", 2)
QWEN3 = shallow("qwen3-30b-a3b", 2)
LITE = all_with_experts(shallow("deepseek-v2-lite", 2))
LATENT = replace(LITE, experts=None, ffn_hidden=4096)
CASES = {
    "windows": Case(STARCODER, 16384, "none"),
    "windows, full": Case(STARCODER, 16384, "full"),
    "windows, operations": Case(STARCODER, 16384, "op"),
    "windows, norms behind": Case(GEMMA, 4096, "none"),
    "windows, norms behind, operations": Case(GEMMA, 4096, "op"),
    # the mean over blocks with and without a mask, where two blocks differ
    "masks, sinks, experts": Case(SINKS, 4096, "none", 0.02),
    "masks, sinks, experts, attention": Case(SINKS, 4096, "attention", 0.02),
    "alibi": Case(ALIBI, 2048, "none"),
    "alibi, operations": Case(ALIBI, 2048, "op"),
    "experts": Case(QWEN3, 4096, "none"),
    "experts, operations": Case(QWEN3, 4096, "op"),
    "latent": Case(LATENT, 4096, "none"),
    "latent, operations": Case(LATENT, 4096, "op"),
    "latent, attention": Case(LATENT, 4096, "attention"),
    "latent, experts": Case(LITE, 4096, "full"),
    "latent, experts, operations": Case(LITE, 4096, "op"),
    "latent, experts apart": Case(LITE, 8192, "op", 0.01, ep=8),
    "gated shared experts": Case(shallow("qwen1.5-moe-a2.7b", 2), 4096, "op", 0.005),
}


@pytest.mark.sampled(2)
@pytest.mark.skipif(RELEASE < (2, 12), reason="torch has no kernel for windows, or none for groups")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_peak_equals_that_of_the_trainer(case: Case) -> None:
    layout = Layout(
        dp_shard=8,
        ep=case.ep,
        activation_checkpointing=case.mode,
        reshard_after_forward="never" if case.ep > 1 else "always",
    )
    assert_peak(case.model, layout, seq_len=case.seq_len, within=case.tolerance_fraction)


V2 = shallow("deepseek-v2", 4)
LATENT_PIPELINE = Layout(
    dp_shard=16,
    pp=2,
    ep=8,
    micro_batch=2,
    num_microbatches=2,
    schedule="interleaved_1f1b",
    virtual_stages=2,
    reshard_after_forward="never",
    gradient_sync="last",
    activation_checkpointing="op",
    loss_chunks=2,
)
MOSTLY = Layout(
    dp_shard=48,
    ep=8,
    reshard_after_forward="never",
    activation_checkpointing="op",
    checkpoint_blocks=3,
)
WHOLE = {
    # 2.3 % too much: what experts over several ranks hold in a pipeline's backward is not priced
    "pipeline, with a dense block": (replace(V2, vocab=102400), LATENT_PIPELINE, 4096, 0, 0.03),
    # 5 % too little: the dense block's part beside a small table is not priced right
    "pipeline, with a dense block, few rows": (V2, LATENT_PIPELINE, 4096, 0, 0.06),
    "pipeline, head": (V2, LATENT_PIPELINE, 4096, 1, 0.01),
    "operations of three in four": (V2, MOSTLY, 16384, 0, 0.03),
}


@pytest.mark.sampled(2)
@pytest.mark.skipif(RELEASE < (2, 12), reason="torch has no kernel for windows, or none for groups")
@pytest.mark.parametrize(
    ("model", "layout", "seq_len", "pp_rank", "within"), WHOLE.values(), ids=WHOLE.keys()
)
def test_peak_of_latent_attention_with_experts_equals_that_of_the_trainer(
    model: Model, layout: Layout, seq_len: int, pp_rank: int, within: float
) -> None:
    assert_peak(model, layout, seq_len=seq_len, pp_rank=pp_rank, within=within)


def assert_peak(
    model: Model, layout: Layout, *, seq_len: int, within: float, pp_rank: int = 0
) -> None:
    """The predicted peak is the measured one."""
    training = training_for(layout, seq_len=seq_len)
    rank = pp_rank * (layout.world // layout.pp)
    measured = measured_step(model, training, layout, rank=rank).peak_bytes
    stage = pipeline_ranks(model=model, layout=layout)[pp_rank]
    in_flight = in_flight_blocks(model=model, layout=layout)[pp_rank]
    eager = case_of(model, training, replace(layout, compile=False))
    predicted = stage_memory(eager, stage, in_flight_blocks=in_flight).peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=within)
