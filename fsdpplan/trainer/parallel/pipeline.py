"""Pipeline parallelism: blocks in stages, micro-batches through them by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from ..config import LayoutConfig, PlanConfig
from ..model.balance import Pressure
from ..model.loss import loss_function
from ..precision import compute_dtype
from ..scaler import LossScaler, scaled
from ..text.packing import BESIDE_TOKENS, MicroBatch, joined, model_inputs
from ..torch_versions import (
    few_micro_batches,
    greet_nobody,
    keep_no_outputs,
    leave_outputs_unchecked,
    let_go_of_gradients,
    lowered,
)
from .gradient_sums import PipelineSums
from .mesh import Meshes
from .pipeline_balance import carried_choices, pressed_stages
from .pipeline_stages import StageShare, rank_shares, rank_stages
from .replicas import ReplicaGradients
from .tensor_parallel import loss_context
from .tied_tables import TiedTables

ONE_STAGE_SCHEDULES: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

MANY_STAGES_SCHEDULES: dict[str, Callable[..., Any]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
if hasattr(pipelining, "ScheduleDualPipeV"):  # torch_versions.py refuses it where there is none
    MANY_STAGES_SCHEDULES["dualpipev"] = pipelining.ScheduleDualPipeV


class Pipeline:
    """The stages of this rank under the plan's schedule."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        plan: PlanConfig,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        assert meshes.pp is not None
        shares = rank_shares(plan, pp_rank=meshes.pp.get_local_rank())
        self._plan, self._device = plan, device
        self._layout = plan.layout
        self._scaler: LossScaler | None = None
        last = [stage for stage, share in zip(stages, shares, strict=True) if share.is_last]
        self._loss_of = loss_function(plan, device, last[0] if last else None)
        self._has_first = any(share.is_first for share in shares)
        self._has_last = any(share.is_last for share in shares)
        self._tables = None
        if plan.training.adapters is None:  # beside which tables are frozen
            self._tables = TiedTables.of(stages, shares, plan, meshes.pp)
        self._sums = PipelineSums.of(stages, plan.layout)
        self._replicas = None
        if plan.layout.sharding == "ddp" and meshes.axis("dp_replicate") is not None:
            self._replicas = ReplicaGradients(
                stages, plan, meshes.parameters["dp_replicate"].get_group()
            )
        self._no_loss = torch.zeros((), device=device)
        self._group = meshes.pp.get_group()
        self._stages = dict(zip(shares, stages, strict=True))
        self._schedules: dict[bool, tuple[Any, dict[str, bool]]] = {}

    def _schedule(self, *, is_pressed: bool) -> tuple[Any, dict[str, bool]]:
        """torch's schedule and its options, made when the first step asks for it, which knows what
        stages tell each other. `is_pressed`: by an auxiliary loss."""
        if is_pressed not in self._schedules:
            beside = (carried_choices(self._plan.model),) if is_pressed else ()
            staged = [
                _stage(stage, share, self._plan, self._device, self._group, beside=beside)
                for share, stage in self._stages.items()
            ]
            if self._sums is not None:
                self._sums.watch(staged)
            schedule = planned_schedule(self._plan, staged, self._loss)
            self._schedules[is_pressed] = schedule, keep_no_outputs(schedule, staged)
        return self._schedules[is_pressed]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        scaler: LossScaler | None = None,
        pressure: Pressure | None = None,
    ) -> Tensor:
        """Gradients of the mean loss, and of the auxiliary loss of `pressure`; returns the mean on
        ranks with the last stage, else 0."""
        self._scaler = scaler
        schedule, options = self._schedule(is_pressed=pressure is not None)
        pressed = (
            nullcontext() if pressure is None else pressed_stages(self._stages.items(), pressure)
        )
        losses: list[Tensor] = []
        batch = joined(micro_batches)
        if self._sums is not None:
            self._sums.begin()
        if self._replicas is not None:
            self._replicas.begin()
        with loss_context(self._layout), pressed:
            schedule.step(
                *((batch["tokens"],) if self._has_first else ()),
                target=batch["targets"] if self._has_last else None,
                losses=losses,
                **options,
                **{name: batch[name] for name in BESIDE_TOKENS if name in batch},
            )
        if self._replicas is not None:
            self._replicas.finish()
        if self._tables is not None:
            self._tables.sum_gradients()
        return torch.stack(losses).detach().sum() if losses else self._no_loss

    @torch.no_grad()
    def losses(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The loss of each of any number of micro-batches, on ranks with the last stage; nothing on
        others. Forward alone, which torch's schedules cannot do in all releases (not in 2.8)."""
        me, found = dist.get_rank(self._group), dict[int, Tensor]()
        ranks = stage_ranks(self._layout)
        held: dict[tuple[int, int], Tensor] = {}
        for tick in forward_ticks(ranks, len(micro_batches)):
            messages = []
            for stage, number in tick:
                receiver = ranks[stage + 1] if stage + 1 < len(ranks) else None
                if ranks[stage] == me:
                    batch = micro_batches[number]
                    given = held.pop((stage, number)) if stage else batch.tokens
                    out = self._stage_output(stage, given, batch)
                    if receiver is None:
                        found[number] = out
                    elif receiver == me:
                        held[stage + 1, number] = out
                    else:
                        messages.append(self._message(dist.isend, out.contiguous(), receiver))
                elif receiver == me:
                    held[stage + 1, number] = self._hidden(self._device)
                    message = held[stage + 1, number]
                    messages.append(self._message(dist.irecv, message, ranks[stage]))
            for work in dist.batch_isend_irecv(messages) if messages else ():
                work.wait()
        return [found[number] for number in sorted(found)]

    def _stage_output(self, index: int, given: Tensor, batch: MicroBatch) -> Tensor:
        """What a stage of this rank makes of `given`; the last one, the loss."""
        share, stage = next(each for each in self._stages.items() if each[0].index == index)
        with loss_context(self._layout):
            out: Tensor = stage(given, **model_inputs(batch))
            return self._loss_of(out, batch.targets) if share.is_last else out

    def _message(self, operation: Callable[..., Any], values: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(
            operation, values, dist.get_global_rank(self._group, rank), group=self._group
        )

    def _hidden(self, device: torch.device) -> Tensor:
        return torch.empty(
            hidden_shape(self._plan), dtype=compute_dtype(self._plan.training), device=device
        )

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._loss_of(outputs, targets) / self._layout.num_microbatches
        return scaled(loss, self._scaler)


def stage_ranks(layout: LayoutConfig) -> list[int]:
    """The pipeline rank of each stage, first to last."""
    owners = {
        stage: rank for rank in range(layout.pp) for stage in rank_stages(layout, pp_rank=rank)
    }
    return [owners[stage] for stage in range(len(owners))]


def forward_ticks(ranks: Sequence[int], micro_batches: int) -> list[list[tuple[int, int]]]:
    """When each stage takes each micro-batch forward, as (stage, micro-batch) of each tick; a rank
    takes one in a tick, and what stages give is sent between ticks.

    `ranks` are those of the stages. All ranks make the same list, so that none waits for a message
    that another one is not sending. Who is farthest goes first, so that little is held meanwhile.
    """
    reached = [0] * micro_batches
    ticks: list[list[tuple[int, int]]] = []
    while any(stage < len(ranks) for stage in reached):
        tick: dict[int, tuple[int, int]] = {}
        for number in sorted(range(micro_batches), key=lambda each: (-reached[each], each)):
            stage = reached[number]
            if stage < len(ranks):
                tick.setdefault(ranks[stage], (stage, number))
        for _, number in tick.values():
            reached[number] += 1
        ticks.append(list(tick.values()))
    return ticks


def hidden_shape(plan: PlanConfig) -> tuple[int, int, int]:
    """Of what a stage hands to the next: each rank of tp its own part of the sequence."""
    layout = plan.layout
    length = plan.training.seq_len // layout.cp
    split = length // layout.tp if layout.sequence_parallel else length
    return layout.micro_batch, split, plan.model.hidden


def planned_schedule(
    plan: PlanConfig, stages: list[PipelineStage], loss_of: Callable[..., Tensor]
) -> Any:
    """torch's schedule; the losses that it is given are shares of the mean already."""
    layout = plan.layout
    options: dict[str, Any] = {
        "n_microbatches": layout.num_microbatches,
        "loss_fn": loss_of,
        "scale_grads": False,
    }
    if layout.schedule in ONE_STAGE_SCHEDULES:
        (stage,) = stages
        return few_micro_batches(ONE_STAGE_SCHEDULES[layout.schedule], stage, **options)
    return lowered(MANY_STAGES_SCHEDULES[layout.schedule](stages, **options))


def _stage(
    module: nn.Module,
    share: StageShare,
    plan: PlanConfig,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    beside: Sequence[Tensor],
) -> PipelineStage:
    """`module` with its shapes stated, so that ranks need not find them out."""
    layout, training = plan.layout, plan.training
    tokens = (layout.micro_batch, training.seq_len // layout.cp)
    hidden = torch.empty(
        hidden_shape(plan),
        dtype=compute_dtype(training),
        device="meta",
        requires_grad=True,
    )
    first = torch.empty(tokens, dtype=torch.int64, device="meta")
    return stated_stage(
        module, share, plan, device, group, first=first, hidden=hidden, beside=beside
    )


def stated_stage(
    module: nn.Module,
    share: StageShare,
    plan: PlanConfig,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    first: Tensor,
    hidden: Tensor,
    beside: Sequence[Tensor] = (),
) -> PipelineStage:
    """torch's stage of `module`; `first` is like what the first stage is given, `hidden` like what
    stages hand on, and what is `beside` it."""
    layout = plan.layout
    stage = PipelineStage(
        module,
        share.index,
        layout.pp * layout.virtual_stages,
        device,
        input_args=first if share.is_first else (hidden, *beside),
        # what the last stage gives is sent nowhere: only their number counts
        output_args=hidden if share.is_last else (hidden, *beside),
        group=group,
    )
    leave_outputs_unchecked(stage)
    greet_nobody(stage)
    let_go_of_gradients(stage)
    return stage
