"""Blocks to price, for the tests of compute: a shorthand for one, and strategies for any."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fsdpplan.cost.block.operators import block_operators
from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.params import dense_view
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from tests.cost.clusters import cluster
from tests.cost.problems import BLOCKS, some_models

H100 = cluster(gpus=1).device
A100 = cluster("dgx-a100-80g-hdr", gpus=1).device
MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")
CATALOGUE = ("mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-2-9b", "olmo-2-7b")


def work(model: Model | str = "llama-3.1-8b", **changes: object) -> BlockWork:
    """A block of 8B for one sequence of 4096 tokens, compiled, on one rank."""
    base = BlockWork(
        model=load_model(model) if isinstance(model, str) else model,
        tokens=4096,
        seq_len=4096,
        tp=1,
        sequence_parallel=False,
        precision="bf16",
        mode="none",
        compiled=True,
        autocast=False,
        residual_bytes=2,
        wrapper_operators=0.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@st.composite
def works(draw: st.DrawFn) -> BlockWork:
    """Any block that the cost model can be asked about, dense or not, in any software."""
    named = st.sampled_from(CATALOGUE).map(load_model)
    model = draw(some_models() | named | st.sampled_from(BLOCKS))
    tp = draw(st.sampled_from([1, 2, 4]))
    compiled = draw(st.booleans())
    sequences = draw(st.integers(1, 4))
    seq_len = 2 ** draw(st.integers(7, 14))
    return work(
        draw(st.sampled_from([model, dense_view(model)])),
        tokens=sequences * seq_len,
        seq_len=seq_len,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        mode=draw(st.sampled_from(MODES)),
        compiled=compiled,
        ep=draw(st.sampled_from([1, 2])),
        fused_kernels=draw(st.booleans()),
        joined_projections=draw(st.booleans()),
        attention_kernel=draw(st.sampled_from(["cudnn", "flash", "efficient", "scores"])),
        dropout=draw(st.booleans()),
        fp8_recipe=draw(st.sampled_from(["tensorwise", "rowwise", "delayed"])),
    )


def projection_shapes(drawn: BlockWork) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the products of one block's forward on one rank, in order; m counts the rows of
    all groups, so that 2 m n k are the FLOPs."""
    return tuple((round(p.rows), p.n, p.k) for p in block_products(drawn))


def moved(drawn: BlockWork) -> dict[str, tuple[float, float]]:
    """(forward, backward) bytes of a block's operators by name, those beside products too."""
    return {o.name: (o.forward_bytes, o.backward_bytes) for o in block_operators(drawn)}
