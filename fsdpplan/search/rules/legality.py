"""Legality: why a layout cannot be trained, before anything is priced.

Each rule gives (reason, sentence): the reason is what the search counts, the sentence is what the
user reads, with what would be right.

Pieces: head and loss computed piece by piece, where the logits stand in the way.

It costs next to nothing, but is one setting more; and the fewer pieces, the less it costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.cost.schedule.stages import layout_stage_blocks
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.adapters import adapter_layout_problems, adapter_question_problems
from fsdpplan.search.rules.program import program_problems, program_question_problems
from fsdpplan.search.rules.rule import (
    Problem,
    host_memory_problems,
    pipeline_problems,
    sharding_problems,
)
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import MIXERS, Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import RUNTIMES
from fsdpplan.spec.torch_features import lacking
from fsdpplan.spec.training import DTYPE_BYTES, Training, program_named
from fsdpplan.spec.values import replace

PIECE_TOKENS = 1024
"""Tokens of a piece at the most: enough rows for matmuls at full rate."""

MOST_BYTES_A_LOGIT = 32
"""More than what all tensors of a whole loss, and what is reserved beside them, take."""

LEAST_PIECE_TOKENS = 128
"""Of a piece at the least: with fewer, kernels are started more often than they are worth."""

MANY_LOSSES_SCHEDULES = frozenset({"gpipe", "looped_bfs", *SPLIT_BACKWARD_SCHEDULES})
"""Schedules that have several losses waiting, each of which would hold a gradient of the head's
weight."""


def piece_counts(layout: Layout, *, training: Training, pins: Pins) -> tuple[int, ...]:
    """Numbers of pieces that the loss of `layout` can have, ascending; none where it cannot be cut,
    or the user has fixed them."""
    if pins.loss_chunks is not None or next(_refusals(layout, training), None):
        return ()
    tokens = local_tokens(training=training, layout=layout)
    powers = {2**n for n in range(1, max(1, tokens // LEAST_PIECE_TOKENS).bit_length())}
    return tuple(sorted(n for n in {*powers, usual_pieces(layout, training)} if n <= tokens))


def usual_pieces(layout: Layout, training: Training) -> int:
    """Pieces that are large enough for matmuls at full rate, and no larger."""
    return max(2, -(-local_tokens(training=training, layout=layout) // PIECE_TOKENS))


def in_pieces(layout: Layout, *, training: Training, pins: Pins) -> Layout | None:
    """`layout` with its loss in the usual pieces; None where it cannot be, or the user has fixed
    them."""
    usual = usual_pieces(layout, training)
    if usual not in piece_counts(layout, training=training, pins=pins):
        return None
    return replace(layout, loss_chunks=usual)


def most_saved_bytes(case: Case) -> int:
    """What pieces can spare at the most: logits, and the head as autocast keeps it beside them."""
    model, layout = case.model, case.layout
    tokens = local_tokens(training=case.training, layout=layout)
    head = 0 if layout.sharding == "fsdp" else DTYPE_BYTES["fp32"] * model.hidden
    return (MOST_BYTES_A_LOGIT * tokens + head) * (model.vocab_rows(layout.tp) // layout.tp)


def pieces_problems(*, layout: Layout, training: Training) -> Iterator[Problem]:
    """What is wrong with the number of pieces."""
    if layout.loss_chunks == 1:
        return
    yield from _refusals(layout, training)
    tokens = local_tokens(training=training, layout=layout)
    if layout.loss_chunks > tokens:
        yield Problem(
            reason="more pieces of the loss than tokens",
            sentence=f"{tokens} tokens a micro-batch and rank do not split into "
            f"{layout.loss_chunks} pieces; use a --loss-chunks of at most {tokens}",
        )


def _refusals(layout: Layout, training: Training) -> Iterator[Problem]:
    """Why the loss cannot be cut, into however many pieces."""
    if training.runtime != "fsdp2":
        yield Problem(
            reason="a loss in pieces with another runtime",
            sentence=f"runtime {training.runtime} has a loss of its own, not one in "
            f"{layout.loss_chunks} pieces; leave --loss-chunks out, or use --runtime fsdp2",
        )
    if layout.schedule in MANY_LOSSES_SCHEDULES:
        yield Problem(
            reason="a loss in pieces with a schedule that has many waiting",
            sentence=f"schedule {layout.schedule} has losses of several micro-batches waiting, and "
            "in pieces each holds a gradient of the head's weight; use --schedule 1f1b or "
            "interleaved_1f1b, or --loss-chunks 1",
        )


def torch_problems(case: Case) -> Iterator[Problem]:
    """The feature that the release lacks, with the first one that has it."""
    feature = lacking(case)
    if feature is not None:
        release = case.training.torch_release
        yield Problem(
            reason=f"torch {release} has no {feature.name} ({feature.since} has)",
            sentence=f"torch {release} has no {feature.name}, which came with {feature.since}: use "
            f"{feature.instead}, or --torch {feature.since} and an environment that has it",
        )


def question_problem(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins
) -> str | None:
    """Why no layout with these pins can be trained, whatever else it is; None if one may be."""
    rules = (
        _switch(cluster, training),
        *(_question(model, cluster, each) for _, each in training.phases),
        _experts(pins.ep or 1, model),
        _pinned_ring(pins, cluster, training),
        program_question_problems(model=model, cluster=cluster, training=training, pins=pins),
    )
    problem = next((problem for rule in rules for problem in rule), None)
    return problem.sentence if problem else None


def _pinned_ring(pins: Pins, cluster: Cluster, training: Training) -> Iterator[Problem]:
    """Older plans say ring where heads are traded anyway, so only who asks for one is refused."""
    if pins.cp_attention != "ring" or training.runtime != "fsdp2":
        return
    program = program_named(training.program)
    if cluster.device.kind == "cpu" or not (program.knows_blocks or program.is_target):
        who = "CPU processes" if cluster.device.kind == "cpu" else program.words
        yield Problem(
            reason="ring attention where heads are traded",
            sentence=f"cp_attention ring: {who} trade heads around attention; leave "
            "--cp-attention out",
        )


def legal_layout_problem(case: Case) -> str | None:
    """The first rule that the case breaks, as a sentence; None if it is legal."""
    problem = first_problem(case)
    return problem.sentence if problem else None


def first_problem(case: Case) -> Problem | None:
    """The first rule that the case breaks, in any part of its run."""
    return next(problems(case), None)


def problems(case: Case) -> Iterator[Problem]:
    """The rules that the case breaks, in any part of its run; rules after the first may be asked
    about what an earlier one forbids."""
    if case.training.precision_switch != "none":
        unknown = next(_switch(case.cluster, case.training), None)
        if unknown is not None:
            yield unknown
            return
        for _, each in case.phases:
            yield from problems(each)
        return
    model, cluster, training, layout = case.model, case.cluster, case.training, case.layout
    rules = (
        _question(model, cluster, training),
        _ranks(layout, cluster),
        _tensor_parallel(case),
        _context_parallel(case),
        _expert_parallel(case),
        sharding_problems(case),
        _batch(layout, training),
        pieces_problems(layout=layout, training=training),
        adapter_layout_problems(training, layout),
        _optimizer(layout, training),
        pipeline_problems(model=model, layout=layout, traits=training.traits),
        host_memory_problems(case),
        _recomputation(layout, model),
        torch_problems(case),
        program_problems(case),
    )
    for rule in rules:
        yield from rule


def degrees_problem(case: Case) -> Problem | None:
    """The first rule that the degrees of a layout inside data parallelism break, whatever its
    policies."""
    rules = (
        _tensor_parallel(case),
        _context_parallel(case),
        _expert_parallel(case),
    )
    return next((problem for rule in rules for problem in rule), None)


def _switch(cluster: Cluster, training: Training) -> Iterator[Problem]:
    device = cluster.device
    if training.precision_switch != "none" and device.peak_fp8_flops_per_second is None:
        yield Problem(
            reason="the device has no fp8",
            sentence=f"{device.name} has no fp8, and precision_switch is a change to it or from "
            "it: leave --precision-switch out",
        )


def _question(model: Model, cluster: Cluster, training: Training) -> Iterator[Problem]:
    yield from adapter_question_problems(model, training)
    device = cluster.device
    if training.precision == "fp8" and device.peak_fp8_flops_per_second is None:
        yield Problem(
            reason="the device has no fp8",
            sentence=f"{device.name} has no fp8: use --precision bf16",
        )
    has_delayed_scales = training.precision == "fp8" and training.fp8_recipe == "delayed"
    if has_delayed_scales and training.runtime == "fsdp2":
        yield Problem(
            reason="runtime fsdp2 has no delayed scales",
            sentence="fp8_recipe delayed is Transformer Engine's, and runtime fsdp2 has torchao's "
            "tensorwise and rowwise: use --fp8-recipe rowwise, or --runtime megatron",
        )
    if model.positions == "learned" and training.seq_len > model.max_positions:
        yield Problem(
            reason="sequence longer than the position table",
            sentence=f"{model.name} has {model.max_positions} learned positions; use --seq-len "
            f"{model.max_positions} or less, not {training.seq_len}",
        )
    scaling = model.rope_scaling
    is_dynamic = scaling is not None and scaling.kind == "dynamic"
    if scaling and is_dynamic and training.packed and training.seq_len > scaling.original_positions:
        yield Problem(
            reason="dynamic positions of packed documents",
            sentence=f"{model.name} scales positions by the length of a sequence beyond "
            f"{scaling.original_positions} tokens, and transformers by the longest document that "
            f"it has met; use --no-pack, or --seq-len {scaling.original_positions} or less",
        )


def _ranks(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if layout.world != cluster.gpus:
        yield Problem(
            reason="degrees do not multiply to the GPUs",
            sentence=f"pp {layout.pp} x dp_replicate {layout.dp_replicate} x dp_shard "
            f"{layout.dp_shard} x cp {layout.cp} x tp {layout.tp} = {layout.world} ranks, but "
            f"there are {cluster.gpus} GPUs; change --gpus or a degree",
        )


def _tensor_parallel(case: Case) -> Iterator[Problem]:
    training, layout = case.training, case.layout
    if training.runtime == "autocast" and max(layout.tp, layout.pp, layout.cp) > 1:
        yield Problem(
            reason="runtime autocast is data-parallel",
            sentence=f"runtime autocast is priced for DDP and FSDP, not with tp {layout.tp}, cp "
            f"{layout.cp} and pp {layout.pp}; use --tp 1 --cp 1 --pp 1, or --runtime fsdp2",
        )
    if layout.async_tp and not (layout.tp > 1 and layout.sequence_parallel):
        yield Problem(
            reason="async TP without tensor and sequence parallelism",
            sentence=f"async_tp overlaps the collectives of sequence parallelism, and tp is "
            f"{layout.tp}; use --tp 2 or more, or leave --async-tp out",
        )
    if layout.async_tp and not (layout.compile or training.traits.fused_kernels):
        yield Problem(
            reason="async TP without torch.compile",
            sentence="async_tp is a pass of torch.compile; use --compile, or leave --async-tp out",
        )
    peerless = case.cluster.peerless_level(layout.tp) if layout.async_tp else None
    if peerless is not None:
        yield Problem(
            reason="async TP without peer access",
            sentence=f"async_tp over {peerless.name} (tp {layout.tp}): it needs symmetric memory, "
            "and these GPUs cannot map each other's; leave --async-tp out",
        )
    if layout.tp > 1 and not (layout.sequence_parallel and layout.loss_parallel):
        yield Problem(
            reason="TP without sequence and loss parallelism is not searched",
            sentence=f"tp {layout.tp} is offered with sequence_parallel and loss_parallel only; "
            "use --sequence-parallel --loss-parallel, or --tp 1",
        )
    for field, value in _split_widths(case).items():
        if value % layout.tp:
            yield Problem(
                reason=f"tp does not divide {field}",
                sentence=f"tp {layout.tp} does not divide {field} {value} of {case.model.name}; "
                + _other_tp(case, field),
            )


def _other_tp(case: Case, field: str) -> str:
    """What to use in the place of a degree that does not divide a width."""
    if field != "kv_heads" or case.layout.tp % case.model.kv_heads:
        return "use another --tp"
    repeat = [one.name for one in RUNTIMES if one.repeats_kv_heads]
    return f"use another --tp; of the runtimes, {', '.join(repeat)} repeat these heads"


def _split_widths(case: Case) -> dict[str, int]:
    """What tensor parallelism splits, and nobody pads as vocabularies are padded."""
    model, layout = case.model, case.layout
    widths = {
        "heads": model.heads,
        "kv_heads": layout.tp if _repeats_kv_heads(case) else model.kv_heads,
        "ffn_hidden": model.ffn_hidden if model.dense_blocks else layout.tp,
        "seq_len": case.training.seq_len,
    }
    if model.delta:
        widths["key heads of the delta rule"] = model.delta.key_heads
    if model.mamba:
        widths["groups of the state space"] = model.mamba.groups
    if model.experts:
        if not layout.experts_over_tp:
            widths["hidden of an expert"] = model.experts.hidden
        widths["hidden of the shared experts"] = model.experts.shared_hidden
    return widths


def _repeats_kv_heads(case: Case) -> bool:
    """Whether equally many ranks share each key and value head, as the runtime lets them."""
    return case.training.traits.repeats_kv_heads and case.layout.tp % case.model.kv_heads == 0


def _context_parallel(case: Case) -> Iterator[Problem]:
    training, layout = case.training, case.layout
    if layout.cp == 1:
        return
    if case.model.has_unmeasured_mixers:
        letter = next((each for each in "DM" if each in case.model.mixers), "")
        yield Problem(
            reason="context parallelism of a state or an indexer",
            sentence=f"cp {layout.cp} splits sequences, and {case.model.name} has "
            + (
                f"{MIXERS[letter]} blocks, whose state would go from rank to rank"
                if letter
                else "an indexer that scores all keys of a sequence"
            )
            + ": that is not planned; use --cp 1",
        )
    pieces = 2 * layout.cp * layout.tp
    if training.seq_len % pieces:
        near = max(1, round(training.seq_len / pieces)) * pieces
        beside = f" and {layout.tp} tensor-parallel" if layout.tp > 1 else ""
        yield Problem(
            reason="cp does not divide the sequence in equal work",
            sentence=f"cp {layout.cp} cuts a sequence into {2 * layout.cp} pieces, two a rank, so "
            f"that causal attention is shared evenly{beside}: {training.seq_len} tokens do not "
            f"split into {pieces}; use --seq-len {near}, or another --cp",
        )
    if layout.cp_attention == "ulysses" and training.runtime != "fsdp2":
        yield Problem(
            reason="traded heads of another runtime",
            sentence=f"cp_attention ulysses is priced for fsdp2, and {training.traits.words} has a "
            "ring; use --cp-attention ring, or --runtime fsdp2",
        )
    if case.trades_heads:
        yield from _traded_heads(case)
    elif training.runtime == "fsdp2":
        yield from _ring(case)


def _traded_heads(case: Case) -> Iterator[Problem]:
    """The trainer adds heads of zeros, whose work is not priced."""
    layout, heads = case.layout, case.model.heads // case.layout.tp
    if heads % layout.cp:
        instead = ", or --cp-attention ring" if case.on_cuda else ""
        yield Problem(
            reason=f"cp does not divide the heads{'' if case.on_cuda else ' on CPU'}",
            sentence=f"cp {layout.cp}{'' if case.on_cuda else ' on CPU'} shares the {heads} heads "
            f"of a rank around attention, and does not divide them; use another --cp{instead}",
        )


def _ring(case: Case) -> Iterator[Problem]:
    """Source: torch 2.13 torch/distributed/tensor/experimental/_context_parallel/_attention.py."""
    model, layout = case.model, case.layout
    if model.windowed_blocks and model.sliding_window < case.training.seq_len:
        yield Problem(
            reason="ring attention with sliding windows",
            sentence=f"cp {layout.cp}: torch's ring attention knows no sliding window, and "
            f"{model.name} has one of {model.sliding_window} tokens; use --cp 1",
        )
    if case.training.packed:
        yield Problem(
            reason="ring attention with packed documents",
            sentence=f"cp {layout.cp}: torch's ring attention knows no documents; use --cp 1, or "
            "--no-pack",
        )
    if model.attention_sinks:
        yield Problem(
            reason="ring attention with attention sinks",
            sentence=f"cp {layout.cp}: torch's ring attention knows no attention sinks, which "
            f"{model.name} has; use --cp 1",
        )
    if case.training.dropped.attention:
        yield Problem(
            reason="ring attention with dropout",
            sentence=f"cp {layout.cp}: torch's ring attention keeps one seed for all its pieces, "
            "so backward would drop others than forward; use --cp 1, a --cp that divides the "
            "heads (--cp-attention ulysses), or --dropout 0",
        )


def _expert_parallel(case: Case) -> Iterator[Problem]:
    layout = case.layout
    yield from _experts(layout.ep, case.model)
    if layout.experts_over_tp:
        yield from _experts_over_tp(case)
    if layout.ep > 1 and layout.sharding == "ddp":
        yield Problem(
            reason="expert parallelism without a shard group",
            sentence=f"ep {layout.ep} divides the shard group, and sharding ddp has none; use "
            "--sharding fsdp with --dp-shard of at least ep",
        )


def _experts_over_tp(case: Case) -> Iterator[Problem]:
    model, training, layout = case.model, case.training, case.layout
    if model.experts is None:
        yield Problem(
            reason="experts over tp without experts",
            sentence=f"experts_over_tp: {model.name} is dense and has no experts; leave "
            "--experts-over-tp out",
        )
        return
    if layout.tp == 1:
        yield Problem(
            reason="experts over tp without tensor parallelism",
            sentence="experts_over_tp spreads experts over tensor-parallel ranks, and tp is 1; use "
            "--tp 2 or more, or leave --experts-over-tp out",
        )
    if not training.traits.spreads_experts:
        yield Problem(
            reason="the runtime splits every expert by tp",
            sentence=f"experts_over_tp is Megatron's expert tensor parallelism of 1, and runtime "
            f"{training.runtime} splits every expert by tp; use --runtime megatron, or leave "
            "--experts-over-tp out",
        )
    if model.experts.experts % layout.expert_ranks:
        yield Problem(
            reason="ep x tp does not divide the experts",
            sentence=f"ep {layout.ep} x tp {layout.tp} = {layout.expert_ranks} ranks do not divide "
            f"the {model.experts.experts} experts of {model.name}; use a smaller --ep or --tp, or "
            "leave --experts-over-tp out",
        )


def _experts(ep: int, model: Model) -> Iterator[Problem]:
    if ep == 1:
        return
    if model.experts is None:
        yield Problem(
            reason="expert parallelism without experts",
            sentence=f"ep {ep}: {model.name} is dense and has no experts; use --ep 1",
        )
    elif model.experts.experts % ep:
        near = max(d for d in range(1, ep) if not model.experts.experts % d)
        yield Problem(
            reason="ep does not divide the experts",
            sentence=f"ep {ep} does not divide the {model.experts.experts} experts of "
            f"{model.name}; use --ep {near}",
        )


def _recomputation(layout: Layout, model: Model) -> Iterator[Problem]:
    if layout.checkpoint_blocks == "all":
        return
    most = max(layout_stage_blocks(model=model, layout=layout))
    if layout.checkpoint_blocks > most:
        yield Problem(
            reason="more recomputed blocks than a stage has",
            sentence=f"checkpoint_blocks {layout.checkpoint_blocks}: no stage of {model.name} has "
            f"more than {most} blocks; use --checkpoint-blocks {most} or less, or leave it out to "
            "recompute all",
        )


def _batch(layout: Layout, training: Training) -> Iterator[Problem]:
    if training.global_batch % layout.data_parallel:
        yield Problem(
            reason="global batch is not a multiple of the data-parallel ranks",
            sentence=f"a global batch of {training.global_batch} sequences does not split over "
            f"{layout.data_parallel} data-parallel ranks; use --global-batch "
            f"{_nearest_multiple(training.global_batch, layout.data_parallel)}",
        )
        return
    if layout.global_batch != training.global_batch:
        per_rank = training.global_batch // layout.data_parallel
        yield Problem(
            reason="micro-batch does not divide the batch of a rank",
            sentence=f"each data-parallel rank has {per_rank} sequences a step, which "
            f"micro-batches of {layout.micro_batch} do not fill; use a --micro-batch that "
            f"divides {per_rank}",
        )


def _nearest_multiple(value: int, step: int) -> int:
    return max(1, round(value / step)) * step


def _optimizer(layout: Layout, training: Training) -> Iterator[Problem]:
    if training.optimizer == "muon" and layout.sharding in ("zero1", "zero2"):
        yield Problem(
            reason="Muon needs whole matrices",
            sentence=f"optimizer muon needs whole matrices, and {layout.sharding} cuts them "
            "anywhere; use --sharding fsdp or ddp",
        )
    if training.optimizer == "muon" and min(layout.pp, layout.tp, layout.shard_ranks) > 1:
        yield Problem(
            reason="Muon over three axes",
            sentence="optimizer muon deals matrices out over tp and dp_shard together, which "
            "pipeline stages of different kinds cannot agree on; use --pp 1, --tp 1 or "
            "--dp-shard 1",
        )
    if training.optimizer != "adamw" and layout.offload == "cpu":
        yield Problem(
            reason="only AdamW runs on the host",
            sentence=f"optimizer {training.optimizer} needs the device, and offload cpu keeps "
            "shards on the host; use --optimizer adamw, or --offload none",
        )
