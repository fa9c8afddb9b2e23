"""The same layout, shrunk until a laptop trains it: a rehearsal with real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fsdpplan.cost.estimate import unbuilt_words
from fsdpplan.cost.schedule.order import microbatches_refusal
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.errors import LaunchError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, LatentAttention, Model
from fsdpplan.spec.plan import Case, Estimate, Plan
from fsdpplan.spec.training import Training

SEQ_LEN = 64
HEADS, HEAD_DIM = 4, 16
BLOCKS = 4
EXPERTS, WINDOW = 4, 16
NEEDS_CUDA = ("async_tp", "offload")
"""What a CPU has not."""


class Estimator(Protocol):
    """The cost model's entry."""

    def __call__(self, case: Case) -> Estimate: ...


def smoke_plan(*, plan: Plan, estimate: Estimator) -> Plan:
    """`plan` with every degree above 1 brought down to 2 and a tiny model, on CPU processes.

    What the layout does stays: which axes there are, when parameters are freed and gradients
    reduced, accumulation, checkpointing, wrapping.
    """
    _require_trainable(plan)
    layout = smoke_layout(plan.layout)
    model = smoke_model(plan.model, layout)
    layout = named_stages(model=model, layout=layout)
    training = replace(
        smoke_training(plan.training), seq_len=SEQ_LEN, global_batch=layout.global_batch
    )
    per_node = layout.world // 2 if plan.cluster.nodes > 1 and layout.world % 2 == 0 else None
    cluster = load_cluster("cpu", gpus=layout.world, gpus_per_node=per_node).cluster
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    return replace(
        plan,
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=estimate(case),
        alternatives=(),
        sources=(("plan", f"shrunk from {plan.model.name} on {plan.cluster.gpus} GPUs"),),
        assumptions=("a smoke run says that the layout trains, not how fast it will",),
        warnings=_left_out(plan),
        rules=(),
    )


def smoke_training(training: Training) -> Training:
    """In number formats and with an optimizer that a CPU has."""
    eight_bit = training.optimizer == "adamw_8bit"
    return replace(
        training,
        precision=training.activation_dtype,
        precision_switch="none",
        fp8_all_gather=False,
        optimizer="adamw" if eight_bit else training.optimizer,
        tokens=None,
    )


def _left_out(plan: Plan) -> tuple[str, ...]:
    """What a CPU cannot show of the plan."""
    small, layout = smoke_training(plan.training), plan.layout
    said = []
    if small.precision != plan.training.precision:
        said.append(f"{plan.training.precision} needs a GPU: the smoke run is in {small.precision}")
    elif plan.training.precision_switch != "none":
        said.append(f"the change of precision needs GPUs: the smoke run is in {small.precision}")
    if small.optimizer != plan.training.optimizer:
        said.append(f"{plan.training.optimizer} needs a GPU: the smoke run has {small.optimizer}")
    said += [
        f"{name} needs a GPU: the smoke run goes without"
        for name in NEEDS_CUDA
        if getattr(layout, name) not in (False, "none")
    ]
    return tuple(said)


def smoke_layout(layout: Layout) -> Layout:
    """Each degree above 1 becomes 2; an integer reshard and expert parallelism keep groups smaller
    than the shards, where they are."""
    shard, reshard = min(layout.dp_shard, 2), layout.reshard_after_forward
    cp = min(layout.cp, 2)
    if isinstance(reshard, int) and layout.dp_shard > 1:
        shard, reshard = (4 if reshard < layout.shard_ranks else 2), 2
    if 1 < layout.ep < layout.shard_ranks and shard * cp == 2:
        shard *= 2
    pipeline = min(layout.pp, 2)
    return replace(
        layout,
        pp=pipeline,
        dp_replicate=min(layout.dp_replicate, 2),
        dp_shard=shard,
        cp=cp,
        tp=min(layout.tp, 2),
        ep=min(layout.ep, 2),
        reshard_after_forward=reshard,
        wrap_blocks=min(layout.wrap_blocks, 2),
        micro_batch=min(layout.micro_batch, 2),
        num_microbatches=_smoke_microbatches(layout, pipeline),
        stage_blocks=(),
        checkpoint_blocks="all" if layout.checkpoint_blocks == "all" else 1,
        loss_chunks=min(layout.loss_chunks, 2),
        async_tp=False,
        offload="none",
        compile=False,
    )


def _smoke_microbatches(layout: Layout, pp: int) -> int:
    """The fewest above one that the schedule takes, and at least as many as stages."""
    least = min(layout.num_microbatches, 2 if pp == 1 else 2 * pp * layout.virtual_stages)
    return next(
        number
        for number in range(least, layout.num_microbatches + 8)
        if not microbatches_refusal(schedule=layout.schedule, pp=pp, num_microbatches=number)
    )


def smoke_model(model: Model, layout: Layout) -> Model:
    """A tiny model with the same parts: norms, biases, grouped heads, tied embeddings, experts,
    latent attention, windows."""
    stages = layout.pp * layout.virtual_stages
    return replace(
        model,
        name=f"{model.name}-smoke",
        layers=max(BLOCKS, stages * layout.wrap_blocks),
        hidden=HEADS * HEAD_DIM,
        ffn_hidden=2 * HEADS * HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS if model.kv_heads == model.heads else HEADS // 2,
        head_dim=HEAD_DIM,
        vocab=256,
        max_positions=SEQ_LEN,
        sliding_window=_smoke_window(model),
        networks="".join(sorted(set(model.networks))),
        full_attention_every=min(model.full_attention_every, 2),
        experts=None if model.experts is None else _smoke_experts(model.experts),
        latent=None if model.latent is None else _smoke_latent(model.latent),
    )


def _smoke_window(model: Model) -> int:
    """Shorter than a sequence; chunks, of which the trainer takes one, are as long."""
    if not model.sliding_window:
        return 0
    return SEQ_LEN if model.window_kind == "chunked" else WINDOW


def _smoke_experts(experts: Experts) -> Experts:
    return replace(
        experts,
        experts=min(experts.experts, EXPERTS),
        active=min(experts.active, EXPERTS // 2),
        hidden=HEAD_DIM,
        shared_hidden=HEAD_DIM if experts.shared_hidden else 0,
        dense_layers=min(experts.dense_layers, 1),
    )


def _smoke_latent(latent: LatentAttention) -> LatentAttention:
    return replace(
        latent,
        kv_rank=HEAD_DIM,
        rope_head_dim=HEAD_DIM // 2,
        value_head_dim=HEAD_DIM,
        query_rank=2 * HEAD_DIM if latent.query_rank else 0,
    )


def _require_trainable(plan: Plan) -> None:
    if lacking := unbuilt_words(model=plan.model, seq_len=plan.training.seq_len):
        raise LaunchError(
            f"fsdpplan's own trainer cannot build {lacking}, which the plan has for "
            f"{plan.model.name}: there is nothing to smoke-test; try a program of yours by "
            "emit-launch --script"
        )
    if not plan.estimate.runnable:
        raise LaunchError(
            f"fsdpplan's own trainer is FSDP2's and cannot run {plan.training.traits.words}: there "
            "is nothing to smoke-test; plan again with --runtime fsdp2"
        )
