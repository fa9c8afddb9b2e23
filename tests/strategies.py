"""Hypothesis strategies for our own values, shared by all tests.

    @given(models(), layouts())
    def test_...(model, layout): ...

Values are legal by construction and small enough to reason about; widths are multiples that real
models use, so that shards and heads divide unless a test asks otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, LatentAttention, Model, Router
from fsdpplan.spec.plan import (
    CollectiveCost,
    Estimate,
    Interval,
    MemoryBreakdown,
    Plan,
    RankedLayout,
    TimeBreakdown,
)
from fsdpplan.spec.training import Training

NODE_TYPES = ("dgx-a100-80g-hdr", "dgx-a100-80g-hdr1", "dgx-h100", "dgx-h200", "dgx-b200")


@st.composite
def models(draw: DrawFn, *, max_layers: int = 48) -> Model:
    """Dense decoders: Llama-like, Qwen-like or GPT-like."""
    head_dim = draw(st.sampled_from([32, 64, 128]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 8]))
    hidden = heads * head_dim
    gpt = draw(st.booleans())
    model = Model(
        name="drawn",
        layers=draw(st.integers(1, max_layers)),
        hidden=hidden,
        ffn_hidden=64 * draw(st.integers(1, hidden // 16)),
        heads=heads,
        kv_heads=heads if gpt else kv_heads,
        head_dim=head_dim,
        vocab=draw(st.sampled_from([256, 4096, 32000, 50257, 128256])),
        tied_embeddings=draw(st.booleans()),
    )
    if not gpt:
        return replace(model, attention_bias=draw(st.booleans()), qk_norm=draw(st.booleans()))
    return replace(
        model,
        mlp="gelu",
        norm="layernorm",
        positions="learned",
        max_positions=draw(st.sampled_from([128, 1024, 4096])),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )


ROUTERS = (
    Router(),
    Router(normalised=False, scaling=16.0),
    Router(scores="sigmoid", scaling=2.5),
)


@st.composite
def mixtures(draw: DrawFn, *, max_layers: int = 48) -> Model:
    """Decoders with experts: few wide ones or many narrow ones, shared ones, dense blocks first."""
    model = draw(models(max_layers=max_layers))
    experts = draw(st.sampled_from([2, 4, 8, 64, 128]))
    experts_of = Experts(
        experts=experts,
        active=draw(st.integers(1, min(experts, 8))),
        hidden=64 * draw(st.integers(1, 16)),
        shared_hidden=64 * draw(st.integers(0, 8)),
        shared_gate=draw(st.booleans()),
        router_bias=draw(st.booleans()),
        bias=draw(st.booleans()),
        dense_layers=draw(st.integers(0, min(3, model.layers))),
        router=draw(st.sampled_from(ROUTERS)),
    )
    return replace(model, experts=experts_of)


@st.composite
def any_models(draw: DrawFn, *, max_layers: int = 48) -> Model:
    """Every architecture that a Model can say: dense or with experts, latent attention, windows."""
    kinds = models(max_layers=max_layers) | mixtures(max_layers=max_layers)
    model = replace(
        draw(kinds),
        mlp=draw(st.sampled_from(["swiglu", "geglu", "gelu"])),
        norm_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qk_norm_width=draw(st.sampled_from(["head", "all_heads"])),
        post_norms=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        attention_sinks=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([0, 64, 4096])),
        full_attention_every=draw(st.sampled_from([1, 2, 6, 10_001])),
    )
    return replace(model, latent=draw(latents(model))) if draw(st.booleans()) else model


@st.composite
def latents(draw: DrawFn, model: Model) -> LatentAttention:
    """Latent attention for heads of the width that `model` has."""
    return LatentAttention(
        kv_rank=64 * draw(st.integers(1, 8)),
        rope_head_dim=model.head_dim // 2,
        value_head_dim=draw(st.sampled_from([32, 64, 128])),
        query_rank=draw(st.sampled_from([0, 128, 1536])),
    )


@st.composite
def clusters(draw: DrawFn, *, max_nodes: int = 16) -> Cluster:
    """A part of one node, or whole nodes, of the catalogue's 8-GPU node types."""
    name = draw(st.sampled_from(NODE_TYPES))
    nodes = draw(st.integers(1, max_nodes))
    gpus = draw(st.integers(1, 8)) if nodes == 1 else 8 * nodes
    return load_cluster(name, gpus=gpus).cluster


@st.composite
def layouts(
    draw: DrawFn,
    *,
    gpus: int | None = None,
    max_microbatches: int = 8,
    data_parallel_only: bool = False,
) -> Layout:
    """Layouts of `gpus` ranks (any small world by default) that a Layout allows."""
    world = gpus if gpus is not None else draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 64, 96]))
    tp = 1 if data_parallel_only else draw(st.sampled_from(divisors(world, 8)))
    pp = 1 if data_parallel_only else draw(st.sampled_from(divisors(world // tp, 8)))
    data_parallel = world // tp // pp
    dp_shard = draw(st.sampled_from(divisors(data_parallel, data_parallel)))
    sharding = draw(st.sampled_from(["fsdp", "ddp"])) if dp_shard == 1 else "fsdp"
    reshards: list[object] = ["always", "never"]
    if sharding == "fsdp":
        reshards += [n for n in divisors(dp_shard, dp_shard) if 1 < n < dp_shard]
    schedules = ["gpipe", "1f1b", "interleaved_1f1b"]
    schedule = "none" if pp == 1 else draw(st.sampled_from(schedules))
    mode = draw(st.sampled_from(["none", "attention", "op", "full"]))
    return Layout(
        dp_replicate=data_parallel // dp_shard,
        dp_shard=dp_shard,
        tp=tp,
        pp=pp,
        sharding=sharding,
        reshard_after_forward=draw(st.sampled_from(reshards)),
        gradient_sync=draw(st.sampled_from(["every", "reduce_scatter_only", "last"])),
        micro_batch=draw(st.integers(1, 4)),
        num_microbatches=draw(st.integers(1, max_microbatches)),
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved_1f1b" else 1,
        activation_checkpointing=mode,
        checkpoint_blocks="all" if mode == "none" else draw(st.sampled_from(["all", 1, 3])),
        sequence_parallel=tp > 1,
        compile=draw(st.booleans()),
    )


@st.composite
def spoken_layouts(draw: DrawFn, *, gpus: int) -> Layout:
    """Layouts of `gpus` ranks with anything that a screen may say of one, legal or not."""
    tp = draw(st.sampled_from(divisors(gpus, 8)))
    pp = draw(st.sampled_from(divisors(gpus // tp, 8)))
    cp = draw(st.sampled_from(divisors(gpus // tp // pp, 4)))
    ranks = gpus // tp // pp // cp
    dp_shard = draw(st.sampled_from(divisors(ranks, ranks)))
    whole = ["ddp"] if dp_shard == 1 else []
    sharding = draw(st.sampled_from(["fsdp", "zero1", "zero2", *whole]))
    looped = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]
    schedules = ["gpipe", "1f1b", *looped, "zbv", "dualpipev"]
    schedule = "none" if pp == 1 else draw(st.sampled_from(schedules))
    stages = 2 if schedule in ("zbv", "dualpipev") else 1
    if schedule in looped:
        stages = draw(st.sampled_from([2, 3]))
    mode = draw(st.sampled_from(["none", "attention", "op", "full"]))
    names = draw(st.booleans())
    return Layout(
        dp_replicate=ranks // dp_shard,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=draw(st.sampled_from(divisors(dp_shard * cp, 8))),
        experts_over_tp=tp > 1 and draw(st.booleans()),
        sharding=sharding,
        reshard_after_forward=draw(st.sampled_from(["always", "never", 2, 8])),
        gradient_sync=draw(st.sampled_from(["every", "reduce_scatter_only", "last"])),
        wrap_blocks=draw(st.sampled_from([1, 2, 3])),
        ddp_bucket_bytes=draw(st.sampled_from([25, 100, 400, 2048])) * 2**20,
        micro_batch=draw(st.integers(1, 8)),
        num_microbatches=draw(st.integers(1, 16)),
        schedule=schedule,
        virtual_stages=stages,
        stage_blocks=tuple(range(3, 3 + pp * stages)) if names else (),
        activation_checkpointing=mode,
        checkpoint_blocks="all" if mode == "none" else draw(st.sampled_from(["all", 1, 3])),
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        async_tp=tp > 1 and draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "cpu"])),
        compile=draw(st.booleans()),
        loss_chunks=draw(st.sampled_from([1, 2, 8])),
        cp_attention=draw(st.sampled_from(["ring", "ulysses"])),
    )


@st.composite
def trainings(draw: DrawFn, *, global_batch: int | None = None) -> Training:
    """Trainings of `global_batch` sequences (any small number by default)."""
    return Training(
        seq_len=draw(st.sampled_from([128, 1024, 4096, 8192])),
        global_batch=global_batch if global_batch is not None else draw(st.integers(1, 512)),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        reduce_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        tokens=draw(st.sampled_from([None, 10**9, 15 * 10**12])),
    )


def _bytes(limit: int = 10**11) -> SearchStrategy[int]:
    return st.integers(0, limit)


def _seconds(limit: float = 60.0) -> SearchStrategy[float]:
    return st.floats(0, limit)


@st.composite
def estimates(draw: DrawFn, *, training: Training, gpus: int) -> Estimate:
    """Estimates whose parts agree; their sizes are not a cost model's."""
    time = TimeBreakdown(
        compute_seconds=draw(st.floats(1e-3, 60.0)),
        exposed_communication_seconds=draw(_seconds()),
        bubble_seconds=draw(_seconds()),
        optimizer_seconds=draw(_seconds()),
    )
    expected = time.total_seconds
    memory = MemoryBreakdown(
        parameters_bytes=draw(_bytes()),
        gradients_bytes=draw(_bytes()),
        optimizer_bytes=draw(_bytes()),
        unsharded_parameters_bytes=draw(_bytes()),
        unsharded_gradients_bytes=draw(_bytes()),
        activations_bytes=draw(_bytes()),
        logits_bytes=draw(_bytes()),
        temporaries_bytes=draw(_bytes()),
        reserved_overhead_bytes=draw(_bytes()),
        context_bytes=draw(_bytes()),
        peak_phase=draw(st.sampled_from(["forward", "loss", "backward", "optimizer"])),
    )
    collective = CollectiveCost(
        collective="all_gather",
        axis="dp_shard",
        ranks=gpus,
        level="nvlink",
        dtype="bf16",
        count=draw(st.integers(0, 1000)),
        bytes=draw(_bytes()),
        seconds=draw(_seconds()),
        exposed_seconds=draw(_seconds()),
    )
    tokens_per_second = training.tokens_per_step / expected
    mfu = draw(st.floats(0, 1))
    return Estimate(
        step_seconds=Interval(lower=expected * 0.8, expected=expected, upper=expected * 1.3),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / gpus,
        mfu_fraction=mfu,
        hfu_fraction=draw(st.floats(mfu, 1)),
        bottleneck="compute",
        runnable=draw(st.booleans()),
        time=time,
        memory=memory,
        communication=(collective,) * draw(st.integers(0, 2)),
    )


@st.composite
def plans(draw: DrawFn) -> Plan:
    """Whole plans with one to three lines."""
    cluster = draw(clusters())
    layout = draw(layouts(gpus=cluster.gpus))
    training = draw(trainings(global_batch=layout.global_batch))
    text = st.text(max_size=40)
    lines = tuple(
        RankedLayout(
            rank=rank,
            layout=layout,
            estimate=draw(estimates(training=training, gpus=cluster.gpus)),
            reason=draw(text),
        )
        for rank in range(1, draw(st.integers(1, 3)) + 1)
    )
    return Plan(
        model=draw(any_models()),
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=lines[0].estimate,
        alternatives=lines,
        sources=tuple(draw(st.dictionaries(text, text, max_size=3)).items()),
        assumptions=tuple(draw(st.lists(text, max_size=2))),
        warnings=tuple(draw(st.lists(text, max_size=2))),
        versions=(("fsdpplan", "0.1.0"), ("python", "3.11")),
    )


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of `number` up to `limit`."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
