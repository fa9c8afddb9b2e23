"""Pipeline passes: all micro-batches through a pipeline, with data parallelism around them.

Parameters are gathered before the first micro-batch (FSDP's, ZeRO's updated ones), and where stages
are resharded, for each pass behind a forward pass of its stage. Gradients are reduced in or after
each stage's last backward pass. The first rank ends last: what other ranks reduce meanwhile hides
in their wait.

Dual passes: DualPipe's forward and backward pass of two micro-batches side by side.

A rank computes with one of them while tokens of the other are on their way to their experts or
back. Both together take what is longer, the computation of both or the exchanges of both:

    T = max((cf + cb) * M / (M - e), wf + wb),  at most f + b

cf, cb: what forward and backward compute; wf, wb: what they would wait for exchanges; M: the
device's multiprocessors, of which the exchanges' kernels hold e as long as the pair runs.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1 and figure 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.compute import device_parts
from fsdpplan.cost.model.shards import Stage, block_cases, block_kinds
from fsdpplan.cost.network.placement import pp_group
from fsdpplan.cost.play.clocks import played
from fsdpplan.cost.play.pipeline import PipelineTiming, played_pipeline
from fsdpplan.cost.read.exposed import ExposedSeconds
from fsdpplan.cost.read.passes import Passes, fsdp_micro_batch, plain_seconds, replica_batch
from fsdpplan.cost.schedule.order import layout_order, paired_passes
from fsdpplan.cost.schedule.stages import (
    StageKinds,
    layout_rank_stages,
    pipeline_ranks,
    stage_kinds,
)
from fsdpplan.cost.step import replica
from fsdpplan.cost.step.fsdp import (
    NO_SECONDS,
    backward_pass,
    early_micro_batch,
    forward_pass,
    with_seconds,
)
from fsdpplan.cost.step.pipeline import (
    WAITING_SCHEDULES,
    Pair,
    PipelineStep,
    Seconds,
    fsdp_gathering,
)
from fsdpplan.cost.step.replica import ReplicaBatch
from fsdpplan.cost.traffic.block_times import block_times
from fsdpplan.cost.traffic.calls import Calls, call_seconds, group_seconds
from fsdpplan.cost.traffic.fsdp import Units, fsdp_units, reduced_rounds
from fsdpplan.cost.traffic.rank import (
    message_bytes,
    table_seconds,
    tp_gradient_calls,
    tp_pass_calls,
)
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPasses:
    """What passes take side by side."""

    seconds: tuple[Pair, ...] = ()
    """Of each stage, beside a pass of the rank's other one; empty: as long as alone."""
    saved_seconds: tuple[float, ...]
    """Of each rank in a step: by how much its passes are shorter."""
    hidden_seconds: tuple[float, ...]
    """Of each rank in a step: exchanges that nobody waits for."""
    exchange_left: tuple[Pair, ...] = ()
    """Part of what (forward, backward) of each stage wait for exchanges that is left."""


def dual_passes(case: Case, stages: StageKinds, times: Sequence[Pair]) -> DualPasses:
    """Those of a case: nothing is saved where its software or schedule has none, or its blocks
    exchange nothing."""
    layout = case.layout
    none = DualPasses(saved_seconds=(0.0,) * layout.pp, hidden_seconds=(0.0,) * layout.pp)
    if layout.schedule != "dualpipev" or not case.training.traits.overlaps_passes:
        return none
    waits = stages.each([_exchange_seconds(case, stage) for stage in stages.kinds])
    if not any(map(any, waits)):
        return none
    busy_multiprocessors = case.training.traits.exchange_multiprocessors
    seconds, left_of = [*times], [(1.0, 1.0)] * len(times)
    saved, hidden = [], []
    counts = paired_passes(layout_order(layout))
    for held, numbers in zip(layout_rank_stages(layout), counts, strict=True):
        of_rank = hidden_of_rank = 0.0
        for forward, backward, number in zip(held, held[::-1], numbers, strict=True):
            alone = times[forward][0] + times[backward][1]
            waiting = waits[forward][0] + waits[backward][1]
            both = side_by_side_seconds(
                computed=alone - waiting,
                exchanged=waiting,
                device=case.cluster.device,
                busy_multiprocessors=busy_multiprocessors,
            )
            left = both / alone
            seconds[forward] = (left * times[forward][0], seconds[forward][1])
            seconds[backward] = (seconds[backward][0], left * times[backward][1])
            of_rank += number * (alone - both)
            hides = min(waiting, alone - both)
            hidden_of_rank += number * hides
            exposed = (waiting - hides) / waiting if waiting else 1.0
            left_of[forward] = (exposed, left_of[forward][1])
            left_of[backward] = (left_of[backward][0], exposed)
        saved.append(of_rank)
        hidden.append(hidden_of_rank)
    return DualPasses(
        seconds=tuple(seconds),
        saved_seconds=tuple(saved),
        hidden_seconds=tuple(hidden),
        exchange_left=tuple(left_of),
    )


def side_by_side_seconds(
    *, computed: float, exchanged: float, device: Device, busy_multiprocessors: int
) -> float:
    """A forward and a backward pass side by side, from what both compute and exchange alone."""
    left = max(1, device.multiprocessors - busy_multiprocessors)
    slower = computed * device.multiprocessors / left
    return min(computed + exchanged, max(slower, exchanged))


def _exchange_seconds(case: Case, stage: Stage) -> Pair:
    """What one micro-batch waits in a stage for the ranks of experts to exchange tokens."""
    forward = backward = 0.0
    for own, blocks in block_cases(case, stage):
        waiting = block_times(own).waiting
        forward += blocks * sum(s for axis, s in waiting.forward_by_axis if axis == "ep")
        backward += blocks * sum(s for axis, s in waiting.backward_by_axis if axis == "ep")
    return forward, backward


class _Around(NamedTuple):
    """What data parallelism does around the passes of a pipeline."""

    step: PipelineStep
    scatter_share: float
    """Part of the reductions' time that is reduce-scatters."""
    before: float = 0.0
    """Gathers before all passes, of the rank that has most of them."""
    round_seconds: float = 0.0
    """Reductions after each round but the last of a rank, of software that reduces each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """A pipelined step, and what is read off it."""

    stages: StageKinds
    step: PipelineStep
    before: float
    """Gathers before it begins."""
    pairs: DualPasses
    timing: PipelineTiming
    """Without what gathers and reductions add."""
    exposed: ExposedSeconds
    """What these add."""

    @property
    def busy_seconds(self) -> list[float]:
        """What each rank computes and waits for inside of its blocks."""
        both = zip(self.timing.busy_seconds, self.pairs.saved_seconds, strict=True)
        return [alone - saved for alone, saved in both]

    @property
    def rank(self) -> int:
        """The busiest."""
        busy = self.busy_seconds
        return max(range(len(busy)), key=lambda rank: (busy[rank], rank))


def pipeline_parts(case: Case) -> PipelineParts:
    """Those of a case: what gathers and reductions add is by how much the step is longer with
    them."""
    layout = case.layout
    stages = stage_kinds(model=case.model, layout=layout)
    passes = tuple(stages.each([stage_seconds(case, one) for one in stages.kinds]))
    weights: Seconds = ()
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        halves = stages.each([stage_weight_seconds(case, one) for one in stages.kinds])
        weights = tuple(
            min(backward, half) for half, (_, backward) in zip(halves, passes, strict=True)
        )
    pairs = dual_passes(case, stages, passes)
    plain = PipelineStep(
        order=layout_order(layout),
        passes=passes,
        send=group_seconds(case.cluster, pp_group(layout), "send_recv", message_bytes(case)),
        weights=weights,
        paired=pairs.seconds,
    )
    add = _with_fsdp if layout.sharding == "fsdp" else _with_replicas
    around = add(case, stages, plain)
    timing, whole = played_pipeline(around.step.alone), played_pipeline(around.step)
    reduced = whole.reducing_seconds
    if around.round_seconds:
        # each runs beside the passes of the next one, on a communicator that does one thing at once
        rounds = reduced_rounds(training=case.training, layout=layout)
        beside = min(timing.busy_seconds) / rounds
        reduced += (rounds - 1) * max(0.0, around.round_seconds - beside)
    gathered = max(0.0, whole.total_seconds - timing.total_seconds)
    return PipelineParts(
        stages=stages,
        step=around.step,
        before=around.before,
        pairs=pairs,
        timing=timing,
        exposed=ExposedSeconds(
            all_gather=around.before + gathered,
            reduce_scatter=around.scatter_share * reduced,
            all_reduce=(1 - around.scatter_share) * reduced,
        ),
    )


def pipeline_passes(case: Case) -> Passes:
    """All micro-batches, seen from the rank that computes most."""
    model, layout = case.model, case.layout
    parts = pipeline_parts(case)
    rank, exposed = parts.rank, parts.exposed
    busy = parts.busy_seconds[rank]
    idle = max(0.0, parts.timing.total_seconds - busy)
    messages = min(idle, _message_waiting_seconds(model, layout, rank, parts.step.send))
    held = pipeline_ranks(model=model, layout=layout)
    after = [_seconds_of(tp_gradient_calls(case, stage), case) for stage in held]
    return Passes(
        busy_seconds=busy - _seconds_of(tp_pass_calls(case, held[rank]), case),
        exposed=ExposedSeconds(
            all_gather=exposed.all_gather,
            reduce_scatter=exposed.reduce_scatter,
            all_reduce=exposed.all_reduce,
            by_axis=(
                ("pp", messages + table_seconds(case)),
                # of the rank that has most: which rank computes most may hang on a hair
                ("tp", max(after) - after[rank]),
            ),
        ),
        bubble_seconds=idle - messages,
        hidden_exchange_seconds=parts.pairs.hidden_seconds[rank],
        pp_rank=rank,
    )


def stage_seconds(case: Case, stage: Stage) -> tuple[float, float]:
    """(forward, backward) of one micro-batch on one stage, with the tensor-parallel collectives
    around its blocks: half in each, as the last stage does one right after the other."""
    forward, backward = plain_seconds(case, stage)
    ends = _seconds_of(tp_pass_calls(case, stage), case) / case.layout.num_microbatches
    return forward + ends / 2, backward + ends / 2


def regathering_seconds(case: Case, stage: Stage) -> Pair:
    """What gathering its blocks again adds to a (forward, backward) pass of a stage: what of it is
    not beside the computation of that pass, and copies. Units of the ends stay gathered."""
    batch = early_micro_batch(fsdp_micro_batch(case, stage), case.layout)
    kept = {"gather": 0.0, "copy_out": 0.0, "upload": 0.0}
    alone = replace(
        batch,
        tables=replace(batch.tables, **kept),
        head=replace(batch.head, **kept),
        root=replace(batch.root, **kept),
    )
    bare = with_seconds(alone, **kept, regather=0.0)
    more = (
        max(0.0, played(one(alone)).seconds - played(one(bare)).seconds)
        for one in (forward_pass, backward_pass)
    )
    return next(more), next(more)


def _seconds_of(calls: Iterable[Calls], case: Case) -> float:
    return sum(call_seconds(call, case.cluster) for call in calls)


def stage_weight_seconds(case: Case, stage: Stage) -> float:
    """The half of a stage's backward pass that makes the weights' gradients: products as large as
    forward's. What backward does beside products is in the other half."""
    seconds = 0.0
    for kind, blocks in block_kinds(model=case.model, stage=stage):
        forward, _ = device_parts(block_work(case.of_blocks(kind)), case.cluster.device)
        seconds += blocks * forward.matmuls
    return seconds


def _message_waiting_seconds(model: Model, layout: Layout, rank: int, send: float) -> float:
    """Receives that a rank waits for, under schedules that wait."""
    if layout.schedule not in WAITING_SCHEDULES:
        return 0.0
    stage = pipeline_ranks(model=model, layout=layout)[rank]
    receives = 2 - int(stage.has_embedding) - int(stage.has_head)
    return layout.num_microbatches * receives * send


def _with_fsdp(case: Case, stages: StageKinds, plain: PipelineStep) -> _Around:
    """FSDP gathers a stage's units as its first forward pass needs them, or also as later ones do,
    and reduces them all after its last backward pass.

    Source: torch 2.13 torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`, which
    runs FSDP's post-backward when the last backward pass is over.
    """
    layout = case.layout
    moves = [fsdp_units(case, stage) for stage in stages.kinds]
    scatters = sum(stages.each([each.total.reduce_scatter for each in moves]))
    reduces = sum(stages.each([each.total.all_reduce for each in moves]))
    step = replace(
        plain,
        gathering=fsdp_gathering(layout.schedule),
        gathers=tuple(stages.each([_gather_seconds(each) for each in moves])),
        reductions=tuple(stages.each([_reduce_seconds(each) for each in moves])),
    )
    if layout.reshards_stages:
        again = stages.each([regathering_seconds(case, one) for one in stages.kinds])
        paired = tuple(
            (forward + more, backward + later)
            for (forward, backward), (more, later) in zip(plain.passes, again, strict=True)
        )
        step = replace(step, paired=paired, regathers=True)
    return _Around(
        step=step,
        scatter_share=scatters / (scatters + reduces) if scatters + reduces else 0.0,
        round_seconds=scatters / layout.pp,
    )


def _gather_seconds(moves: Units) -> float:
    """Of a stage: shards that come from the host do so beside the gather of another unit."""
    total = moves.total
    return max(total.gather, total.upload) + total.copy_out


def _reduce_seconds(moves: Units) -> float:
    """All reduce-scatters of a stage, with copies to the host behind them, and its all-reduces
    behind or beside them."""
    total = moves.total
    scatters, reduces = total.reduce_scatter + total.download, total.all_reduce
    if moves.links_shared:
        return scatters + reduces
    every = (moves.tables, *(unit for _, unit in moves.blocks), moves.head, moves.root)
    first = next((unit.seconds for unit in every if unit.is_there), NO_SECONDS)
    return max(scatters + min(reduces, first.all_reduce), first.reduce_scatter + reduces)


def _with_replicas(case: Case, stages: StageKinds, plain: PipelineStep) -> _Around:
    """DDP and ZeRO reduce beside each stage's last backward pass and all passes behind it, or after
    the rank's last one; ZeRO's gathers of updated parameters run from the start of the step beside
    the first forward passes, or alone.

    Source: Megatron-LM megatron/core/pipeline_parallel/schedules.py, which reduces a chunk when its
    last micro-batch is through (`grad_sync_func`) and gathers the next one beside the first passes
    of the one before (`param_sync_func`); without overlap `finalize_model_grads` at the end.
    """
    traits = case.training.traits
    by_kind = [replica_batch(case, stage, (0.0, 0.0)) for stage in stages.kinds]
    both = zip(stages.each(by_kind), plain.passes, strict=True)
    batches = [replace(batch, forward=own[0], backward=own[1]) for batch, own in both]
    gathers, before = tuple(batch.gather for batch in batches), 0.0
    step = replace(
        plain,
        reductions=tuple(batch.reduction for batch in batches),
        hidden=_hidden_reductions(batches),
        reduces_at_the_end=not traits.overlaps_reduction,
    )
    if any(gathers) and traits.overlaps_parameter_gather:
        first = played(replica.forward_pass(batches[0], is_first=True)).seconds
        beside = max(batches[0].forward, gathers[0])
        step = replace(
            step, gathering="beside", gathers=gathers, first_waits=max(0.0, first - beside)
        )
    elif any(gathers):
        before = max(sum(gathers[at] for at in held) for held in layout_rank_stages(case.layout))
    share = max(batch.scatter_share for batch in batches)
    return _Around(step=step, scatter_share=share, before=before)


def _hidden_reductions(batches: Sequence[ReplicaBatch]) -> Seconds:
    """Of each stage, what it reduces beside its last backward pass."""
    exposed = {
        batch: played(replica.backward_pass(batch, reduces=True)).exposed
        for batch in dict.fromkeys(batches)
    }
    return tuple(batch.reduction - exposed[batch] for batch in batches)
