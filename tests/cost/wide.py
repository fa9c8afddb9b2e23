"""Cases over the whole space that the cost model prices, also what the search does not offer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Experts, LatentAttention, Model
from fsdpplan.spec.runtime import RUNTIMES
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL, Case
from tests.strategies import divisors

MIXTURE = replace(
    SMALL,
    name="mixture",
    experts=Experts(experts=16, active=2, hidden=1024, shared_hidden=1024, dense_layers=2),
)
LATENT = replace(
    MIXTURE,
    name="latent",
    kv_heads=16,
    latent=LatentAttention(kv_rank=256, rope_head_dim=32, value_head_dim=64, query_rank=512),
)
WINDOWED = replace(SMALL, name="windowed", sliding_window=256, full_attention_every=4)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", *sorted(SPLIT_BACKWARD_SCHEDULES))


@st.composite
def wide_models(draw: st.DrawFn) -> Model:
    """Dense, mixed, latent and windowed models whose widths divide by 8."""
    model = draw(st.sampled_from([SMALL, MIXTURE, LATENT, WINDOWED]))
    return replace(model, layers=draw(st.integers(8, 24)))


@st.composite
def wide_cases(draw: st.DrawFn) -> Case:
    """Cases of any sharding, parallelism, schedule, precision and training software."""
    profile = draw(st.sampled_from(["dgx-a100-80g-hdr1", "dgx-h100", "dgx-b200"]))
    world = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    model = draw(wide_models())
    tp = draw(st.sampled_from(divisors(world, 8)))
    pp = draw(st.sampled_from(divisors(world // tp, 4)))
    cp = draw(st.sampled_from(divisors(world // tp // pp, 4)))
    data_parallel = world // tp // pp // cp
    dp_shard = draw(st.sampled_from(divisors(data_parallel, data_parallel)))
    is_whole = dp_shard * cp == 1
    sharding = "ddp" if is_whole else draw(st.sampled_from(["zero1", "zero2", "fsdp"]))
    ep = 1
    if model.experts and not is_whole:
        ep = draw(st.sampled_from(divisors(dp_shard * cp, 16)))
    schedule, virtual_stages, num_microbatches = _schedule(draw, pp)
    sequence_parallel = tp > 1 and draw(st.booleans())
    layout = Layout(
        dp_replicate=data_parallel // dp_shard,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        sharding=sharding,
        reshard_after_forward="never" if pp > 1 else draw(st.sampled_from(["always", "never"])),
        gradient_sync="last" if pp > 1 else draw(st.sampled_from(["every", "last"])),
        wrap_blocks=draw(st.integers(1, 3)) if sharding == "fsdp" else 1,
        ddp_bucket_bytes=draw(st.sampled_from([2**20, 25 * 2**20, 2**30])),
        micro_batch=draw(st.integers(1, 2)),
        num_microbatches=num_microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        activation_checkpointing=draw(st.sampled_from(["none", "attention", "op", "full"])),
        sequence_parallel=sequence_parallel,
        loss_parallel=tp > 1 and draw(st.booleans()),
        async_tp=sequence_parallel and draw(st.booleans()),
        offload="cpu" if sharding == "fsdp" and draw(st.integers(0, 5)) == 0 else "none",
        compile=draw(st.booleans()),
    )
    cluster = load_cluster(profile, gpus=world).cluster
    training = draw(
        _trainings(layout, has_fp8=cluster.device.peak_fp8_flops_per_second is not None)
    )
    can = training.traits.reshards_stages and schedule not in SPLIT_BACKWARD_SCHEDULES
    if can and pp > 1 and sharding == "fsdp" and draw(st.booleans()):
        layout = replace(layout, reshard_after_forward="always")
    return Case(model=model, cluster=cluster, training=training, layout=layout)


def _schedule(draw: st.DrawFn, pp: int) -> tuple[str, int, int]:
    """(schedule, stages a rank, micro-batches) that go together."""
    if pp == 1:
        return "none", 1, draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(SCHEDULES))
    virtual_stages = 1 if schedule in ("1f1b", "gpipe") else 2
    return schedule, virtual_stages, pp * draw(st.integers(2, 3))


@st.composite
def _trainings(draw: st.DrawFn, layout: Layout, *, has_fp8: bool) -> Training:
    runtime = draw(st.sampled_from([runtime.name for runtime in RUNTIMES]))
    if layout.sharding == "fsdp" or runtime == "autocast":
        runtime = draw(st.sampled_from(["fsdp2", "fsdp1", "llama3", "automodel"]))
    precision = draw(st.sampled_from(["bf16", "fp8"] if has_fp8 else ["bf16"]))
    recipe = draw(st.sampled_from(["tensorwise", "rowwise", "delayed"]))
    gathers_fp8 = precision == "fp8" and recipe != "rowwise" and layout.sharding == "fsdp"
    return Training(
        seq_len=draw(st.sampled_from([512, 4096])),
        global_batch=layout.global_batch,
        precision=precision,
        reduce_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        runtime=runtime,
        fp8_recipe=recipe,
        fp8_all_gather=gathers_fp8 and draw(st.booleans()),
    )
