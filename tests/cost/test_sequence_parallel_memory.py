"""Sequence parallelism with selective recomputation keeps 34 s b h / t bytes a layer."""

from __future__ import annotations

import pytest

from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.memory.activations import saved_bytes
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.training import Training


@pytest.mark.parametrize(("hidden", "heads", "tp"), [(6144, 64, 8), (12288, 96, 8), (4096, 32, 4)])
@pytest.mark.parametrize("runtime", ["megatron_2020", "megatron_deepspeed"])
def test_a_layer_keeps_what_the_formula_says(
    runtime: RuntimeName, hidden: int, heads: int, tp: int
) -> None:
    seq_len = 2048
    model = Model(
        name="gpt",
        layers=2,
        hidden=hidden,
        ffn_hidden=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=51_200,
        mlp="gelu",
        norm="layernorm",
        positions="learned",
        max_positions=seq_len,
    )
    training = Training(seq_len=seq_len, global_batch=1, precision="fp16", runtime=runtime)
    layout = Layout(
        tp=tp,
        sharding="ddp",
        sequence_parallel=True,
        activation_checkpointing="attention",
        compile=False,
    )
    cluster = load_cluster("dgx-a100-80g-hdr", gpus=tp).cluster
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    kept = saved_bytes(block_work(case), "attention")
    # arXiv 2205.05198, table 2: sequence parallelism and selective recomputation
    assert kept == pytest.approx(34 * seq_len * hidden / tp, rel=0.02)
