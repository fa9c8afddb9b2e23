"""One step of one pipeline rank: the trainer's decoder in stages, torch's schedules, FSDP2 and TP.

The trainer does not run pipelines yet; stages are cut from its decoder as they will be. Stages talk
to nobody: a fake process group's messages arrive at once, and torch's first exchange of shapes,
which it cannot answer, is replaced by stating them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import InferenceMode
from torch.distributed.tensor.parallel import loss_parallel

from fsdpplan.cost.pipeline_stages import layout_rank_stages, layout_stage_blocks
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer import materialise
from fsdpplan.trainer.config import PlanConfig
from fsdpplan.trainer.model import Decoder, next_token_loss
from fsdpplan.trainer.parallelize import TORCH_DTYPES, apply_checkpointing, apply_fsdp
from fsdpplan.trainer.step import make_optimizer
from tests.ground_truth.fake_cluster import (
    CollectiveCounter,
    LiveBytes,
    cuda_like_norms,
    fake_tensors,
    fake_world,
)
from tests.ground_truth.fsdp_step import RECIPE, MeasuredStep, plan_config
from tests.ground_truth.tp_step import shard_tensors

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class StageModel(nn.Module):
    """Blocks `first` to `last` of a decoder, with the embedding or the head at the ends."""

    def __init__(self, decoder: Decoder, first: int, last: int) -> None:
        super().__init__()
        is_head = last == len(decoder.layers)
        self.tok_embeddings = decoder.tok_embeddings if first == 0 else None
        self.layers = nn.ModuleList(list(decoder.layers.values())[first:last])
        self.norm = decoder.norm if is_head else None
        self.output = decoder.output if is_head else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers:
            h = block(h)
        if self.norm is None or self.output is None:
            return h
        logits: Tensor = self.output(self.norm(h))
        return logits


def measured_pp_step(
    model: Model, training: Training, layout: Layout, *, pp_rank: int
) -> MeasuredStep:
    """Run two steps of the first data-parallel rank of stage rank `pp_rank`; measure the second.

    Gradients are not clipped.
    """
    plan = plan_config(model, training, layout)
    per_stage = layout_stage_blocks(model=model, layout=layout)
    with fake_world(layout.world, rank=pp_rank * (layout.world // layout.pp)), cuda_like_norms():
        mesh = init_device_mesh(
            "cpu",
            (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
        )
        with torch.device("meta"):
            decoder = Decoder(plan.model)
        if layout.tp > 1:
            shard_tensors(decoder, mesh["tp"], loss_parallel=layout.loss_parallel)
        starts = [sum(per_stage[:stage]) for stage in range(len(per_stage) + 1)]
        stages = {
            index: StageModel(decoder, starts[index], starts[index + 1])
            for index in layout_rank_stages(layout)[pp_rank]
        }
        data_axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        for stage in stages.values():
            blocks = list(stage.layers)
            apply_checkpointing(blocks, plan.layout)
            apply_fsdp(stage, blocks, plan, mesh[data_axes])
        group = mesh["pp"].get_group()
        original = _PipelineSchedule._warmup_p2p
        _PipelineSchedule._warmup_p2p = _state_shapes  # type: ignore[method-assign]
        try:
            with fake_tensors():
                return _measure(stages, plan, group, len(per_stage), CollectiveCounter(mesh))
        finally:
            _PipelineSchedule._warmup_p2p = original  # type: ignore[method-assign]


def _state_shapes(self: Any, stages: Any, *_: Any) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _pipeline_stages(
    stages: dict[int, StageModel], plan: PlanConfig, group: Any, num_stages: int
) -> list[PipelineStage]:
    layout, training = plan.layout, plan.training
    shape = (layout.micro_batch, training.seq_len)
    dtype = TORCH_DTYPES[training.precision]
    tokens = torch.zeros(shape, dtype=torch.int64)
    # sequence parallelism hands over each rank's own tokens
    split = (layout.micro_batch, training.seq_len // layout.tp)
    hidden = torch.zeros(*split, plan.model.hidden, dtype=dtype, requires_grad=True)
    logits = torch.zeros(*shape, plan.model.vocab, dtype=dtype, requires_grad=True)
    return [
        PipelineStage(
            stage,
            index,
            num_stages,
            torch.device("cpu"),
            group=group,
            input_args=tokens if index == 0 else hidden,
            output_args=logits if index == num_stages - 1 else hidden,
        )
        for index, stage in stages.items()
    ]


def _measure(
    stages: dict[int, StageModel],
    plan: PlanConfig,
    group: Any,
    num_stages: int,
    collectives: CollectiveCounter,
) -> MeasuredStep:
    for stage in stages.values():
        materialise(stage, torch.device("cpu"))
    pipeline_stages = _pipeline_stages(stages, plan, group, num_stages)
    schedule_class = get_schedule_class(SCHEDULES[plan.layout.schedule])
    schedule = schedule_class(
        pipeline_stages[0]
        if issubclass(schedule_class, PipelineScheduleSingle)
        else pipeline_stages,
        n_microbatches=plan.layout.num_microbatches,
        loss_fn=next_token_loss,
    )
    model = nn.ModuleList(stages.values())
    optimizer = make_optimizer(model, RECIPE, fused=True)
    rows = plan.layout.micro_batch * plan.layout.num_microbatches
    tokens = torch.zeros((rows, plan.training.seq_len), dtype=torch.int64)
    is_first, is_last = 0 in stages, num_stages - 1 in stages
    live = LiveBytes()
    live.add("parameters", *model.parameters())
    live.add("tokens", tokens)
    splits_loss: AbstractContextManager[None] = (
        loss_parallel() if plan.layout.loss_parallel else nullcontext()
    )
    with live, collectives, splits_loss:
        for _ in range(2):
            collectives.rows.clear()
            live.start_phase("step")
            schedule.step(
                *((tokens,) if is_first else ()),
                target=tokens if is_last else None,
                losses=[] if is_last else None,
                return_outputs=False,
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return MeasuredStep(
        rows=dict(collectives.rows),
        peak_bytes=live.peak,
        peak_in_phase=dict(live.peak_in_tag),
        state_bytes=live.total,
    )
