"""Mixer: the operators that carry tokens to one another, softmax attention or a state in its place,
from the projections of the block's input to the one back into the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.block.adapters import is_kept
from fsdpplan.cost.block.branch import first_of_backward
from fsdpplan.cost.block.operator import (
    CONVOLUTION,
    GATE,
    JOINED,
    NORM,
    ROTATION,
    BackwardStep,
    Operator,
    Steps,
    as_operators,
    streamed,
    sum_of_two,
    with_memory,
)
from fsdpplan.cost.block.sizes import (
    BlockSizes,
    HeadSizes,
    LatentSizes,
    head_norms_kept,
    latent_sizes,
    norm_scale,
)
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.formats import FP32_BYTES
from fsdpplan.cost.model.params import Role, block_tensors


def mixer_operators(
    work: BlockWork, sizes: BlockSizes, gradients: dict[str, int], products: list[Operator]
) -> Iterator[Operator]:
    """Projections in, what stands between them and attention, attention, what is behind it, and the
    projection out."""
    of = sizes.heads
    latents = latent_sizes(work, of)
    into = [one for one in products if one.place == "attention_in"]
    yield from _projections(work, sizes, latents, gradients, into)
    yield from _on_heads(work, of, latents)
    yield _attention(work, of, latents)
    yield from _behind_heads(work, of)
    cast = sizes.residual_cast
    copy = of.attended // work.element_bytes if work.fp8_inputs else 0
    out = BackwardStep(
        weight_gradient=gradients.get("output", 0),
        allocated=of.attended + cast,
        freed=copy + cast,
    )
    # attention keeps what it returns, too, unless that is another tensor
    keeps_output = not of.attended_read or is_kept(work, "output")
    for one in products:
        if one.place == "attention_out":
            yield with_memory(
                one,
                saved=of.attended + copy if keeps_output else 0,
                # of what is kept in fp8, besides, attention keeps half
                remade=copy + of.attended // 4 if work.fp8_rows else 0,
                outputs=(sizes.normed,),
                steps=first_of_backward(out, work, sizes),
            )


def _projections(
    work: BlockWork,
    sizes: BlockSizes,
    latents: LatentSizes,
    gradients: dict[str, int],
    products: list[Operator],
) -> Iterator[Operator]:
    """Products of the block's input, and of the latents.

    Autocast copies the input for each; else the first keeps it for all. Backward adds up the
    gradients of what several read: that of values comes first, then keys', then queries'.
    """
    of, normed = sizes.heads, sizes.normed_gradient
    casts = work.residual_bytes > work.element_bytes
    own_input = sizes.normed if casts else 0
    kept = sizes.normed_kept if is_kept(work, "query", "key", "value") else 0
    inputs = 1
    if casts:
        inputs = {"D": 2, "M": 1}.get(work.model.mixer, 3 + work.model.attention_gate)

    def step(role: Role, output: int, kept: int) -> BackwardStep:
        return BackwardStep(
            weight_gradient=gradients.get(role, 0), allocated=normed, freed=output + kept
        )

    steps: dict[str, Steps] = {
        "value": (step("value", of.value, own_input),),
        "key": (step("key", of.key, own_input), sum_of_two(normed)),
        "query": (step("query", of.query, kept), sum_of_two(normed)),
    }
    outputs = _outputs(work, of, latents)
    roles = [one.product.weight.role for one in products if one.product]
    behind: dict[int, Steps] = {}
    carried: Steps = ()
    for index, one in enumerate(products):
        if one.product and roles[index] in ("latent", "indexer"):
            own_gradient = one.product.weight_elements * work.element_bytes
            behind[index] = (BackwardStep(weight_gradient=own_gradient),)
    for role, own in steps.items():  # those of a role without a matrix go with the next
        carried += own
        if role in roles:
            behind[roles.index(role)], carried = carried, ()
    for index, one in enumerate(products):
        remade = 2 * sizes.normed_kept if work.remakes_latents and latents.kept else 0
        yield with_memory(
            one,
            saved=inputs * kept if index == 0 else 0,
            remade=remade if index == 0 else 0,
            outputs=outputs.get(one.name, ()),
            steps=behind.get(index, ()),
        )


def _outputs(work: BlockWork, of: HeadSizes, latents: LatentSizes) -> dict[str, tuple[int, ...]]:
    """What plain projections return, by the names of the matrices, an indexer's apart."""
    if work.model.mixer != "A":
        return {name: (of.query + of.key + 2 * of.value,) for name in ("wqkvz", "w_in")}
    if latents.kept:
        return {
            "wq_a": (latents.query,),
            "wq_b": (of.query,),
            "wq": (of.query,),
            "wkv_a": (latents.key_value,),
            "wkv_b": (latents.made,),
        }
    gate = (of.query,) if work.model.attention_gate else ()
    if work.joined_projections:
        return {"wq": (of.query, *gate, of.key, of.value)}
    return {"wq": (of.query, *gate), "wk": (of.key,), "wv": (of.value,)}


def _on_heads(work: BlockWork, of: HeadSizes, latents: LatentSizes) -> Iterator[Operator]:
    """What stands between the projections and attention, or a state."""
    model, tokens, each = work.model, work.tokens, work.element_bytes
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_state  # of few models

        state = mixer_state(model)
        mixed = state.mixed_dim * tokens / work.tp * each
        kept = tokens * each * -(-state.mixed_dim // work.tp)
        convolution = streamed("convolution", "attention", CONVOLUTION, mixed, saved=kept)
        for tensor in block_tensors(model):
            if tensor.name == "conv.bias":
                summed = tokens * tensor.local_shape(work.tp)[0] * each
                more = convolution.backward_bytes + summed
                convolution = convolution._replace(backward_bytes=more)
        yield convolution
        return
    latent = model.latent
    normed = rotated = tokens * (model.query_dim + model.kv_dim) / work.tp
    if latent:
        normed = float(tokens * (latent.query_rank + latent.kv_rank))
        rotated = tokens * latent.rope_head_dim * (model.heads / work.tp + 1)
    has_tables = model.positions == "rope"
    tables = 0
    if has_tables:
        width = latent.rope_head_dim if latent else model.head_dim
        rows = tokens if work.packed else work.rank_seq_len
        tables = 2 * rows * width * each * (norm_scale(work) if model.qk_norm else 1)
    kept = head_norms_kept(work, of) + latents.kept
    beside = 2 * latents.query + latents.key_value_normed + latents.key_value
    if not latent:
        beside = of.query + of.key if model.qk_norm else 0
    steps: Steps = (
        BackwardStep(
            freed=tables + kept,
            let_go=of.key + of.value - latents.made if latents.made else 0,
            beside=beside,
        ),
    )
    if latent or model.qk_norm:
        norm = streamed("norms of heads", "attention", NORM[work.kernels], normed * each)
        remade = latents.kept - latents.query - latents.key_value if work.remakes_latents else 0
        yield with_memory(as_operators(norm, normed, work), saved=kept, remade=remade, steps=steps)
        steps = ()
    if has_tables:
        passes = ROTATION[work.kernels]
        yield streamed("rotation", "attention", passes, rotated * each, saved=tables, steps=steps)
    if latent:
        queries = tokens * model.query_dim / work.tp
        yield streamed("heads put together", "attention", JOINED, queries * each)


def _attention(work: BlockWork, of: HeadSizes, latents: LatentSizes) -> Operator:
    """Attention or a state: it saves what it reads and returns, and its scores or, for each row,
    the logarithm of their sum.

    Mode `attention` keeps what the projections made alone: beside fused attention, which keeps no
    scores, Megatron's selective mode frees next to nothing. Values that were made with the keys
    stay in one tensor with them.
    """
    sums = 0
    if work.model.mixer == "A" and work.flash_attention:
        sums = work.tokens * -(-work.model.heads // work.tp) * FP32_BYTES
    saved = of.read + of.attended_read + of.scores_kept + sums
    return Operator(
        "attention" if work.model.mixer == "A" else "states",
        "attention",
        "attention",
        saved_bytes=saved,
        statistics_bytes=sums,
        remade_bytes=of.read if work.remakes_latents and latents.kept else 0,
        unkept_bytes=saved - of.query - of.key - (latents.made or of.value),
        steps=_attention_steps(work, of),
    )


def _attention_steps(work: BlockWork, of: HeadSizes) -> Steps:
    step = BackwardStep
    if not work.flash_attention:
        kept = of.scores_kept - of.scores + of.attended
        made = of.query + of.key
        return (
            step(allocated=of.scores + of.value, freed=kept, let_go=of.attended),
            step(freed=of.scores),  # the softmax makes its gradient in place
            step(
                allocated=made,
                freed=of.scores + of.attended + made + of.value,
                let_go=of.scores,
            ),
        )
    inside, returned = of.exchanged + 2 * of.states, of.returned
    core = [
        step(
            allocated=of.read + inside,
            freed=2 * returned + of.read + inside,
            let_go=returned + of.exchanged,
        )
    ]
    if beside := sum(_beside_bytes(work, of).values()):
        # gradients of a gate, and of a result before its norm
        core = [step(allocated=2 * of.attended, freed=of.attended), *core]
        core.append(step(freed=beside + of.attended))
    if of.attended_read:
        core = [step(allocated=returned, freed=2 * of.attended, let_go=of.attended), *core]
    for wide, own in (
        (of.value_read, of.value),
        (of.key_read, of.key),
        (of.query_read, of.query),
    ):
        if wide > own:
            core.append(step(allocated=own, freed=wide, let_go=wide))
    return tuple(core)


def _beside_bytes(work: BlockWork, of: HeadSizes) -> dict[str, int]:
    """Kept around attention or a state, by operator.

    A gate of attention keeps itself, what it multiplies, and but for fused kernels its sigmoid. A
    state reads and keeps what the convolution before it returns; beside that are kept what the
    convolution reads, the inverses of chunks, the gate, and the result before its norm.
    """
    model, each = work.model, work.element_bytes
    if model.mixer == "A":
        tensors = 2 if work.kernels != "eager" else 3
        return {"gate of attention": tensors * of.attended} if model.attention_gate else {}
    from fsdpplan.cost.model.mixers import mixer_state  # of few models

    state = mixer_state(model)
    inverses = (state.inverse * each + 2 * state.heads * FP32_BYTES) * work.tokens // work.tp
    return {
        "convolution": work.tokens * each * -(-state.mixed_dim // work.tp),
        "norm of states": of.value + inverses,
        "gate of states": of.value,
    }


def _behind_heads(work: BlockWork, of: HeadSizes) -> Iterator[Operator]:
    """A gate behind attention; the norm and the gate behind a state."""
    model, passes = work.model, {"norm": NORM[work.kernels], "gate": GATE[work.kernels]}
    width = model.query_dim
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_state  # of few models

        width = mixer_state(model).value_dim
    size = width * work.tokens / work.tp * work.element_bytes
    for name, saved in _beside_bytes(work, of).items():
        if name != "convolution":
            yield streamed(name, "attention", passes[name[:4]], size, saved=saved)
