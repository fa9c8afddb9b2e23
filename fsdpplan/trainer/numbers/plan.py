"""A plan's layout around a tiny model: what is stepped before training to see whether it adds up.

Degrees, schedule, policies and the kinds of everything in a block are the plan's; widths, blocks,
tokens and micro-batches are as few as these let. Widths that FSDP splits are as long as it has
ranks, so that each rank holds something.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import lcm

from ..config import (
    AdaptersConfig,
    ExpertsConfig,
    LatentConfig,
    LayoutConfig,
    ModelConfig,
    PlanConfig,
)

HEAD_DIM = 8
HIDDEN = 32
RANK = 4
"""Of adapters, at most."""
MOST_ROWS = 4096
"""Of a matrix on a tensor-parallel rank: with more FSDP ranks than these, some hold nothing."""
MOST_KINDS = 31
"""Different sequences of a step; a prime, so that no degree is in step with them."""
LEAST_KINDS = 3
MOST_TOKENS = 4096
"""Tokens x blocks that one process computes for comparison."""
RING_PIECE = 32
"""Tokens of a piece that CUDA's memory-efficient attention, by which fp32 goes around a ring, keeps
its sums of exponentials for."""


def tiny_plan(plan: PlanConfig, *, in_own_formats: bool) -> PlanConfig:
    """The plan with a tiny model; in fp32 throughout, or in the plan's own number formats."""
    layout = _layout(plan)
    training = replace(
        plan.training,
        seq_len=_tokens(plan),
        global_batch=layout.data_parallel * layout.micro_batch * layout.num_microbatches,
        precision_switch="none",
        dropout=None,  # no two layouts draw the same
        # torchao compiles the step of the 8-bit one, which takes longer than all of this
        optimizer="muon" if plan.training.optimizer == "muon" else "adamw",
        adapters=_adapters(plan.training.adapters),
    )
    if not in_own_formats:
        training = replace(
            training,
            precision="fp32",
            reduce_dtype="fp32",
            param_dtype="fp32",
            gradient_compression="none",
            fp8_all_gather=False,
            adapters=training.adapters and replace(training.adapters, dtype="fp32"),
        )
    tiny = replace(plan, training=training, layout=layout)
    blocks = sum(layout.stage_blocks) or (4 if layout.wrap_blocks > 1 else 2)
    return replace(tiny, model=_model(plan, blocks=blocks, tokens=training.seq_len))


def _adapters(adapters: AdaptersConfig | None) -> AdaptersConfig | None:
    """Of so low a rank that tiny matrices have it, with a scale of one, and without dropout."""
    if adapters is None:
        return None
    rank = min(adapters.rank, RANK)
    return replace(adapters, rank=rank, alpha=float(rank), rslora=False, dropout=0.0)


def has_other_formats(plan: PlanConfig) -> bool:
    """Whether the plan computes or reduces in anything but fp32."""
    return (plan.training.precision, plan.training.reduce_dtype) != ("fp32", "fp32")


def sequences_of(plan: PlanConfig) -> int:
    """Of a step."""
    return plan.training.global_batch


def kinds_of(plan: PlanConfig) -> int:
    """How many different sequences a step of the tiny plan has: so few, whatever the world, that
    one process computes them all in no time; sequence s is of kind s modulo this."""
    room = MOST_TOKENS // (plan.training.seq_len * plan.model.layers)
    most = max(LEAST_KINDS, min(MOST_KINDS, room))
    if sequences_of(plan) <= most:
        return sequences_of(plan)
    return next(n for n in range(most, 1, -1) if all(n % m for m in range(2, n)))


def sequence_number(layout: LayoutConfig, *, micro_batch: int, part: int, row: int) -> int:
    """The number of a row of a micro-batch of the data-parallel rank `part`: as in training."""
    return (micro_batch * layout.data_parallel + part) * layout.micro_batch + row


def counted_kinds(plan: PlanConfig) -> Counter[int]:
    """Kind -> its sequences in a step."""
    kinds = kinds_of(plan)
    return Counter(number % kinds for number in range(sequences_of(plan)))


def _layout(plan: PlanConfig) -> LayoutConfig:
    layout = plan.layout
    return replace(
        layout,
        micro_batch=min(layout.micro_batch, 2),
        num_microbatches=_micro_batches(layout),
        wrap_blocks=min(layout.wrap_blocks, 2),
        ddp_bucket_bytes=min(layout.ddp_bucket_bytes, 20_000),
        loss_chunks=min(layout.loss_chunks, 3),
        stage_blocks=tuple(min(1, blocks) for blocks in layout.stage_blocks),
        compile=False,
        async_tp=False,
    )


def _micro_batches(layout: LayoutConfig) -> int:
    """As few as the schedule takes, and two at least where the plan has several."""
    if layout.pp == 1:
        return min(layout.num_microbatches, 2)
    rounds = 2 if layout.schedule in ("zbv", "dualpipev") else 1
    return min(layout.num_microbatches, rounds * layout.pp)


def _tokens(plan: PlanConfig) -> int:
    """Of a sequence: two at least for each rank that shares it, of context and tensor."""
    cp, tp = plan.layout.cp, plan.layout.tp
    if cp > 1 and not plan.trades_heads:
        return 2 * cp * lcm(RING_PIECE, tp)
    unit = cp * tp
    return unit * max(2, -(-8 // unit))


def _model(plan: PlanConfig, *, blocks: int, tokens: int) -> ModelConfig:
    model, tp = plan.model, plan.layout.tp
    heads, kv_heads = _heads(plan)
    in_fp8 = plan.training.precision == "fp8"  # whose products want 16 numbers on each rank
    latent = None if model.latent is None else _latent(model.latent)
    return replace(
        model,
        layers=blocks,
        hidden=16 * lcm(2, tp) if in_fp8 else HIDDEN,
        ffn_hidden=_rows(plan, least=16 if in_fp8 else 8, most=model.ffn_hidden // tp) * tp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM if latent is None else latent.rope_head_dim + HEAD_DIM,
        # one less than tp divides, where the plan's is padded, too
        vocab=_rows(plan, least=-(-64 // tp), most=model.vocab // tp) * tp
        - (model.vocab_rows(tp) > model.vocab),
        max_positions=tokens,
        sliding_window=_window(plan, tokens),
        full_attention_every=min(model.full_attention_every, 2),
        networks="".join(sorted(set(model.networks)))[:blocks],
        experts=None if model.experts is None else _experts(plan, model.experts, blocks),
        latent=latent,
    )


def _rows(plan: PlanConfig, *, least: int, most: int) -> int:
    """Of a matrix on a tensor-parallel rank: one for each rank of FSDP, if the plan has so many."""
    ranks = plan.layout.shard_ranks
    wanted = max(least, min(-(-ranks // 8) * 8, MOST_ROWS))
    return wanted if wanted <= most else max(1, most)


def _heads(plan: PlanConfig) -> tuple[int, int]:
    """(heads, heads of keys): shared by two where the plan shares them."""
    model, layout = plan.model, plan.layout
    kv_heads = lcm(2, layout.tp)
    heads = kv_heads * min(2, model.heads // model.kv_heads)
    if layout.cp > 1 and plan.trades_heads:  # where ranks share the heads
        heads = lcm(heads, layout.tp * layout.cp)
    return heads, heads if model.heads == model.kv_heads else kv_heads


def _latent(latent: LatentConfig) -> LatentConfig:
    return replace(
        latent,
        kv_rank=12,
        query_rank=12 if latent.query_rank else 0,
        rope_head_dim=HEAD_DIM,
        value_head_dim=HEAD_DIM,
    )


def _window(plan: PlanConfig, tokens: int) -> int:
    """Half a sequence, where the plan's is shorter than its sequences."""
    window = plan.model.sliding_window
    if not window:
        return 0
    return tokens // 2 if window < plan.training.seq_len else tokens


def _experts(plan: PlanConfig, experts: ExpertsConfig, blocks: int) -> ExpertsConfig:
    """As many for each rank of ep as make FSDP split them the way it splits the plan's."""
    layout = plan.layout
    ep, tp, ranks = layout.ep, layout.tp, layout.shard_ranks // layout.ep
    here, inner = experts.experts // ep, experts.hidden // tp
    several = min(here, max(2, -(-4 // ep)))
    if here >= ranks:  # whole experts
        several, rows = max(several, ranks), 8
    else:
        several = min(several, ranks - 1)
        rows = lcm(8, ranks) if inner % ranks == 0 else (8 if 8 % ranks else 9)
    number = several * ep
    return replace(
        experts,
        experts=number,
        active=max(1, min(experts.active, 2, number - 1)),
        hidden=rows * tp,
        shared_hidden=8 * tp if experts.shared_hidden else 0,
        dense_layers=min(experts.dense_layers, 1) if blocks > 1 else 0,
    )
