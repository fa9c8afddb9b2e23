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
from functools import lru_cache
from itertools import accumulate

from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.compute import device_parts
from fsdpplan.cost.model.shards import Stage, block_cases, block_kinds
from fsdpplan.cost.network.placement import pp_group
from fsdpplan.cost.overlap.exposed import (
    ExposedSeconds,
)
from fsdpplan.cost.overlap.passes import (
    Passes,
    early_micro_batch,
    fsdp_micro_batch,
    plain_seconds,
    replica_batch,
    scatter_share,
    with_seconds,
)
from fsdpplan.cost.overlap.timing import block_times
from fsdpplan.cost.play.clocks import played
from fsdpplan.cost.schedule.stages import (
    StageKinds,
    layout_rank_stages,
    pipeline_ranks,
    stage_kinds,
)
from fsdpplan.cost.schedule.times import (
    WAITING_SCHEDULES,
    PipelineTiming,
    paired_passes,
    reduced_seconds,
    simulate_pipeline,
)
from fsdpplan.cost.step import replica
from fsdpplan.cost.step.fsdp import MicroBatch, backward_pass, forward_pass
from fsdpplan.cost.step.replica import ReplicaBatch
from fsdpplan.cost.traffic.calls import Calls, call_seconds, group_seconds
from fsdpplan.cost.traffic.data_parallel import reduced_rounds
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

Pair = tuple[float, float]
"""Seconds of one micro-batch in one stage: (forward, backward)."""
Seconds = tuple[float, ...]
Pairs = tuple[tuple[float, float], ...]
"""(forward, backward) of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPasses:
    """What passes take side by side."""

    seconds: tuple[Pair, ...] = ()
    """Of each stage, beside a pass of the rank's other one; empty: as long as alone."""
    saved_seconds: tuple[float, ...]
    """Of each rank in a step: by how much its passes are shorter."""
    hidden_seconds: tuple[float, ...]
    """Of each rank in a step: exchanges that nobody waits for."""


def dual_passes(case: Case, stages: StageKinds, times: Sequence[Pair]) -> DualPasses:
    """Those of a case: nothing is saved where its software or schedule has none, or its blocks
    exchange nothing."""
    layout = case.layout
    none = DualPasses(saved_seconds=(0.0,) * layout.pp, hidden_seconds=(0.0,) * layout.pp)
    if layout.schedule != "dualpipev" or not case.training.traits.overlaps_passes:
        return none
    waits = stages.each([exchange_seconds(case, stage) for stage in stages.kinds])
    if not any(map(any, waits)):
        return none
    busy_multiprocessors = case.training.traits.exchange_multiprocessors
    seconds = [*times]
    saved, hidden = [], []
    counts = paired_passes(pp=layout.pp, num_microbatches=layout.num_microbatches)
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
            hidden_of_rank += number * min(waiting, alone - both)
        saved.append(of_rank)
        hidden.append(hidden_of_rank)
    return DualPasses(
        seconds=tuple(seconds), saved_seconds=tuple(saved), hidden_seconds=tuple(hidden)
    )


def side_by_side_seconds(
    *, computed: float, exchanged: float, device: Device, busy_multiprocessors: int
) -> float:
    """A forward and a backward pass side by side, from what both compute and exchange alone."""
    left = max(1, device.multiprocessors - busy_multiprocessors)
    slower = computed * device.multiprocessors / left
    return min(computed + exchanged, max(slower, exchanged))


def exchange_seconds(case: Case, stage: Stage) -> Pair:
    """What one micro-batch waits in a stage for the ranks of experts to exchange tokens."""
    forward = backward = 0.0
    for own, blocks in block_cases(case, stage):
        waiting = block_times(own).waiting
        forward += blocks * sum(s for axis, s in waiting.forward_by_axis if axis == "ep")
        backward += blocks * sum(s for axis, s in waiting.backward_by_axis if axis == "ep")
    return forward, backward


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """What the passes of a pipeline are made of."""

    stages: StageKinds
    times: tuple[Pair, ...]
    """(forward, backward) of one micro-batch in each stage."""
    weights: Seconds
    """The weights' half of each backward; empty where it is not split."""
    send: float
    """Seconds of a message between two stages."""
    pairs: DualPasses
    timing: PipelineTiming
    """Without what gathers and reductions add."""
    exposed: ExposedSeconds
    """What these add."""
    regathered: Pairs = ()
    """(forward, backward) of each stage where its blocks are gathered again; empty: they stay."""

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
    """Those of a case."""
    layout = case.layout
    stages = stage_kinds(model=case.model, layout=layout)
    times = stages.each([stage_seconds(case, one) for one in stages.kinds])
    send = group_seconds(case.cluster, pp_group(layout), "send_recv", message_bytes(case))
    weights: Seconds = ()
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        halves = stages.each([stage_weight_seconds(case, one) for one in stages.kinds])
        weights = tuple(
            min(backward, half) for half, (_, backward) in zip(halves, times, strict=True)
        )
    pairs = dual_passes(case, stages, times)
    timing = played_timing(layout, times, weights, send, (), pairs.seconds)
    added = _fsdp_exposed if layout.sharding == "fsdp" else _replica_exposed
    regathered: Pairs = ()
    if layout.reshards_stages:
        again = stages.each([regathering_seconds(case, one) for one in stages.kinds])
        regathered = tuple(
            (forward + more, backward + later)
            for (forward, backward), (more, later) in zip(times, again, strict=True)
        )
    return PipelineParts(
        stages=stages,
        times=tuple(times),
        weights=weights,
        send=send,
        pairs=pairs,
        timing=timing,
        exposed=added(case, stages, times, weights, send, timing, regathered or pairs.seconds),
        regathered=regathered,
    )


def pipeline_passes(case: Case) -> Passes:
    """All micro-batches, seen from the rank that computes most."""
    model, layout = case.model, case.layout
    parts = pipeline_parts(case)
    rank, send, exposed = parts.rank, parts.send, parts.exposed
    busy = parts.busy_seconds[rank]
    idle = max(0.0, parts.timing.total_seconds - busy)
    messages = min(idle, _message_waiting_seconds(model, layout, rank, send))
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


@lru_cache(maxsize=2048)
def _played(
    schedule: str,
    forward: Seconds,
    backward: Seconds,
    weights: Seconds,
    gathered: Seconds,
    num_microbatches: int,
    virtual_stages: int,
    send: float,
    paired: Pairs,
    regathers: bool,
) -> PipelineTiming:
    return simulate_pipeline(
        schedule=schedule,  # type: ignore[arg-type]
        forward_seconds=forward,
        backward_seconds=backward,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        send_seconds=send,
        backward_weight_seconds=weights,
        gathered_seconds=gathered,
        paired_seconds=paired,
        regathers=regathers,
    )


def played_timing(
    layout: Layout,
    times: Sequence[tuple[float, float]],
    weights: Seconds,
    send: float,
    gathered: Seconds,
    paired: Pairs = (),
    *,
    regathers: bool = False,
) -> PipelineTiming:
    """The pipeline played, from (forward, backward) of each stage; as in `simulate_pipeline`."""
    return _played(
        layout.schedule,
        tuple(forward for forward, _ in times),
        tuple(backward for _, backward in times),
        weights,
        gathered,
        layout.num_microbatches,
        layout.virtual_stages,
        send,
        paired,
        regathers,
    )


def first_forward_ends(
    layout: Layout,
    *,
    passes: Sequence[tuple[float, float]],
    gathers: Sequence[float],
    send: float,
) -> Seconds:
    """When each stage's first forward pass ends at the earliest.

    One stage a rank is gathered block by block by its own forward pass, from the moment when there
    is something to compute with:

        end of s = end of s - 1 + message + max(forward, gather)

    Of several, a rank gathers the whole first ones from the start of the step, one after another,
    and waits for all of a stage's gathers before its first forward pass:

        end of s = max(end of s - 1 + message, gathers of the rank up to s) + forward

    Source: torch 2.13 torch/distributed/pipelining/schedules.py, `_add_unshard_reshard` and
    `_assert_unsharded` of schedules with several stages a rank; FSDP's hooks under the others.
    """
    if layout.schedule in WAITING_SCHEDULES:
        arrived, moments = 0.0, list[float]()
        for (forward, _), gather in zip(passes, gathers, strict=True):
            arrived += max(forward, gather)
            moments.append(arrived)
            arrived += send
        return tuple(moments)
    gathered = [0.0] * len(passes)
    for held in layout_rank_stages(layout):
        for stage, moment in zip(held, accumulate(gathers[one] for one in held), strict=True):
            gathered[stage] = moment
    arrived, moments = 0.0, []
    for (forward, _), moment in zip(passes, gathered, strict=True):
        moments.append(max(arrived, moment) + forward)
        arrived = moments[-1] + send
    return tuple(moments)


def _fsdp_exposed(
    case: Case,
    stages: StageKinds,
    times: Sequence[tuple[float, float]],
    weights: Seconds,
    send: float,
    timing: PipelineTiming,
    paired: Pairs,
) -> ExposedSeconds:
    """FSDP gathers a stage's units as its first forward pass needs them, or also as later ones do,
    and reduces them all after its last backward pass.

    Source: torch 2.13 torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`, which
    runs FSDP's post-backward when the last backward pass is over.
    """
    layout = case.layout
    batches = [fsdp_micro_batch(case, stage) for stage in stages.kinds]
    gathers = stages.each([stage_gather_seconds(batch) for batch in batches])
    moments = first_forward_ends(layout, passes=times, gathers=gathers, send=send)
    regathers = layout.reshards_stages
    delayed = played_timing(layout, times, weights, send, moments, paired, regathers=regathers)
    reduced = _after_all(
        layout, timing, tuple(stages.each([stage_reduce_seconds(one) for one in batches]))
    )
    scatters = sum(stages.each([_sum(batch, "reduce_scatter") for batch in batches]))
    reduces = sum(stages.each([_sum(batch, "all_reduce") for batch in batches]))
    share = scatters / (scatters + reduces) if scatters + reduces else 0.0
    reduced += _earlier_rounds(case, scatters / layout.pp, timing)
    return ExposedSeconds(
        all_gather=max(0.0, delayed.total_seconds - timing.total_seconds),
        reduce_scatter=share * reduced,
        all_reduce=(1 - share) * reduced,
    )


def _earlier_rounds(case: Case, reduce_seconds: float, timing: PipelineTiming) -> float:
    """What reductions after each round but the last add: each runs beside the passes of the next
    one, on a communicator that does one thing at a time."""
    rounds = reduced_rounds(training=case.training, layout=case.layout)
    beside = min(timing.busy_seconds) / rounds
    return (rounds - 1) * max(0.0, reduce_seconds - beside)


def _sum(batch: MicroBatch, field: str) -> float:
    units = sum(number * float(getattr(unit, field)) for unit, number in batch.all_runs)
    return units + float(getattr(batch.root, field))


def stage_gather_seconds(batch: MicroBatch) -> float:
    """Of a stage: shards that come from the host do so beside the gather of another unit."""
    return max(_sum(batch, "gather"), _sum(batch, "upload")) + _sum(batch, "copy_out")


def stage_reduce_seconds(batch: MicroBatch) -> float:
    """All reduce-scatters of a stage, with copies to the host behind them, and its all-reduces
    behind or beside them."""
    scatters = _sum(batch, "reduce_scatter") + _sum(batch, "download")
    reduces = _sum(batch, "all_reduce")
    if batch.links_shared:
        return scatters + reduces
    first = batch.all_runs[0][0] if batch.all_runs else batch.root
    return max(scatters + min(reduces, first.all_reduce), first.reduce_scatter + reduces)


def _after_all(
    layout: Layout,
    timing: PipelineTiming,
    reduce: Seconds,
    hidden: Seconds = (),
    *,
    at_the_end: bool = False,
) -> float:
    """By how much reductions prolong the step."""
    ends = reduced_seconds(
        timing=timing,
        rank_stage_indices=layout_rank_stages(layout),
        reduce_seconds=reduce,
        hidden_seconds=hidden,
        at_the_end=at_the_end,
    )
    return max(0.0, max(ends) - timing.total_seconds)


def _replica_exposed(
    case: Case,
    stages: StageKinds,
    times: Sequence[tuple[float, float]],
    weights: Seconds,
    send: float,
    timing: PipelineTiming,
    paired: Pairs,
) -> ExposedSeconds:
    """DDP and ZeRO reduce beside each stage's last backward pass and all passes behind it, or after
    the rank's last one; ZeRO's gathers of updated parameters run from the start of the step beside
    the first forward passes, or alone.

    Source: Megatron-LM megatron/core/pipeline_parallel/schedules.py, which reduces a chunk when its
    last micro-batch is through (`grad_sync_func`) and gathers the next one beside the first passes
    of the one before (`param_sync_func`); without overlap `finalize_model_grads` at the end.
    """
    batches = replica_batches(case, stages, times)
    totals = tuple(batch.reduction for batch in batches)
    hidden = hidden_reductions(batches)
    at_the_end = not case.training.traits.overlaps_reduction
    reduced = _after_all(case.layout, timing, totals, hidden, at_the_end=at_the_end)
    share = max(scatter_share(batch) for batch in batches)
    return ExposedSeconds(
        all_gather=_parameter_waiting(case, batches, times, weights, send, timing, paired),
        reduce_scatter=share * reduced,
        all_reduce=(1 - share) * reduced,
    )


def replica_batches(case: Case, stages: StageKinds, times: Sequence[Pair]) -> list[ReplicaBatch]:
    """One micro-batch of each stage."""
    by_kind = [replica_batch(case, stage, (0.0, 0.0)) for stage in stages.kinds]
    both = zip(stages.each(by_kind), times, strict=True)
    return [replace(batch, forward=own[0], backward=own[1]) for batch, own in both]


def hidden_reductions(batches: Sequence[ReplicaBatch]) -> Seconds:
    """Of each stage, what it reduces beside its last backward pass."""
    exposed = {
        batch: played(replica.backward_pass(batch, reduces=True)).exposed
        for batch in dict.fromkeys(batches)
    }
    return tuple(batch.reduction - exposed[batch] for batch in batches)


def _parameter_waiting(
    case: Case,
    batches: Sequence[ReplicaBatch],
    times: Sequence[tuple[float, float]],
    weights: Seconds,
    send: float,
    timing: PipelineTiming,
    paired: Pairs,
) -> float:
    """What gathering updated parameters adds: to the slowest rank, or to the first forwards."""
    layout = case.layout
    if not any(batch.gather for batch in batches):
        return 0.0
    if not case.training.traits.overlaps_parameter_gather:
        return max(
            sum(batches[stage].gather for stage in held) for held in layout_rank_stages(layout)
        )
    moments = parameter_moments(layout, batches)
    delayed = played_timing(layout, times, weights, send, moments, paired)
    return max(0.0, delayed.total_seconds - timing.total_seconds)


def parameter_moments(layout: Layout, batches: Sequence[ReplicaBatch]) -> Seconds:
    """When the first forward pass of each stage has its updated parameters, which are gathered from
    the start of the step on beside passes."""
    moments = [0.0] * len(batches)
    for held in layout_rank_stages(layout):
        gathers = [batches[stage].gather for stage in held]
        for stage, moment in zip(held, accumulate(gathers), strict=True):
            moments[stage] = moment
    first = played(replica.forward_pass(batches[0], is_first=True)).seconds
    moments[0] = max(moments[0], first)
    return tuple(moments)
