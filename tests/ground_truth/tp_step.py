"""One step of the trainer's decoder under tensor parallelism and FSDP2, under fake tensors.

The trainer does not run tensor parallelism yet; the plan below is the one that it will: torch's
`parallelize_module` with sequence parallelism, as in PyTorch's tensor-parallel tutorial.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer import materialise
from fsdpplan.trainer.config import PlanConfig
from fsdpplan.trainer.model import Decoder, next_token_loss
from fsdpplan.trainer.parallelize import apply_checkpointing, apply_fsdp, gradient_sync
from fsdpplan.trainer.step import clip_gradients, make_optimizer
from tests.ground_truth.fake_cluster import (
    CollectiveCounter,
    LiveBytes,
    cuda_like_norms,
    fake_tensors,
    fake_world,
)
from tests.ground_truth.fsdp_step import RECIPE, MeasuredStep, plan_config, token_batches


def measured_tp_step(model: Model, training: Training, layout: Layout) -> MeasuredStep:
    """Run two steps of rank 0 and measure the second."""
    plan = plan_config(model, training, layout)
    with fake_world(layout.world), cuda_like_norms():
        mesh = init_device_mesh(
            "cpu",
            (layout.dp_replicate, layout.dp_shard, layout.tp),
            mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
        )
        with torch.device("meta"):
            decoder = Decoder(plan.model)
        shard_tensors(decoder, mesh["tp"], loss_parallel=layout.loss_parallel)
        blocks = list(decoder.layers.values())
        apply_checkpointing(blocks, plan.layout)
        data_axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        apply_fsdp(decoder, blocks, plan, mesh[data_axes])
        with fake_tensors():
            materialise(decoder, torch.device("cpu"))
            return _measure(decoder, plan, CollectiveCounter(mesh))


def shard_tensors(decoder: Decoder, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Projections by columns then rows; all between them split over the sequence."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    inside: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": gather,
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"]
    if decoder.config.mlp in ("swiglu", "geglu"):
        columns.append("feed_forward.w3")
    inside |= {name: ColwiseParallel() for name in columns}
    if decoder.config.qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            inside[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if decoder.config.positions == "learned":
        ends["pos_embeddings"] = SplitPositions()
    parallelize_module(decoder, mesh, ends)
    if decoder.config.tied_embeddings:
        # both are split over the vocabulary, but each was made a parameter of its own
        decoder.output.weight = decoder.tok_embeddings.weight
    for block in decoder.layers.values():
        parallelize_module(block, mesh, inside)


class SplitPositions(ParallelStyle):
    """A position table that every rank has, of which each looks up its own part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_part(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            positions = DTensor.from_local(*inputs, mesh, (Replicate(),), run_check=False)
            return positions.redistribute(placements=(Shard(0),))

        def as_tensor(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(
            module,
            device_mesh,
            input_fn=own_part,  # type: ignore[arg-type]
            output_fn=as_tensor,  # type: ignore[arg-type]
        )


def _measure(model: nn.Module, plan: PlanConfig, collectives: CollectiveCounter) -> MeasuredStep:
    optimizer = make_optimizer(model, RECIPE, fused=True)
    batches = token_batches(plan)
    live = LiveBytes()
    live.add("parameters", *model.parameters())
    live.add("tokens", *(tensor for batch in batches for tensor in batch))
    with live, collectives:
        for _ in range(2):
            collectives.rows.clear()
            live.start_phase("step")
            _forward_backward(model, batches, plan)
            clip_gradients(model, RECIPE.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return MeasuredStep(
        rows=dict(collectives.rows),
        peak_bytes=live.peak,
        peak_in_phase=dict(live.peak_in_tag),
        state_bytes=live.total,
    )


def _forward_backward(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], plan: PlanConfig
) -> None:
    """The trainer's, in the context that a vocabulary-parallel loss needs."""
    for index, (tokens, targets) in enumerate(batches):
        splits_loss: AbstractContextManager[None] = (
            loss_parallel() if plan.layout.loss_parallel else nullcontext()
        )
        is_last = index == len(batches) - 1
        with gradient_sync(model, plan.layout, is_last=is_last), splits_loss:
            loss = next_token_loss(model(tokens), targets) / len(batches)
            torch.autograd.backward(loss)
