"""Block calls: the collectives inside one block, and what each of them runs beside.

Tensor parallelism with sequence parallelism gathers the input of attention and of the feed-forward
network and reduce-scatters their outputs; without, it all-reduces the outputs (forward) and the
gradients of the inputs (backward). Context parallelism moves keys and values, expert parallelism
tokens to the ranks of their experts and back.

Source: arXiv 2104.04473 and 2205.05198 (tensor and sequence parallelism); torch 2.13
torch/distributed/tensor/experimental/_context_parallel and torch/_inductor/fx_passes/
micro_pipeline_tp.py; Megatron-LM megatron/core/tensor_parallel/layers.py and transformer/moe/
token_dispatcher.py. Counts of tensor with sequence parallelism equal torch's (tests/ground_truth).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Literal

from fsdpplan.cost.block.work import repeats_whole_block
from fsdpplan.cost.model.formats import Ways, inner_ways, local_tokens, sums_before_products
from fsdpplan.cost.model.params import Place, block_tensors
from fsdpplan.cost.network.placement import cp_group, ep_group, group_placement, tp_group
from fsdpplan.cost.traffic.calls import (
    BlockCall,
    Overlap,
    Pass,
    activation_bytes,
    leaving_share,
    nodes_of,
    traded_heads_calls,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES, Training
from fsdpplan.spec.values import replace


def all_heads_norm_calls(case: Case, passes: tuple[Pass, ...]) -> Iterator[BlockCall]:
    """Norms of queries and of keys over all heads together, of which tensor parallelism splits: one
    fp32 number a token for queries, and one for keys, in each of the forward `passes` and in
    backward.

    Each rank has some heads' squares of a token; the ranks add up their sums, and in backward the
    gradients of these. So fsdpplan/trainer/model/norms.py does it.
    """
    model, layout = case.model, case.layout
    if not model.qk_norm or model.qk_norm_width != "all_heads" or model.latent:
        return
    for when in (*passes, "backward"):
        yield BlockCall(
            when=when,
            collective="all_reduce",
            group=tp_group(layout),
            dtype="fp32",
            count=2,
            place="attention",
            is_first=when != "backward",
            call_bytes=DTYPE_BYTES["fp32"] * local_tokens(training=case.training, layout=layout),
        )


Network = Literal["attention", "ffn", "experts"]
"""What tensor parallelism splits by its inner width."""


def block_calls(case: Case) -> tuple[BlockCall, ...]:
    """Collectives of one block and micro-batch on one rank; with experts: of one that has them.

    Attention over several ranks is a ring on CUDA, and all-to-all on CPU.
    """
    return _block_calls(inner_ways(case))


@lru_cache(maxsize=16384)
def _block_calls(ways: Ways) -> tuple[BlockCall, ...]:
    case = ways.case
    layout = case.layout
    calls: list[BlockCall] = []
    if layout.tp > 1:
        calls += _tensor_parallel(case)
        calls += all_heads_norm_calls(case, _passes(layout))
        calls += _expert_gradient_calls(case)
        calls += _shared_head_calls(case)
    if layout.cp > 1 and case.model.mixer == "A":
        attention = traded_heads_calls if case.trades_heads else _context_parallel
        calls += attention(case)
    if layout.expert_ranks > 1 and case.model.experts:
        calls += _expert_parallel(case)
    return tuple(calls)


def gathered_activation_dtype(training: Training) -> str:
    """Inputs of fp8 matmuls with one scale a tensor are cast before they are gathered.

    Source: torch 2.13's users torchao float8_tensor_parallel.py (tensorwise) and Transformer Engine
    pytorch/module/linear.py (delayed); scales a row are made after the gather.
    """
    if training.precision == "fp8" and training.fp8_recipe != "rowwise":
        return "fp8"
    return training.activation_dtype


def _passes(layout: Layout) -> tuple[Pass, ...]:
    """Forward, and once more where backward recomputes collectives too."""
    recomputes = layout.activation_checkpointing in ("op", "full")
    return ("forward", "recompute") if recomputes else ("forward",)


def _tensor_parallel(case: Case) -> Iterator[BlockCall]:
    training, layout = case.training, case.layout
    sizes = _network_bytes(case)
    repeats_all = repeats_whole_block(model=case.model, training=training)
    for when in _passes(layout):
        stops_early = when == "recompute" and not repeats_all
        for network, size in sizes:
            is_last = (network, size) == sizes[-1]
            yield from _forward_calls(
                training, layout, when, network, size, has_output=not (stops_early and is_last)
            )
    for network, size in sizes:
        yield from _backward_calls(case, network, size)
    if sums_before_products(training):
        yield from _latent_gradient_calls(case)


def _shared_head_calls(case: Case) -> Iterator[BlockCall]:
    """What ranks that share a key head gather of each other's projections, and in backward the
    gradients of these.

    Source: Megatron-LM megatron/core/transformer/attention.py, where num_query_groups is below the
    tensor-parallel ranks: the joined projection is gathered whole, and a rank takes its part.
    """
    model, training, layout = case.model, case.training, case.layout
    if model.mixer != "A" or model.latent or layout.tp <= model.kv_heads:
        return
    queries = model.heads * (2 if model.attention_gate else 1)  # its gate is made beside a query
    width = model.head_dim * (queries + 2 * model.kv_heads)
    tokens = local_tokens(training=training, layout=layout)
    for when in (*_passes(layout), "backward"):
        yield BlockCall(
            when=when,
            collective="reduce_scatter" if when == "backward" else "all_gather",
            group=tp_group(layout),
            dtype=training.activation_dtype,
            call_bytes=tokens * width * DTYPE_BYTES[training.activation_dtype],
            place="attention_in",
        )


def _latent_gradient_calls(case: Case) -> Iterator[BlockCall]:
    """Gradients of the latents, which heads on other ranks have parts of, for the product that
    makes the input's gradient and for the one that makes the weight's."""
    model, layout = case.model, case.layout
    latent = model.latent
    if latent is None or not layout.sequence_parallel:
        return
    row = activation_bytes(case) // model.hidden
    for width in filter(None, (latent.query_rank, latent.kv_rank + latent.rope_head_dim)):
        yield BlockCall(
            when="backward",
            collective="reduce_scatter",
            group=tp_group(layout),
            dtype=case.training.activation_dtype,
            call_bytes=width * row,
            count=2,
            place="attention_in",
        )


def _network_bytes(case: Case) -> list[tuple[Network, int]]:
    """(network, bytes of its unsplit input) of the parts that tensor parallelism splits.

    Where ranks dispatch their own tokens, the experts of a rank gather `active` rows a token behind
    the all-to-all; but not where a rank has whole experts, which it sends its part to itself.
    """
    model, layout = case.model, case.layout
    size = activation_bytes(case)
    mixer: list[Network] = [] if model.mixer == "-" else ["attention"]
    if not model.has_network:
        return [("attention", size)]
    if model.experts is None:
        return [*((network, size) for network in mixer), ("ffn", size)]
    if layout.expert_ranks == 1 or case.training.traits.routes_whole_sequence:
        return [*((network, size) for network in mixer), ("experts", size)]
    networks: list[Network] = [*mixer, "experts"] if model.experts.shared_hidden else mixer
    split: list[tuple[Network, int]] = [(network, size) for network in networks]
    if not layout.experts_over_tp:
        split.append(("experts", model.experts.active * size))
    return split


def _overlaps_tensor_parallel(training: Training, layout: Layout) -> bool:
    return layout.async_tp or training.traits.overlaps_tensor_parallel


def _places(network: Network) -> tuple[Place, Place]:
    """Where the input of a network is gathered, and its output reduced."""
    if network == "attention":
        return "attention_in", "attention_out"
    return "ffn_in", "ffn_out"


def _forward_calls(
    training: Training, layout: Layout, when: Pass, network: Network, size: int, *, has_output: bool
) -> Iterator[BlockCall]:
    """Gather the input, reduce the output; those of experts run beside nothing."""
    into, out = _places(network)
    group, dtype = tp_group(layout), training.activation_dtype
    if not layout.sequence_parallel:
        if has_output:
            yield BlockCall(
                when=when,
                collective="all_reduce",
                group=group,
                dtype=dtype,
                call_bytes=size,
                place=out,
            )
        return
    chunked = _overlaps_tensor_parallel(training, layout) and network != "experts"
    gathered = gathered_activation_dtype(training)
    yield BlockCall(
        when=when,
        collective="all_gather",
        group=group,
        dtype=gathered,
        call_bytes=size * DTYPE_BYTES[gathered] // DTYPE_BYTES[dtype],
        place=into,
        is_first=not chunked,
        overlap="chunks" if chunked else "none",
    )
    if has_output:
        yield BlockCall(
            when=when,
            collective="reduce_scatter",
            group=group,
            dtype=dtype,
            call_bytes=size,
            place=out,
            overlap="chunks" if chunked else "none",
        )


def _backward_calls(case: Case, network: Network, size: int) -> Iterator[BlockCall]:
    """Gather the output's gradient, reduce the input's, perhaps beside the weights' matmul.

    torch's async TP cuts a reduce-scatter into chunks only behind a single matmul, which the
    gradient of an input that several projections read does not have.
    """
    training, layout = case.training, case.layout
    traits = training.traits
    into, out = _places(network)
    group, dtype = tp_group(layout), training.activation_dtype
    is_beside = network != "experts"
    beside_weights: Overlap = "none"
    if traits.overlaps_weight_gradient and is_beside:
        beside_weights = "weights"
    read_by = 1 if traits.joined_projections else _projections(case.model, network)
    if not layout.sequence_parallel:
        yield BlockCall(
            when="backward",
            collective="all_reduce",
            group=group,
            dtype=dtype,
            call_bytes=size,
            count=read_by,
            place=into,
            overlap=beside_weights,
        )
        return
    chunked = _overlaps_tensor_parallel(training, layout) and is_beside
    gathered = gathered_activation_dtype(training)
    gather = BlockCall(
        when="backward",
        collective="all_gather",
        group=group,
        dtype=gathered,
        call_bytes=size * DTYPE_BYTES[gathered] // DTYPE_BYTES[dtype],
        place=out,
        is_first=not chunked,
        overlap="chunks" if chunked else "none",
    )
    yield gather
    if traits.overlaps_weight_gradient or traits.regathers_inputs:
        hidden: Overlap = "inputs" if is_beside else "none"
        yield replace(gather, place=into, is_first=not is_beside, overlap=hidden)
    behind: Overlap = "chunks" if chunked and read_by == 1 else "none"
    yield BlockCall(
        when="backward",
        collective="reduce_scatter",
        group=group,
        dtype=dtype,
        call_bytes=size,
        place=into,
        overlap=behind if beside_weights == "none" else beside_weights,
    )


def _projections(model: Model, network: Network) -> int:
    """Matrices that read the input of a network."""
    if network == "attention":
        return {"D": 2, "M": 1}.get(model.mixer, 3 + model.attention_gate)
    return 2 if model.is_gated else 1


def _context_parallel(case: Case) -> Iterator[BlockCall]:
    """Keys and values to all that need them, and their gradients back.

    Each of cp steps computes the scores with one piece of keys and values; causal masking is
    balanced by giving a rank an early and a late piece. Gathered at once (torch), the first step
    hides the gather; around a ring, each step hides the next piece's way. The gradients go around
    in both, fp32 in torch, and the last hop is exposed.
    """
    training, layout = case.training, case.layout
    group, cp = cp_group(layout), layout.cp
    dtype = training.activation_dtype
    elements = local_tokens(training=training, layout=layout) * _key_value_width(case.model, layout)
    size = elements * DTYPE_BYTES[dtype]
    recomputes = layout.activation_checkpointing in ("attention", "full")
    passes: tuple[Pass, ...] = ("forward", "recompute") if recomputes else ("forward",)
    ring = training.traits.ring_attention
    later = (cp - 1) / cp
    for when in (*passes, "backward") if not ring else passes:
        yield BlockCall(
            when=when,
            collective="send_recv" if ring else "all_gather",
            group=group,
            dtype=dtype,
            call_bytes=size if ring else cp * size,
            count=cp - 1 if ring else 1,
            place="attention",
            overlap="scores",
            share=later if ring else 1 / cp,
        )
    gradient_dtype = dtype if ring else "fp32"
    gradient_bytes = elements * DTYPE_BYTES[gradient_dtype]
    yield BlockCall(
        when="backward",
        collective="send_recv",
        group=group,
        dtype=gradient_dtype,
        call_bytes=gradient_bytes + (size if ring else 0),
        count=cp - 1,
        place="attention",
        overlap="scores",
        share=later,
    )
    yield BlockCall(
        when="backward",
        collective="send_recv",
        group=group,
        dtype=gradient_dtype,
        call_bytes=gradient_bytes,
        place="attention",
    )


def _key_value_width(model: Model, layout: Layout) -> int:
    """Width of keys and values together on one tensor-parallel rank."""
    if model.latent:
        return -(-(model.query_dim + model.value_dim) // layout.tp)
    return 2 * model.head_dim * -(-model.kv_heads // layout.tp)


def _expert_parallel(case: Case) -> Iterator[BlockCall]:
    """Dispatch and combine, all exposed: tokens wait for their experts, and the block for them.

        tokens of a rank * active experts * hidden * bytes

    Tensor-parallel ranks have their own part of the tokens, or each all of them. Assumes that the
    router spreads tokens evenly. A runtime may dispatch in fp8 where matmuls are, and send a token
    once to a node (`experts.leaving_share`).
    """
    model, training, layout = case.model, case.training, case.layout
    assert model.experts
    size = activation_bytes(case)
    has_part = layout.sequence_parallel and not training.traits.routes_whole_sequence
    has_part |= layout.experts_over_tp
    rows = model.experts.active * (-(-size // layout.tp) if has_part else size)
    group, dtype = ep_group(layout), training.activation_dtype
    share = 1.0
    if training.traits.sends_once_a_node:
        placement = group_placement(cluster=case.cluster, ranks=group.ranks, stride=group.stride)
        share = leaving_share(model.experts, nodes=nodes_of(placement))
    is_fp8 = training.precision == "fp8" and training.traits.dispatches_fp8
    sent: tuple[tuple[str, Place], ...] = (
        ("fp8" if is_fp8 else dtype, "ffn_in"),
        (dtype, "ffn_out"),
    )
    for when in (*_passes(layout), "backward"):
        for index, (each, place) in enumerate(reversed(sent) if when == "backward" else sent):
            yield BlockCall(
                when=when,
                collective="all_to_all",
                group=group,
                dtype=each,
                call_bytes=rows * DTYPE_BYTES[each] // DTYPE_BYTES[dtype],
                place=place,
                is_first=index == 0,
                leaving_share=share,
            )


def _expert_gradient_calls(case: Case) -> Iterator[BlockCall]:
    """Of what each tensor-parallel rank has in whole, and meets with a part of the outputs'
    gradients: router and gate, which are computed in fp32, and the biases of the experts' outputs.
    """
    model, training, layout = case.model, case.training, case.layout
    if model.experts is None or not training.traits.routes_whole_sequence:
        return
    for tensor in block_tensors(model):
        of_outputs = tensor.is_expert and tensor.split == "none"
        if of_outputs or tensor.role == "router":
            dtype = training.activation_dtype if of_outputs else "fp32"
            yield BlockCall(
                when="backward",
                collective="all_reduce",
                group=tp_group(layout),
                dtype=dtype,
                place="ffn_out" if of_outputs else "ffn_in",
                call_bytes=prod(tensor.local_shape(layout.tp, layout.ep)) * DTYPE_BYTES[dtype],
            )
