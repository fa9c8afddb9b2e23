"""The same layout, shrunk until a laptop trains it: a rehearsal with real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fsdpplan.errors import LaunchError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Training

SEQ_LEN = 64
HEADS, HEAD_DIM = 4, 16
BLOCKS = 4


class Estimator(Protocol):
    """The cost model's entry."""

    def __call__(
        self, *, model: Model, cluster: Cluster, training: Training, layout: Layout
    ) -> Estimate: ...


def smoke_plan(*, plan: Plan, estimate: Estimator) -> Plan:
    """`plan` with every degree above 1 brought down to 2 and a tiny model, on CPU processes.

    What the layout does stays: which axes there are, when parameters are freed and gradients
    reduced, accumulation, checkpointing, wrapping.
    """
    _require_trainable(plan)
    layout = smoke_layout(plan.layout)
    model = smoke_model(plan.model, layout)
    training = replace(
        plan.training, seq_len=SEQ_LEN, global_batch=layout.global_batch, tokens=None
    )
    per_node = layout.world // 2 if plan.cluster.nodes > 1 and layout.world % 2 == 0 else None
    cluster = load_cluster("cpu", gpus=layout.world, gpus_per_node=per_node).cluster
    return replace(
        plan,
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=estimate(model=model, cluster=cluster, training=training, layout=layout),
        alternatives=(),
        sources=(("plan", f"shrunk from {plan.model.name} on {plan.cluster.gpus} GPUs"),),
        assumptions=("a smoke run says that the layout trains, not how fast it will",),
        warnings=(),
    )


def smoke_layout(layout: Layout) -> Layout:
    """Each degree above 1 becomes 2; an integer reshard keeps groups smaller than the shards."""
    shard, reshard = min(layout.dp_shard, 2), layout.reshard_after_forward
    if isinstance(reshard, int) and layout.dp_shard > 1:
        shard, reshard = (4 if reshard < layout.dp_shard else 2), 2
    return replace(
        layout,
        dp_replicate=min(layout.dp_replicate, 2),
        dp_shard=shard,
        reshard_after_forward=reshard,
        wrap_blocks=min(layout.wrap_blocks, 2),
        micro_batch=min(layout.micro_batch, 2),
        num_microbatches=min(layout.num_microbatches, 2),
        compile=False,
    )


def smoke_model(model: Model, layout: Layout) -> Model:
    """A tiny model with the same parts: norms, biases, grouped heads, tied embeddings."""
    return replace(
        model,
        name=f"{model.name}-smoke",
        layers=BLOCKS,
        hidden=HEADS * HEAD_DIM,
        ffn_hidden=2 * HEADS * HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS if model.kv_heads == model.heads else HEADS // 2,
        head_dim=HEAD_DIM,
        vocab=256,
        max_positions=SEQ_LEN,
    )


def _require_trainable(plan: Plan) -> None:
    if plan.estimate.runnable:
        return
    layout = plan.layout
    axes = ("pp", "cp", "tp", "ep")
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    what = ", ".join(degrees) or f"sharding {layout.sharding}, precision {plan.training.precision}"
    raise LaunchError(
        f"today's trainer cannot run this layout ({what}), so there is nothing to smoke-test: "
        "take a runnable one by fsdpplan recommend with --tp 1 --pp 1 --cp 1"
    )
