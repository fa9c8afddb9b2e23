"""Step: everything put together for one layout: time, memory, communication, rates and the band.

The band is the device profile's 80 % band for the kind of evidence behind its fitted numbers.

Step time: seconds of one optimizer step by part, and the collectives behind them.

    step = compute + exposed communication + pipeline bubble + optimizer + host copies (offload)

It is no shorter than what passes any one level of the network takes, one after another.

Compute includes FSDP's copies, what gradients cost beside the products that make them, and what
overlapped collectives take from kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import erf, log, sqrt

from fsdpplan.cost.band import error_of, step_interval, widened
from fsdpplan.cost.block.operators import repeated_operators
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.attention import far_log_error
from fsdpplan.cost.kernels.compute import device_parts
from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.kernels.optimizer import layout_optimizer_seconds
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.model.attention_kernel import attention_kernel
from fsdpplan.cost.model.params import (
    attention_forward_flops_per_token,
    mfu_fraction,
    useful_flops_per_token,
)
from fsdpplan.cost.model.shards import Stage, block_cases, whole_model
from fsdpplan.cost.read.exposed import (
    bottleneck,
    collective_costs,
    inside_seconds,
    link_queue,
    slowdown_seconds,
)
from fsdpplan.cost.read.passes import Passes, fsdp_passes, replica_passes
from fsdpplan.cost.read.pipeline import pipeline_passes
from fsdpplan.cost.schedule.stages import pipeline_ranks, pipeline_stages
from fsdpplan.cost.traffic.block_times import block_times
from fsdpplan.cost.traffic.calls import call_seconds
from fsdpplan.cost.traffic.rank import optimizer_calls, step_calls, tp_end_calls
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import (
    Case,
    CollectiveCost,
    Estimate,
    Interval,
    PhaseEstimate,
    TimeBreakdown,
)
from fsdpplan.spec.training import Training

HOST_LOG_ERROR = 0.6
"""Standard deviation of the log of what a program's host takes to start its kernels: programs
differ by a factor of two either way. Held, not fitted: hardly a stack of the table waits for them
(0.3 and 0.9 predict a stack after ten of its runs worse). The learner holds it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where the time of a step goes, and its collectives, on the rank that computes most."""

    time: TimeBreakdown
    communication: tuple[CollectiveCost, ...]
    full_level: str = ""
    """Level of the network that carries something all of the step; empty where none does."""
    queued_seconds: float = 0.0
    """Part of exposed communication: what waits for that level, whatever else there is to do."""


def step_time(case: Case) -> StepTime:
    """Seconds of the step by part, with one row for each kind of collective; in the mean over a run
    whose precision changes."""
    if case.training.precision_switch != "none":
        return _mean_step([(share, step_time(each)) for share, each in case.phases])
    cluster, layout = case.cluster, case.layout
    stages = pipeline_ranks(model=case.model, layout=layout)
    passes = rank_passes(case, stages)
    stage = stages[passes.pp_rank]
    inner = inner_waiting_seconds(case, stage)
    if passes.hidden_exchange_seconds:
        inner["ep"] = max(0.0, inner["ep"] - passes.hidden_exchange_seconds)
    exposed = replace(
        passes.exposed,
        by_axis=(
            *passes.exposed.by_axis,
            *inner.items(),
            *(("tp", call_seconds(call, cluster)) for call in tp_end_calls(case, stage)),
        ),
        all_to_all=sum(call_seconds(call, cluster) for call in optimizer_calls(case, stage)),
    )
    communication = collective_costs(step_calls(case, stage), cluster=cluster, exposed=exposed)
    busy = passes.busy_seconds - sum(inner.values())
    # of the rank that keeps most: which rank computes most may hang on a hair
    busy += max(gradient_seconds(case, held) for held in dict.fromkeys(stages))
    compute = busy + min(busy, slowdown_seconds(communication, cluster.device))
    parts = _compute_parts(case, stage)
    late = slowest_factor(
        gpus=cluster.gpus, straggler_fraction=cluster.device.fit.straggler_fraction
    )
    waiting = sum(row.exposed_seconds for row in communication)
    # in a pipeline, what is not this rank's own collectives is another rank's, and its wait
    others = max(0.0, exposed.total - waiting) if layout.pp > 1 else 0.0
    inside = inside_seconds(communication, cluster) / waiting if waiting else 0.0
    time = TimeBreakdown(
        compute_seconds=late * compute,
        exposed_communication_seconds=exposed.total - others,
        bubble_seconds=passes.bubble_seconds + others,
        host_seconds=passes.host_seconds,
        optimizer_seconds=late
        * max(layout_optimizer_seconds(case, held) for held in dict.fromkeys(stages)),
        matmul_seconds=late * parts.matmul,
        attention_seconds=late * parts.attention,
        launch_seconds=late * parts.launch,
        launch_chance_seconds=late * parts.launch_chance,
        passes=tuple((late * host, late * device) for host, device in parts.passes),
        exposed_inside_seconds=inside * (exposed.total - others),
        exposed_across_seconds=(1 - inside) * (exposed.total - others),
    )
    return _within_links(StepTime(time=time, communication=communication), cluster)


def _within_links(step: StepTime, cluster: Cluster) -> StepTime:
    """No shorter than what passes each level of the network; what is left of that is waited for."""
    time = step.time
    queue = link_queue(step.communication, step_seconds=time.total_seconds)
    if not queue.level:
        return step
    is_inside = queue.level == cluster.levels[0].name
    return StepTime(
        time=replace(
            time,
            exposed_communication_seconds=time.exposed_communication_seconds + queue.seconds,
            exposed_inside_seconds=time.exposed_inside_seconds + is_inside * queue.seconds,
            exposed_across_seconds=time.exposed_across_seconds + (not is_inside) * queue.seconds,
        ),
        communication=queue.communication,
        full_level=queue.level,
        queued_seconds=queue.seconds,
    )


def _mean_step(parts: list[tuple[float, StepTime]]) -> StepTime:
    """The mean step of a run of `parts`, (share of the steps, its step).

    All seconds are linear, so the time of the whole run is its steps times this. A collective that
    one part has not is there with the seconds of the mean, and the calls of a step that has it.
    """
    passes = tuple(
        (share * host, share * device) for share, step in parts for host, device in step.time.passes
    )
    seconds = {
        name: sum(share * getattr(step.time, name) for share, step in parts)
        for name in (each.name for each in fields(TimeBreakdown) if each.name != "passes")
    }
    rows: dict[CollectiveCost, CollectiveCost] = {}
    for share, step in parts:
        for row in step.communication:
            key = replace(row, seconds=0.0, exposed_seconds=0.0)
            held = rows.get(key, key)
            rows[key] = replace(
                held,
                seconds=held.seconds + share * row.seconds,
                exposed_seconds=held.exposed_seconds + share * row.exposed_seconds,
            )
    return StepTime(
        time=TimeBreakdown(**seconds, passes=passes), communication=tuple(rows.values())
    )


def host_chance(host_seconds: float, device_seconds: float) -> float:
    """Chance that a pass waits for its host, which is as fast as predicted give or take
    `HOST_LOG_ERROR`:

        Phi(log(host / device) / error)
    """
    if not host_seconds or not device_seconds:
        return float(host_seconds > device_seconds)
    return (1 + erf(log(host_seconds / device_seconds) / HOST_LOG_ERROR / sqrt(2))) / 2


def slower_host_seconds(time: TimeBreakdown, factor: float) -> float:
    """The step, did its host take `factor` times as long: each pass takes what the slower of its
    two queues needs, and a pipeline's bubble grows with its passes.

        T(h) = T + (1 + bubble / compute) sum(max(h host, device) - max(host, device))

    Left out: collectives that hide in longer passes. Steps priced with such a host are within 7 %.
    """
    more = sum(max(factor * host, device) - max(host, device) for host, device in time.passes)
    return time.total_seconds + more * (1 + time.bubble_seconds / time.compute_seconds)


def slowest_factor(*, gpus: int, straggler_fraction: float) -> float:
    """Time of the slowest of `gpus` devices over that of the mean one.

        1 + s sqrt(2 ln n)

    Devices of one kind differ, in what their power limit leaves them and in their hosts; n of them
    that exchange gradients every step go at the pace of the slowest. Of n normal numbers the
    greatest lies about sqrt(2 ln n) deviations out.
    """
    return 1.0 + straggler_fraction * sqrt(2 * log(gpus))


def rank_passes(case: Case, stages: tuple[Stage, ...]) -> Passes:
    if case.layout.pp > 1:
        return pipeline_passes(case)
    passes = fsdp_passes if case.layout.sharding == "fsdp" else replica_passes
    return passes(case, stages[0])


def inner_waiting_seconds(case: Case, stage: Stage) -> dict[str, float]:
    """What the collectives inside all blocks expose in a step, by mesh axis."""
    waiting: dict[str, float] = {}
    for own, blocks in block_cases(case, stage):
        for axis, seconds in block_times(own).waiting.by_axis:
            more = case.layout.num_microbatches * blocks * seconds
            waiting[axis] = waiting.get(axis, 0.0) + more
    return waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeParts:
    """Seconds of the blocks of one rank in a step, by what they are made of."""

    matmul: float
    attention: float
    launch: float
    """Passes whose kernels the host cannot start fast enough: all of their time."""
    launch_chance: float
    """All passes, by the chance that it cannot."""
    passes: tuple[tuple[float, float], ...]
    """(seconds of the host, of the device) of the passes, forward and backward of each kind."""


def _compute_parts(case: Case, stage: Stage) -> ComputeParts:
    """Parts of all blocks and micro-batches, none of them in two; recomputation is split as forward
    is."""
    matmul = attention = launch = chance = 0.0
    passes = []
    for own, blocks in block_cases(case, stage):
        times = block_times(own)
        block, (forward_queued, backward_queued) = times.seconds, times.queued_seconds
        forward, backward = device_parts(block_work(own), case.cluster.device)
        number = case.layout.num_microbatches * blocks
        again = number * block.recompute_device_seconds / forward.total
        # a device that waits for its collectives keeps its host waiting
        forward_device = block.forward_device_seconds + forward_queued
        if block.forward_host_seconds > forward_device:
            launch += number * block.forward_seconds
        else:
            matmul += number * forward.matmuls
            attention += number * forward.attention
        on_device = block.recompute_device_seconds + block.backward_device_seconds
        on_device += backward_queued
        on_host = block.recompute_host_seconds + block.backward_host_seconds
        passes.append((number * block.forward_host_seconds, number * forward_device))
        passes.append((number * on_host, number * on_device))
        forward_chance = host_chance(block.forward_host_seconds, forward_device)
        both_seconds = block.recompute_seconds + block.backward_seconds
        chance += number * block.forward_seconds * forward_chance
        chance += number * both_seconds * host_chance(on_host, on_device)
        if on_host > on_device:
            launch += number * both_seconds
        else:
            matmul += again * forward.matmuls + number * backward.matmuls
            attention += again * forward.attention + number * backward.attention
    return ComputeParts(
        matmul=matmul,
        attention=attention,
        launch=launch,
        launch_chance=chance,
        passes=tuple(passes),
    )


def trainer_builds(*, model: Model, seq_len: int) -> bool:
    """Whether the reference decoder has this shape for sequences of `seq_len` tokens.

    It is any shape that a model can have: but rotation turns pairs, and a position table ends. The
    trainer refuses the others in words (trainer/parallel/support.py); a test holds both together.
    """
    return not unbuilt_words(model=model, seq_len=seq_len)


def unbuilt_words(*, model: Model, seq_len: int) -> str:
    """What of this shape the reference decoder lacks, for sequences of `seq_len` tokens; empty:
    nothing."""
    if lacking := model.unlike_reference:
        return lacking
    if model.window_kind == "chunked" and 0 < model.sliding_window < seq_len:
        return f"attention in chunks of {model.sliding_window} tokens"
    if model.positions == "learned":
        too_long = seq_len > model.max_positions
        return f"more than {model.max_positions} learned positions" if too_long else ""
    turned = model.latent.rope_head_dim if model.latent else model.head_dim
    odd = model.positions == "rope" and turned % 2
    return f"rotary positions over an odd head of {turned}" if odd else ""


def estimate(case: Case) -> Estimate:
    """Predict time, memory and communication of a case, which must be legal."""
    if case.training.precision_switch != "none":
        return _of_phases(case)
    model, cluster, training = case.model, case.cluster, case.training
    rank = rank_memory(case)
    step = step_time(case)
    time, communication = step.time, step.communication
    seconds = time.total_seconds
    tokens_per_second = training.tokens_per_step / seconds
    per_gpu = tokens_per_second / cluster.gpus
    mfu = mfu_fraction(
        model=model,
        seq_len=training.seq_len,
        tokens_per_second_per_gpu=per_gpu,
        peak_flops_per_second=cluster.device.peak_flops_per_second(training.precision),
        document_tokens=training.document_tokens,
    )
    return Estimate(
        step_seconds=_interval(case, time),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        mfu_fraction=mfu,
        hfu_fraction=mfu * executed_flops_ratio(case),
        bottleneck=bottleneck(time, communication),
        runnable=is_runnable(training=training, layout=case.layout)
        and trainer_builds(model=model, seq_len=training.seq_len),
        time=time,
        memory=rank,
        communication=communication,
    )


STATES_LOG_ERROR = 0.7
"""Standard deviation of the log of what mixes tokens otherwise than by attention over all keys: a
factor of two either way. Held, not fitted: no measured run has such blocks."""


def _interval(case: Case, time: TimeBreakdown) -> Interval:
    """The step with its band, wider by what no measured run is behind."""
    band = step_interval(time, error_of(case.cluster, case.training.family))
    share = time.attention_seconds / time.total_seconds
    if case.model.has_unmeasured_mixers:
        return widened(band, STATES_LOG_ERROR * share)
    model, training, device = case.model, case.training, case.cluster.device
    kernel = attention_kernel(model=model, training=training, device=device)
    far = far_log_error(kernel, seq_len=training.seq_len)
    return widened(band, far * share) if far else band


def _of_phases(case: Case) -> Estimate:
    """Of a run whose precision changes: the mean of its steps, and the memory of the part that
    needs more. Its MFU is that over the whole of its time, each part by the peak of its precision.
    """
    parts = [(share, estimate(each)) for share, each in case.phases]
    step = step_time(case)
    seconds = step.time.total_seconds
    tokens_per_second = case.training.tokens_per_step / seconds

    def over_time(name: str) -> float:
        """Mean over the time of the run."""
        each = [(share * one.time.total_seconds, getattr(one, name)) for share, one in parts]
        return float(sum(weight * value for weight, value in each) / sum(w for w, _ in each))

    return Estimate(
        step_seconds=_interval(case, step.time),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / case.cluster.gpus,
        mfu_fraction=over_time("mfu_fraction"),
        hfu_fraction=over_time("hfu_fraction"),
        bottleneck=bottleneck(step.time, step.communication),
        runnable=all(one.runnable for _, one in parts),
        time=step.time,
        memory=rank_memory(case),
        communication=step.communication,
        phases=tuple(
            PhaseEstimate(
                precision=each.training.precision,
                from_fraction=begin,
                step_seconds=one.step_seconds,
                tokens_per_second=one.tokens_per_second,
                mfu_fraction=one.mfu_fraction,
                peak_device_bytes=one.memory.peak_device_bytes,
            )
            for begin, (_, each), (_, one) in zip(
                (0.0, parts[0][0]), case.phases, parts, strict=True
            )
        ),
    )


def is_runnable(*, training: Training, layout: Layout) -> bool:
    """Whether the trainer can run a legal `layout`, if it can build the model: it is FSDP2's."""
    return training.runtime == "fsdp2" and layout.sharding in ("ddp", "fsdp")


def executed_flops_ratio(case: Case) -> float:
    """Executed over useful FLOPs: recomputation counts here, and the head's padded rows."""
    model, layout = case.model, case.layout
    training = case.training
    useful = useful_flops_per_token(
        model=model, seq_len=training.seq_len, document_tokens=training.document_tokens
    )
    is_same = layout.checkpoint_blocks == "all"
    stages = (whole_model(model),) if is_same else pipeline_stages(model=model, layout=layout)
    again = sum(
        blocks * _repeated_flops_per_token(own)
        for stage in stages
        for own, blocks in block_cases(case, stage)
    )
    padded = model.vocab_rows(layout.tp) - model.vocab
    return 1 + (again + 6.0 * padded * model.hidden) / useful


def _repeated_flops_per_token(case: Case) -> float:
    """FLOPs of one block's forward that backward repeats, a token; as in `recompute_seconds`."""
    work = block_work(case)
    operators = repeated_operators(replace(work, tp=1, ep=1))
    again = sum(each.product.flops / work.tokens for each in operators if each.product)
    training = case.training
    attention = attention_forward_flops_per_token(
        model=case.model, seq_len=training.seq_len, document_tokens=training.document_tokens
    )
    return again + attention * sum(each.kind == "attention" for each in operators)
