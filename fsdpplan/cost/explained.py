"""Explained: each term of a step and of a peak as a formula, its inputs and where it is from.

The terms add up to the step, and those of memory to the peak of the fullest device. A formula has
no more than `+ - * /`, brackets and `max`, so that whoever reads it can work it out with the values
beside it. Most inputs are shapes, degrees and numbers of the profile; what a simulation or a kernel
model makes of them is one input more, said to be so ("left by ..."), with the module that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fsdpplan.cost.block.operators import block_operators, element_wise_bytes, on_device
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.estimate import StepTime, rank_passes, slowest_factor, step_time
from fsdpplan.cost.kernels.attention import head_channels, kernel_fraction
from fsdpplan.cost.kernels.compute import (
    device_parts,
    element_wise_kernels,
)
from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.kernels.head import ends_seconds
from fsdpplan.cost.kernels.optimizer import layout_optimizer_seconds, optimizer_elements
from fsdpplan.cost.kernels.rates import in_family, memory_bytes_per_second
from fsdpplan.cost.model.attention_kernel import AttentionKernel
from fsdpplan.cost.model.formats import formats, local_tokens
from fsdpplan.cost.model.params import attention_forward_flops_per_token, trains_ends
from fsdpplan.cost.model.shards import Stage, block_cases
from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.cost.read.exposed import slowdown_seconds
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.block_times import block_times
from fsdpplan.spec.plan import Case, CollectiveCost, Estimate, TimeBreakdown

Unit = Literal["s", "B", "B/s", "FLOP", "FLOP/s", ""]

LEAST_SECONDS = 1e-12
"""Of a term: less is what rounding leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What stands behind one symbol of a formula."""

    symbol: str
    value: float
    unit: Unit
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A term: its formula has the value that the term has."""

    name: str
    value: float
    unit: Unit
    formula: str
    inputs: tuple[Input, ...]
    source: str
    """The module that has the formula, and the chapter that derives it."""


def explained_step(case: Case) -> tuple[Explained, ...]:
    """The terms of a step, which add up to it; of a run whose precision changes, those of each of
    its parts, by their share of the steps."""
    if case.training.precision_switch == "none":
        return tuple(_step(case))
    return tuple(
        _shared(term, share, each.training.precision)
        for share, each in case.phases
        for term in _step(each)
    )


def learned_term(found: Estimate) -> tuple[Explained, ...]:
    """What measured runs made of a predicted step; nothing where there are none."""
    if found.learned is None:
        return ()
    step = found.time.total_seconds
    factor = found.step_seconds.expected / step
    return (
        Explained(
            name="your runs",
            value=found.step_seconds.expected - step,
            unit="s",
            formula="T * (F - 1)",
            inputs=(
                _seconds("T", step, "the step as predicted: the terms above"),
                number("F", factor, f"{_runs_like(found.learned.runs)} say of such a step"),
            ),
            source="validate/learn/learner.py; docs/explanation/learning.md",
        ),
    )


def _runs_like(runs: int) -> str:
    return f"what your {runs} runs like it" if runs else "what your runs, none of them like it,"


def _shared(term: Explained, share: float, precision: str) -> Explained:
    own = Input(symbol="w", value=share, unit="", words=f"share of the steps in {precision}")
    return replace(
        term,
        name=f"{term.name}, in {precision}",
        value=share * term.value,
        formula=f"w * ({term.formula})",
        inputs=(own, *term.inputs),
    )


def _step(case: Case) -> Iterator[Explained]:
    step = step_time(case)
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    stage = stages[rank_passes(case, stages).pp_rank]
    kernels = list(_kernels(case, step, stage, stages))
    yield from kernels
    rest = step.time.compute_seconds - sum(term.value for term in kernels)
    yield from _kept(_rest(case, rest))
    for row in step.communication:
        if row.exposed_seconds > LEAST_SECONDS:
            yield _collective(case, row)
    waited = sum(row.exposed_seconds for row in step.communication)
    yield from _kept(
        Explained(
            name="exposed, other",
            value=step.time.exposed_communication_seconds - waited,
            unit="s",
            formula="W - c",
            inputs=(
                _seconds("W", step.time.exposed_communication_seconds, "all that the GPU waits"),
                _seconds("c", waited, "of it for the collectives above"),
            ),
            source="cost/read/exposed.py; docs/explanation/overlap.md",
        )
    )
    yield from _kept(_bubble(case, step.time))
    yield from _kept(_optimizer(case, step.time, stages))
    yield from _kept(_host(case, step.time, stage))


def _kept(term: Explained) -> Iterator[Explained]:
    """The term, where there is any of it."""
    if abs(term.value) > LEAST_SECONDS:
        yield term


def _seconds(symbol: str, value: float, words: str) -> Input:
    return Input(symbol=symbol, value=value, unit="s", words=words)


def number(symbol: str, value: float, words: str) -> Input:
    """An input without a unit."""
    return Input(symbol=symbol, value=value, unit="", words=words)


def _slowest(case: Case) -> Input:
    cluster = case.cluster
    factor = slowest_factor(
        gpus=cluster.gpus, straggler_fraction=cluster.device.fit.straggler_fraction
    )
    return number("s", factor, f"the slowest of {cluster.gpus:,} devices over the mean one")


def _memory_rate(case: Case) -> tuple[Input, Input]:
    device = case.cluster.device
    bandwidth = device.memory_bandwidth_bytes_per_second
    return (
        Input(symbol="B", value=bandwidth, unit="B/s", words=f"memory bandwidth of {device.name}"),
        number("f", device.fit.memory_fraction, "share of it reached (memory_fraction, profile)"),
    )


def _micro_batches(case: Case) -> Input:
    return number("m", case.layout.num_microbatches, "micro-batches (layout)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The blocks of a rank that are alike, and which of their passes wait for the host."""

    case: Case
    blocks: int
    name: str
    forward: int
    """1 where the device decides how long forward takes, 0 where the host does."""
    backward: int
    again: float
    """Share of forward that backward makes again."""

    def passes(self, gradients: float = 2.0) -> float:
        """Forwards' worth of work of the passes that the device decides: 1, backward's `gradients`,
        and what is made again."""
        return self.forward + self.backward * (gradients + self.again)


def _kinds(case: Case, stage: Stage) -> Iterator[_Kind]:
    """Kinds of blocks, as `cost/estimate.py` takes their passes."""
    for own, blocks in block_cases(case, stage):
        times = block_times(own)
        block, (forward_queued, backward_queued) = times.seconds, times.queued_seconds
        forward, _ = device_parts(block_work(own), case.cluster.device)
        on_host = block.recompute_host_seconds + block.backward_host_seconds
        on_device = block.recompute_device_seconds + block.backward_device_seconds
        forward_device = block.forward_device_seconds + forward_queued
        yield _Kind(
            case=own,
            blocks=blocks,
            name=_kind_name(case, own, stage),
            forward=int(block.forward_host_seconds <= forward_device),
            backward=int(on_host <= on_device + backward_queued),
            again=block.recompute_device_seconds / forward.total,
        )


def _kind_name(case: Case, own: Case, stage: Stage) -> str:
    """` of dense blocks` and the like; nothing where all blocks are alike."""
    words = ""
    if case.model.is_patterned:
        words = f" of {own.model.kind_words} blocks"
    elif case.model.experts is not None and own.model.experts is None:
        words = " of dense blocks"
    elif stage.dense_blocks:
        words = " of blocks with experts"
    if own.layout.activation_checkpointing != case.layout.activation_checkpointing:
        return f"{words or ' of blocks'} that keep everything"
    return words


def _kernels(
    case: Case, step: StepTime, stage: Stage, stages: tuple[Stage, ...]
) -> Iterator[Explained]:
    """All that computes, but what is left of it."""
    for kind in _kinds(case, stage):
        yield from _kept(_matmuls(case, kind))
        yield from _kept(_attention(case, kind))
        yield from _kept(_element_wise(case, kind))
        yield from _kept(_launches(case, kind))
    yield from _kept(_ends(case, stage))
    yield from _kept(_gradients(case, stages))
    yield from _kept(_slowdown(case, step))


def _blocks(kind: _Kind) -> Input:
    return number("b", kind.blocks, "such blocks on this rank")


def _passes(kind: _Kind, gradients: float = 2.0) -> Input:
    parts = ["1 forward"] if kind.forward else []
    if kind.backward:
        parts.append(f"{gradients:.3g} backward")
    if kind.backward and kind.again:
        parts.append(f"{kind.again:.3g} made again")
    return number("d", kind.passes(gradients), f"passes: {', '.join(parts)}")


def _matmuls(case: Case, kind: _Kind) -> Explained:
    work, device = block_work(kind.case), case.cluster.device
    forward, backward = device_parts(work, device)
    slow, micro = _slowest(case), _micro_batches(case)
    each = kind.forward * forward.matmuls
    each += kind.backward * (kind.again * forward.matmuls + backward.matmuls)
    value = slow.value * micro.value * kind.blocks * each
    products = [each.product for each in block_operators(work) if each.product]
    flops = sum(product.flops for product in products)
    weights = flops / 2 / work.tokens
    # by the input, and by the weight of what is trained
    gradients = 1 + sum(product.flops for product in products if product.is_trained) / flops
    peak = device.peak_flops_per_second(work.precision)
    reached = device.fit.matmul_fraction
    reached *= device.fit.fp8_fraction if work.precision == "fp8" else 1.0
    sustained = device.fit.sustained(work.family)
    full = kind.passes(gradients) * 2 * work.tokens * weights / (peak * reached * sustained)
    return Explained(
        name=f"matmuls{kind.name}",
        value=value,
        unit="s",
        formula="s * m * b * d * 2 * t * W / (P * c * u * q)",
        inputs=(
            slow,
            micro,
            _blocks(kind),
            _passes(kind, gradients),
            number("t", work.tokens, "tokens of a micro-batch on this rank"),
            number("W", weights, "weights of a block that a token meets here"),
            Input(symbol="P", value=peak, unit="FLOP/s", words=f"{work.precision} peak (profile)"),
            number("c", reached, "share that large matmuls reach (matmul_fraction, profile)"),
            number("u", sustained, "of it in a long step (sustained_fraction, profile)"),
            number("q", full / each if each else 1.0, "left by tiles, fill and start"),
        ),
        source="cost/kernels/rates.py matmul_seconds; docs/explanation/compute.md",
    )


KERNEL_WORDS: dict[AttentionKernel, str] = {
    "cudnn": "cuDNN's kernel: attention_forward_fraction * native_attention_ratio",
    "flash": "FlashAttention-2: attention_forward_fraction",
    "efficient": "the memory-efficient kernel, half of attention_forward_fraction",
    "scores": "plain scores, as if fused: attention_forward_fraction",
}


def _attention(case: Case, kind: _Kind) -> Explained:
    work, device = block_work(kind.case), case.cluster.device
    forward, backward = device_parts(work, device)
    slow, micro = _slowest(case), _micro_batches(case)
    each = kind.forward * forward.attention
    each += kind.backward * (kind.again * forward.attention + backward.attention)
    value = slow.value * micro.value * kind.blocks * each
    flops = attention_forward_flops_per_token(
        model=kind.case.model, seq_len=work.seq_len, document_tokens=work.document_tokens
    )
    flops /= work.tp
    peak = device.peak_flops_per_second(work.activation_dtype)
    kernel = work.attention_kernel
    reached = kernel_fraction(kernel, "forward", device)
    full = kind.passes() * work.tokens * flops / (peak * reached)
    query, values = head_channels(kind.case.model)
    return Explained(
        name=f"attention{kind.name}",
        value=value,
        unit="s",
        formula="s * m * b * d * t * A / (P * c * q)",
        inputs=(
            slow,
            micro,
            _blocks(kind),
            _passes(kind),
            number("t", work.tokens, "tokens of a micro-batch on this rank"),
            Input(
                symbol="A",
                value=flops,
                unit="FLOP",
                words=f"of a token's scores and sums here (heads of {query} and {values})"
                if kind.case.model.mixer == "A"
                else "of a token's share of the states of its chunk here",
            ),
            Input(
                symbol="P",
                value=peak,
                unit="FLOP/s",
                words=f"{work.activation_dtype} peak (profile)",
            ),
            number("c", reached, f"share in forward, {KERNEL_WORDS[kernel]} (profile)"),
            number(
                "q", full / each if each else 1.0, "left by tiles, masks, backward and long steps"
            ),
        ),
        source="cost/kernels/attention.py; docs/explanation/compute.md",
    )


def _element_wise(case: Case, kind: _Kind) -> Explained:
    work, device = block_work(kind.case), case.cluster.device
    streams, kernels = element_wise_bytes(work), element_wise_kernels(on_device(work))
    forwards = kind.forward + kind.backward * kind.again

    def of(forward: float, backward: float) -> float:
        return forwards * forward + kind.backward * backward

    traffic = of(*streams)
    started = of(*kernels)
    slow, micro, start = _slowest(case), _micro_batches(case), device.fit.matmul_start_seconds
    each = traffic / memory_bytes_per_second(device) + started * start
    return Explained(
        name=f"element-wise kernels{kind.name}",
        value=slow.value * micro.value * kind.blocks * each,
        unit="s",
        formula="s * m * b * (V / (B * f) + k * l)",
        inputs=(
            slow,
            micro,
            _blocks(kind),
            Input(
                symbol="V",
                value=traffic,
                unit="B",
                words="norms, activations, additions, casts and routing move, both ways",
            ),
            *_memory_rate(case),
            number("k", started, "kernels of it"),
            _seconds("l", start, "start of a kernel (matmul_start_seconds, profile)"),
        ),
        source="cost/block/operators.py block_operators; docs/explanation/compute.md",
    )


def _launches(case: Case, kind: _Kind) -> Explained:
    block = block_times(kind.case).seconds
    host = (1 - kind.forward) * block.forward_host_seconds
    host += (1 - kind.backward) * (block.recompute_host_seconds + block.backward_host_seconds)
    launch = case.cluster.device.fit.kernel_launch_seconds
    slow, micro = _slowest(case), _micro_batches(case)
    return Explained(
        name=f"waits for the host{kind.name}",
        value=slow.value * micro.value * kind.blocks * host,
        unit="s",
        formula="s * m * b * o * l",
        inputs=(
            slow,
            micro,
            _blocks(kind),
            number("o", host / launch if launch else 0.0, "operators of passes that wait for it"),
            _seconds("l", launch, "host's time for one (kernel_launch_seconds, profile)"),
        ),
        source="cost/kernels/compute.py host_seconds; docs/explanation/compute.md",
    )


def _ends(case: Case, stage: Stage) -> Explained:
    training, device, micro = case.training, case.cluster.device, _micro_batches(case)
    slow = _slowest(case)
    each = sum(ends_seconds(case, stage))
    value = slow.value * micro.value * each
    source = "cost/kernels/head.py; docs/explanation/compute.md"
    if not stage.has_head:
        return _by_memory(
            case,
            name="embedding",
            value=value,
            words="rows of the embedding, read, written and added, in a step",
            source=source,
        )
    tokens = local_tokens(training=training, layout=case.layout)
    vocab = case.model.vocab_rows(case.layout.tp) // case.layout.tp
    dtype = training.activation_dtype
    sustained = in_family(device, training.family).fit.sustained_fraction
    peak = device.peak_flops_per_second(dtype)
    passes = 3 if trains_ends(case.model) else 2  # by the input alone
    weights = case.model.hidden * vocab
    full = passes * 2 * tokens * weights / (peak * device.fit.matmul_fraction * sustained)
    return Explained(
        name="head, loss and embedding",
        value=value,
        unit="s",
        formula="s * m * d * 2 * t * h * v / (P * c * u * q)",
        inputs=(
            slow,
            micro,
            number("d", passes, f"passes: 1 forward, {passes - 1} backward"),
            number("t", tokens, "tokens of a micro-batch on this rank"),
            number("h", case.model.hidden, "width of the model"),
            number("v", vocab, "rows of the vocabulary on this rank"),
            Input(symbol="P", value=peak, unit="FLOP/s", words=f"{dtype} peak (profile)"),
            number("c", device.fit.matmul_fraction, "share of large matmuls (profile)"),
            number("u", sustained, "of it in a long step (sustained_fraction, profile)"),
            number("q", full / each, "left by passes over the logits, the table, tiles"),
        ),
        source=source,
    )


def _by_memory(case: Case, *, name: str, value: float, words: str, source: str) -> Explained:
    """A term that waits for the device's memory: bytes in a step over what it reaches."""
    slow, rate = _slowest(case), memory_bytes_per_second(case.cluster.device)
    traffic = Input(symbol="V", value=value / slow.value * rate, unit="B", words=words)
    return Explained(
        name=name,
        value=value,
        unit="s",
        formula="s * V / (B * f)",
        inputs=(slow, traffic, *_memory_rate(case)),
        source=source,
    )


def _gradients(case: Case, stages: tuple[Stage, ...]) -> Explained:
    slow = _slowest(case).value
    return _by_memory(
        case,
        name="gradients added up",
        value=slow * max(gradient_seconds(case, held) for held in dict.fromkeys(stages)),
        words="to add and copy gradients of the micro-batches, in a step",
        source="cost/kernels/gradients.py gradient_seconds; docs/explanation/overlap.md",
    )


def _slowdown(case: Case, step: StepTime) -> Explained:
    device, slow = case.cluster.device, _slowest(case)
    lost = slowdown_seconds(step.communication, device)
    hidden = sum(max(0.0, row.seconds - row.exposed_seconds) for row in step.communication)
    fraction = device.fit.overlap_slowdown_fraction
    # no more than the kernels themselves; `step_time` takes the lesser
    lost = min(lost, step.time.compute_seconds / slow.value - lost)
    return Explained(
        name="slowed down by collectives",
        value=slow.value * lost,
        unit="s",
        formula="s * k * H * r",
        inputs=(
            slow,
            number("k", fraction, "what a full one takes (overlap_slowdown_fraction, profile)"),
            _seconds("H", hidden, "collectives that run beside kernels"),
            number(
                "r",
                lost / (fraction * hidden) if fraction * hidden else 0.0,
                "their wire rate over an eighth of the memory's, 1 at most, in the mean",
            ),
        ),
        source="cost/read/exposed.py slowdown_seconds; docs/explanation/overlap.md",
    )


def _rest(case: Case, seconds: float) -> Explained:
    return _by_memory(
        case,
        name="copies and the rest",
        value=seconds,
        words="FSDP's copies, and what no other term has, as bytes of the memory's time",
        source="cost/traffic/fsdp.py copy_seconds; docs/explanation/overlap.md",
    )


def _collective(case: Case, row: CollectiveCost) -> Explained:
    """Waiting for calls of one kind: part of what their bytes take at the rate that they reach."""
    wire = wire_bytes(
        collective=row.collective,  # type: ignore[arg-type]
        gathered_bytes=row.bytes / row.count,
        ranks=row.ranks,
    )
    alike = row.bytes / row.count * (row.ranks - 1) / row.ranks
    factor = wire / alike
    level = next(level for level in case.cluster.levels if level.name == row.level)
    datasheet = level.port_bandwidth_bytes_per_second * level.ports
    inside = "" if level is case.cluster.levels[0] else " of a domain below"
    return Explained(
        name=f"exposed {row.collective} over {row.axis} ({row.level})",
        value=row.exposed_seconds,
        unit="s",
        formula="x * c * k * S * (n - 1) / n / R",
        inputs=(
            number("x", row.exposed_seconds / row.seconds, "share that hides behind nothing"),
            number("c", row.count, "calls in a step"),
            number("k", factor, "times that the buffer goes over the wire"),
            Input(
                symbol="S",
                value=row.bytes / row.count,
                unit="B",
                words=f"whole buffer of a call, {row.dtype}",
            ),
            number("n", row.ranks, "ranks of the group"),
            Input(
                symbol="R",
                value=row.count * wire / row.seconds,
                unit="B/s",
                words=f"of a rank: left of {row.level}'s {datasheet / 1e9:.4g} GB/s{inside} by "
                "sharing it, hops, start and protocol",
            ),
        ),
        source="cost/network/collectives.py; docs/explanation/collectives.md",
    )


def _bubble(case: Case, time: TimeBreakdown) -> Explained:
    layout = case.layout
    even = (layout.pp - 1) / (layout.num_microbatches * layout.virtual_stages)
    ideal = even * time.compute_seconds
    return Explained(
        name="pipeline bubble",
        value=time.bubble_seconds,
        unit="s",
        formula="(p - 1) / (m * v) * C * x",
        inputs=(
            number("p", layout.pp, "ranks of the pipeline (layout)"),
            _micro_batches(case),
            number("v", layout.virtual_stages, "stages of a rank (layout)"),
            _seconds("C", time.compute_seconds, "what this rank computes: the terms above"),
            number(
                "x",
                time.bubble_seconds / ideal if ideal else 0.0,
                f"left by {layout.schedule}, uneven stages and what others wait for, played",
            ),
        ),
        source="cost/play/pipeline.py; docs/explanation/pipeline.md",
    )


def _optimizer(case: Case, time: TimeBreakdown, stages: tuple[Stage, ...]) -> Explained:
    held = max(dict.fromkeys(stages), key=lambda stage: layout_optimizer_seconds(case, stage))
    elements = max(1, optimizer_elements(case, held))
    slow, device = _slowest(case), case.cluster.device
    each = time.optimizer_seconds / slow.value * memory_bytes_per_second(device) / elements
    where = ", on the host" if case.layout.offload == "cpu" else ""
    return Explained(
        name="optimizer",
        value=time.optimizer_seconds,
        unit="s",
        formula="s * N * a / (B * f)",
        inputs=(
            slow,
            number("N", elements, "parameters that this rank updates"),
            Input(
                symbol="a",
                value=each,
                unit="B",
                words=f"moved for one by norm, clipping and {case.training.optimizer}{where}",
            ),
            *_memory_rate(case),
        ),
        source="cost/kernels/optimizer.py; docs/explanation/compute.md",
    )


def _host(case: Case, time: TimeBreakdown, stage: Stage) -> Explained:
    elements = max(1, optimizer_elements(case, stage))
    device = case.cluster.device
    of = formats(training=case.training, layout=case.layout)
    moved = float(elements * of.kept_gradient)
    link = device.host_link_bytes_per_second * device.fit.host_link_fraction
    return Explained(
        name="host copies",
        value=time.host_seconds,
        unit="s",
        formula="y * N * e / L",
        inputs=(
            number("y", time.host_seconds * link / moved, "times that the shard is waited for"),
            number("N", elements, "parameters of this rank's shard"),
            Input(symbol="e", value=of.kept_gradient, unit="B", words="of one"),
            Input(symbol="L", value=link, unit="B/s", words="host link, as far as copies reach"),
        ),
        source="cost/read/passes.py; docs/explanation/overlap.md",
    )
