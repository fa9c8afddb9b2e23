"""Operators: what one block does for one micro-batch on one rank, one after another.

A block is one list, in the order of forward, made from its work: products with their matrices,
attention or states in its place, norms, rotations, activations, and the permutations of tokens
around experts. FLOPs, seconds, recomputation and the pieces of a timeline are read off it.

Element-wise work is counted in passes over a tensor (one reading or one writing each), forward /
backward:

                              eager       compiled    fused by hand
    norm and addition         5 / 8       4 / 6       5 / 8
    norm alone                2 / 5       1 / 2       2 / 5
    rotation                  9 / 9       2 / 2       2 / 2
    gate (SwiGLU, GeGLU)      5 / 9       3 / 5       3 / 5
    GELU                      2 / 3       2 / 3       2 / 3

Backward of a norm reads gradient and input twice: once for the input's gradient, once for the
weight's; a compiler joins addition and norm into one chain and reads again only what a row does not
keep on the chip. Eager backward also adds up the gradients of an input that several projections
share, unless it is one joined projection.

Source: operators of the reference decoder under fake tensors (tests/ground_truth), the kernels
`native_layer_norm`, `_fused_rms_norm` and their backward in torch 2.13, and Megatron-LM's
bias-dropout-add, bias-GELU, SwiGLU and rotary kernels.

fp8: memory traffic of casting and laying out the operands of 8-bit matmuls. A product of backward
reads its operands along the other dimension, and the kernels take one layout only, so input, weight
and gradient are each needed twice. Bytes an element, forward / backward:

                 input      weight     gradient of the output
    tensorwise   5 / 7      5 / 7      - / 7      eager: greatest value (2), cast (3), laid out (2)
                 3 / 3      5 / 3      - / 4      compiled: greatest value with the chain before it
    rowwise      3 / 5      3 / 5      - / 8      row in one kernel (3), column in two (2 and 3)
                 1 / 5      3 / 5      - / 6      compiled: rows with the chain before them
    delayed      4 / 0      4 / 0      - / 4      cast and laid out in one kernel, last steps' scale

Compiled and fused projections of one input share its cast. Weights that FSDP gathers in fp8 are
only laid out again (0 / 2). The head, attention and the norms stay in 16 bits.

Source: torchao torchao/float8/float8_linear.py (operands saved in 16 bits and cast again in
backward) and float8_ops.py (layouts); TransformerEngine transformer_engine/pytorch/module/linear.py
and common/transpose/cast_transpose.cu.

Recomputed: which operators of a block's forward backward does again, by mode.

Source: torch.utils.checkpoint, which stops once backward has all that it reads; the trainer's
`recompute.py`, as torchtitan `apply_ac`, per-op selective; Megatron-LM `recompute_granularity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from fsdpplan.cost.block.products import Product, block_products
from fsdpplan.cost.block.work import BlockWork, Kernels
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.params import ParameterTensor, Place, block_tensors
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.values import replace

OperatorKind = Literal["matmul", "attention", "elementwise"]
"""`attention`: what mixes tokens, states in its place too."""


class Operator(NamedTuple):
    """One operator of a block, forward and backward."""

    name: str
    """That of its matrix or norm within the block, or of what it does."""
    place: Place
    """The stretch of the block that it stands in."""
    kind: OperatorKind
    product: Product | None = None
    """Of a matmul."""
    forward_bytes: float = 0.0
    """Memory traffic: of an element-wise operator its own; of a matmul what stands beside it, casts
    and sums."""
    backward_bytes: float = 0.0

    @property
    def beside(self) -> Operator:
        """The same without its product: what is made again where its output is kept."""
        name, place, kind, _, forward, backward = self
        return Operator(name, place, kind, None, forward, backward)


def block_operators(work: BlockWork) -> tuple[Operator, ...]:
    """The operators of one block in the order of forward."""
    return _block_operators(on_device(work))


@lru_cache(maxsize=8192)
def on_device(work: BlockWork) -> BlockWork:
    """`work` without what only the host has to do with, and what backward recomputes: all blocks
    that differ in these alone do the same."""
    return replace(work, mode="none", wrapper_operators=0.0)


@lru_cache(maxsize=8192)
def _block_operators(work: BlockWork) -> tuple[Operator, ...]:
    return tuple(_made(work))


def _made(work: BlockWork) -> Iterator[Operator]:
    model, matmuls = work.model, [_matmul(product, work) for product in block_products(work)]
    if model.mixer != "-":
        yield _norm("attention_norm", "attention_in", work)
        yield from (one for one in matmuls if one.place == "attention_in")
        yield from _on_heads(work)
        yield Operator("attention" if model.mixer == "A" else "states", "attention", "attention")
        yield from _behind_heads(work)
        yield from (one for one in matmuls if one.place == "attention_out")
        yield from _end_of_branch("attention", "attention_out", work)
    if model.has_network:
        yield _norm("ffn_norm", "ffn_in", work)
        yield from _network(work, matmuls)
        yield from _end_of_branch("ffn", "ffn_out", work)


def _network(work: BlockWork, matmuls: list[Operator]) -> Iterator[Operator]:
    """The feed-forward network; or the router, its experts and those that every token visits."""
    model = work.model
    gate = (GATE if model.is_gated else GELU)[work.kernels]
    into = out = None
    if model.experts:
        into, out = _routing(work, model.experts)
    for matmul in matmuls:
        assert matmul.product
        weight = matmul.product.weight
        if weight.role == "down":
            of = matmul.name.removesuffix("w2")
            width = work.tokens * _inner_width(model, of) / work.tp
            yield _streamed(f"{of}activation", "ffn_out", gate, width * work.element_bytes)
        elif weight.is_expert and weight.role == "gate" and into:
            yield into
        if matmul.place in ("ffn_in", "ffn_out"):
            yield matmul
        if weight.is_expert and weight.role == "down" and out:
            yield out


def _inner_width(model: Model, network: str) -> int:
    """Inner width of what a token visits of a network, of routed experts all together."""
    if model.experts is None:
        return model.ffn_hidden
    if network == "experts.":
        return model.experts.active * model.experts.hidden
    return model.experts.shared_hidden


ROUTER_PASSES = 6
"""fp32 passes over the router's scores in each direction: softmax or sigmoid reads and writes, the
choice of the best reads, the histogram of the choice reads and writes what little there is."""


def _routing(work: BlockWork, experts: Experts) -> tuple[Operator, Operator]:
    """Choice and dispatch of the tokens' copies, and what combines those that come back.

    Passes over the copies, `active` for each token: gathered (2), weighted (2) and summed (1, and
    one over the tokens); split among ranks, sorted by expert after the exchange and back before it
    (4). Hand-written kernels weight while they sum. Backward mirrors forward, and reads the outputs
    once more for the gradient of the weights.

    All experts are taken as equally popular: load imbalance, and the tokens that a capacity limit
    drops, are not modelled. The exchange between ranks is communication.
    """
    routed = work.routed_tokens
    tokens = routed * work.model.hidden * work.element_bytes
    copies = tokens * experts.active
    sorts = 2 if work.ep > 1 or work.experts_over_tp else 0
    into = (2 + sorts) * copies + ROUTER_PASSES * FP32_BYTES * routed * experts.experts
    out = ((1 if work.kernels == "fused" else 3) + sorts) * copies + tokens
    return (
        Operator("dispatch", "ffn_in", "elementwise", None, into, into),
        Operator("combine", "ffn_out", "elementwise", None, out, out + copies),
    )


CHAIN: dict[Kernels, tuple[int, int]] = {"eager": (5, 8), "compiled": (4, 6), "fused": (5, 8)}
NORM: dict[Kernels, tuple[int, int]] = {"eager": (2, 5), "compiled": (1, 2), "fused": (2, 5)}
ROTATION: dict[Kernels, tuple[int, int]] = {"eager": (9, 9), "compiled": (2, 2), "fused": (2, 2)}
GATE: dict[Kernels, tuple[int, int]] = {"eager": (5, 9), "compiled": (3, 5), "fused": (3, 5)}
GELU: dict[Kernels, tuple[int, int]] = {"eager": (2, 3), "compiled": (2, 3), "fused": (2, 3)}
JOINED = (4, 4)
"""Heads whose parts are put together."""

CONVOLUTION = (2, 5)
"""Passes over what a convolution of a few tokens reads: read and written; in backward gradient and
input read, the activation made again, the gradient written."""

COMPOSITE_NORM_BYTES = (32.0, 70.0)
"""What an eager RMSNorm of operators moves beyond a fused one, in bytes an element of 16 bits.

Forward: cast to fp32 (6), square (8), mean (4), product with the root (8), cast back (6), product
with the weight (4), less the 4 of one kernel. Backward: the weight's product (8) and sum (2), cast
(6), product (8) and its sum (12), square (24: gradient laid out, times input, times two), sum of
both branches (12), cast (6), less one reading that they share (8).
Source: torch 2.5 aten rms_norm; torchtitan of 2024 torchtitan/models/norms.py.
"""


def _streamed(
    name: str, place: Place, passes: tuple[float, float], size: float, more: Operator | None = None
) -> Operator:
    forward, backward = passes[0] * size, passes[1] * size
    if more is not None:
        forward, backward = forward + more.forward_bytes, backward + more.backward_bytes
    return Operator(name, place, "elementwise", None, forward, backward)


def _composite(work: BlockWork, elements: float) -> Operator | None:
    """What a norm moves beyond one kernel, where it is several."""
    is_one = not work.composite_norms or work.kernels != "eager" or work.model.norm != "rmsnorm"
    return None if is_one else _streamed("", "attention", COMPOSITE_NORM_BYTES, elements)


def _norm(name: str, place: Place, work: BlockWork) -> Operator:
    """The norm before a branch, and the addition of the branch before it; under autocast with an
    fp32 residual stream backward casts the gradient of the branch."""
    elements = work.residual_elements
    size = elements * work.residual_bytes
    norm = _streamed(name, place, CHAIN[work.kernels], size, _composite(work, elements))
    if not work.casts_stream:
        return norm
    casts = elements * (work.element_bytes + work.residual_bytes)
    return norm._replace(backward_bytes=norm.backward_bytes + casts)


def _on_heads(work: BlockWork) -> Iterator[Operator]:
    """What stands between the projections and attention, or a state."""
    model, tokens, each = work.model, work.tokens, work.element_bytes
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_state  # of few models

        mixed = mixer_state(model).mixed_dim * tokens / work.tp
        yield _streamed("convolution", "attention", CONVOLUTION, mixed * each, _conv_bias(work))
        return
    latent = model.latent
    normed = rotated = tokens * (model.query_dim + model.kv_dim) / work.tp
    if latent:
        normed = float(tokens * (latent.query_rank + latent.kv_rank))
        rotated = tokens * latent.rope_head_dim * (model.heads / work.tp + 1)
    if latent or model.qk_norm:
        more = _composite(work, normed)
        yield _streamed("norms of heads", "attention", NORM[work.kernels], normed * each, more)
    if model.positions == "rope":
        yield _streamed("rotation", "attention", ROTATION[work.kernels], rotated * each)
    if latent:
        queries = tokens * model.query_dim / work.tp
        yield _streamed("heads put together", "attention", JOINED, queries * each)


def _conv_bias(work: BlockWork) -> Operator | None:
    biases = [t for t in block_tensors(work.model) if t.name == "conv.bias"]
    if not biases:
        return None
    summed = work.tokens * biases[0].local_shape(work.tp)[0] * work.element_bytes
    return Operator("", "attention", "elementwise", None, 0.0, summed)


def _behind_heads(work: BlockWork) -> Iterator[Operator]:
    """A gate behind attention; the norm and the gate behind a state."""
    model, kernels = work.model, work.kernels
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_state  # of few models

        size = mixer_state(model).value_dim * work.tokens / work.tp * work.element_bytes
        yield _streamed("norm of states", "attention", NORM[kernels], size)
        yield _streamed("gate of states", "attention", GATE[kernels], size)
    elif model.attention_gate:
        gated = work.tokens * model.query_dim / work.tp * work.element_bytes
        yield _streamed("gate of attention", "attention", GATE[kernels], gated)


def _end_of_branch(branch: str, place: Place, work: BlockWork) -> Iterator[Operator]:
    """The norm behind a branch, and dropout.

    Dropout: eager, read, write and a mask of bytes in forward, the same in backward; fused with the
    addition, its mask, and a pass of its own in backward. A compiler draws the same numbers again.
    """
    elements = work.residual_elements
    if work.model.post_norms:
        size, more = elements * work.residual_bytes, _composite(work, elements)
        yield _streamed(f"post_{branch}_norm", place, NORM[work.kernels], size, more)
    if work.dropout and not work.compiled:
        own = 2 * work.element_bytes + 1
        passes = (own if work.kernels == "eager" else 1, own)
        yield _streamed(f"{branch} dropout", place, passes, elements)


def _matmul(product: Product, work: BlockWork) -> Operator:
    """A product with what is moved beside it: its casts, and sums of gradients.

    Under autocast with an fp32 residual stream each projection casts its input, and backward casts
    its gradient back. Autocast copies each fp32 weight to the
    compute dtype in forward, and its gradient back. Gradients of an input that several projections
    read are added up, three passes for each but the first, unless they are joined; those of biases
    are summed over tokens.
    """
    forward = backward = 0.0
    model, weight = work.model, product.weight
    if product.k == model.hidden and product.groups == 1:
        inputs = work.tokens * model.hidden
        if work.casts_stream:
            forward += inputs * (work.element_bytes + work.residual_bytes)
            backward += inputs * (work.element_bytes + work.residual_bytes)
        if product.shares_input and work.kernels == "eager":
            backward += 3.0 * inputs * work.residual_bytes
    if work.autocast and work.precision != "fp32":
        copied = product.weight_elements * (4 + work.element_bytes)
        forward, backward = forward + copied, backward + copied
    if biases := _biases(model):
        for tensor in (weight, *product.stacked):
            if bias := biases.get(tensor.name.removesuffix(".weight")):
                visits = model.experts.active if bias.is_expert and model.experts else 1
                width = visits * bias.local_shape(work.tp)[-1]
                backward += work.tokens * width * work.element_bytes
    if work.precision == "fp8":
        casts = fp8_cast_bytes(product, work)
        forward, backward = forward + casts[0], backward + casts[1]
    return Operator(product.name, weight.place, "matmul", product, forward, backward)


@lru_cache(maxsize=256)
def _biases(model: Model) -> dict[str, ParameterTensor]:
    """Biases of a block's matrices, by the names of these."""
    biases = (t for t in block_tensors(model) if t.role and t.name.endswith(".bias"))
    return {bias.name.removesuffix(".bias"): bias for bias in biases}


class CastBytes(NamedTuple):
    """Bytes an element of each operand, (forward, backward)."""

    input: tuple[float, float]
    weight: tuple[float, float]
    gradient: float


def cast_bytes(work: BlockWork) -> CastBytes:
    """What the recipe moves for each element."""
    match work.fp8_recipe, work.compiled:
        case "tensorwise", False:
            found = CastBytes(input=(5, 7), weight=(5, 7), gradient=7)
        case "tensorwise", True:
            found = CastBytes(input=(3, 3), weight=(5, 3), gradient=4)
        case "rowwise", False:
            found = CastBytes(input=(3, 5), weight=(3, 5), gradient=8)
        case "rowwise", True:
            found = CastBytes(input=(1, 5), weight=(3, 5), gradient=6)
        case _:
            found = CastBytes(input=(4, 0), weight=(4 * work.weight_casts, 0), gradient=4)
    return found._replace(weight=(0, 2)) if work.fp8_all_gather else found


def fp8_cast_bytes(product: Product, work: BlockWork) -> tuple[float, float]:
    """Traffic of the casts of one product in (forward, backward), in bytes."""
    if product.dtype(work) != "fp8":
        return 0.0, 0.0
    each, weights = cast_bytes(work), product.weight_elements
    is_cast_already = product.shares_input and work.kernels != "eager"
    inputs = 0.0 if is_cast_already else product.rows * product.k
    return (
        each.input[0] * inputs + each.weight[0] * weights,
        each.input[1] * inputs
        + each.weight[1] * weights
        + each.gradient * product.rows * product.n,
    )


def element_wise_bytes(work: BlockWork) -> tuple[float, float]:
    """Memory traffic of a block beside its matmuls and attention in (forward, backward)."""
    operators = block_operators(work)
    return sum(o.forward_bytes for o in operators), sum(o.backward_bytes for o in operators)


def reads_last_output(model: Model) -> bool:
    """Whether backward reads what the block's last projection down returns: a norm behind it, a
    gate, or the weights of routed experts do; a sum does not."""
    experts = model.experts
    return model.post_norms or (
        experts is not None and (experts.shared_gate or not experts.shared_hidden)
    )


def repeated_operators(work: BlockWork) -> tuple[Operator, ...]:
    """What backward does again of forward, by the mode of recomputation.

    none: nothing, but what a software makes again of latents whatever the mode; attention: the
    scores, their softmax and the values' sums; full: all but the last product, where nothing reads
    what it returns, unless the runtime's own checkpoint function repeats forward to its end; op: of
    the plain products of these every second one from the second, all of routed experts, whose
    outputs are as many as the experts of each token, and what is element-wise.
    """
    operators = block_operators(work)
    if work.mode in ("none", "attention"):
        return tuple(
            operator
            for operator in operators
            if (work.mode == "attention" and operator.kind == "attention")
            or (work.remakes_latents and operator.product and operator.product.weight.reads_latents)
        )
    if work.mode == "full" and work.repeats_whole_block:
        return operators
    products = [operator.product for operator in operators if operator.product]
    if not (work.repeats_whole_block or reads_last_output(work.model)):
        products = products[:-1]
    if work.mode == "op":
        plain = [product for product in products if not product.is_routed]
        products = plain[1::2] + [product for product in products if product.is_routed]
    again = {product.name for product in products}
    return tuple(
        operator if operator.kind != "matmul" or operator.name in again else operator.beside
        for operator in operators
        if operator.kind != "attention" or work.mode == "full"
    )
