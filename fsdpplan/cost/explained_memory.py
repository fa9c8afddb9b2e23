"""Explained memory: each term of the peak as a formula, its inputs and where it is from.

The terms add up to the peak of the fullest device; what they are made of is that of `explained`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.explained import Explained, Input, number
from fsdpplan.cost.memory.ledger import adds_in_fp32, rank_state
from fsdpplan.cost.memory.peak import (
    FSDP2,
    communicators,
    fragments_fraction,
    grows_segments,
    stage_memory,
)
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.formats import FP32_BYTES, formats, local_tokens
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.spec.plan import Case, MemoryBreakdown
from fsdpplan.spec.training import Training


def explained_memory(case: Case) -> tuple[Explained, ...]:
    """The terms of the peak on the fullest device, which add up to it."""
    if case.training.precision_switch != "none":
        case = max(
            (each for _, each in case.phases), key=lambda one: _fullest(one)[0].peak_device_bytes
        )
    memory, stage, in_flight = _fullest(case)
    return tuple(term for term in _memory(case, memory, stage, in_flight) if term.value)


def _fullest(case: Case) -> tuple[MemoryBreakdown, Stage, int]:
    """The peak of the fullest rank, what it holds, and its blocks in flight."""
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    alive = in_flight_blocks(model=case.model, layout=case.layout)
    found = [
        (stage_memory(case, stage, in_flight_blocks=blocks), stage, blocks)
        for stage, blocks in zip(stages, alive, strict=True)
    ]
    return max(found, key=lambda one: one[0].peak_device_bytes)


def _memory(
    case: Case, memory: MemoryBreakdown, stage: Stage, in_flight: int
) -> Iterator[Explained]:
    training, layout = case.training, case.layout
    of = formats(training=training, layout=layout)
    state = rank_state(case, stage)
    sizes = rank_sizes(case, stage, in_flight_blocks=in_flight)
    ledger = "cost/memory/ledger.py; docs/explanation/memory.md"
    kind = "replica" if layout.sharding != "fsdp" else "pipeline" if layout.pp > 1 else "fsdp"
    phases = f"cost/memory/{kind}_moments.py; docs/explanation/memory.md"
    peak = f"at the peak, in {memory.peak_phase}"
    adds = adds_in_fp32(training=training, layout=layout)
    held, updated = state.held_parameters, state.optimizer_parameters
    if training.adapters is None:
        yield _elements(
            "parameters", memory.parameters_bytes, of.resident, "that this rank keeps", ledger
        )
    else:
        yield Explained(
            name="parameters",
            value=memory.parameters_bytes,
            unit="B",
            formula="F + N * e",
            inputs=(
                _bytes("F", state.frozen, f"frozen, the blocks' matrices in {_base(training)}"),
                number("N", held, "parameters of adapters that this rank keeps"),
                _bytes("e", of.resident, "of one, by its number format"),
            ),
            source=ledger,
        )
    yield _elements(
        "gradients",
        memory.gradients_bytes,
        FP32_BYTES if adds and memory.peak_phase != "optimizer" else of.kept_gradient,
        f"whose gradient is kept {peak}; this rank's shard has {held:,}",
        phases,
    )
    yield Explained(
        name="optimizer state",
        value=memory.optimizer_bytes,
        unit="B",
        formula="N * e",
        inputs=(
            number("N", updated, "parameters that this rank updates"),
            _bytes("e", memory.optimizer_bytes / max(1, updated), f"of one, {training.optimizer}"),
        ),
        source=ledger,
    )
    # whole parameters are not gathered; autocast has copies of them
    of_gathered = of.gathered_matrix if layout.sharding == "fsdp" else of.computed
    block = (sizes.gathered_block_bytes or sizes.copies_block_bytes) // of_gathered
    yield _elements(
        "gathered parameters",
        memory.unsharded_parameters_bytes,
        of_gathered,
        f"gathered or cast {peak}; a block has {block:,}",
        phases,
    )
    yield _elements(
        "unreduced gradients",
        memory.unsharded_gradients_bytes,
        of.computed,
        f"not reduced, and in buffers of reductions, {peak}",
        phases,
    )
    saved = sizes.block.saved_bytes
    yield Explained(
        name="activations",
        value=memory.activations_bytes,
        unit="B",
        formula="k * a + r",
        inputs=(
            number("k", in_flight, "blocks of micro-batches in flight, at the most"),
            _bytes("a", saved, f"that a block keeps ({layout.recomputation} recomputed)"),
            _bytes(
                "r",
                memory.activations_bytes - in_flight * saved,
                f"less than that, or beside it, {peak}: blocks at work, ends, messages",
            ),
        ),
        source="cost/memory/activations.py; docs/explanation/memory.md",
    )
    tokens = local_tokens(training=training, layout=layout)
    vocab = case.model.vocab_rows(layout.tp) // layout.tp
    yield Explained(
        name="logits and loss",
        value=memory.logits_bytes,
        unit="B",
        formula="t * v * e",
        inputs=(
            number("t", tokens, "tokens of a micro-batch on this rank"),
            number("v", vocab, "rows of the vocabulary on this rank"),
            _bytes("e", memory.logits_bytes / (tokens * vocab), f"of a logit, {peak}"),
        ),
        source="cost/kernels/head.py head_sizes; docs/explanation/memory.md",
    )
    yield Explained(
        name="temporaries",
        value=memory.temporaries_bytes,
        unit="B",
        formula="t * h * e",
        inputs=(
            number("t", tokens, "tokens of a micro-batch on this rank"),
            number("h", case.model.hidden, "width of the model"),
            _bytes(
                "e",
                memory.temporaries_bytes / (tokens * case.model.hidden),
                f"for each of these, of what runs {peak}",
            ),
        ),
        source=phases,
    )
    yield from _outside(case, memory)


def _outside(case: Case, memory: MemoryBreakdown) -> Iterator[Explained]:
    """What is not allocated."""
    fit, layout = case.cluster.device.fit, case.layout
    fraction, allocated = fragments_fraction(case), memory.peak_allocated_bytes
    grows = grows_segments(training=case.training, device=case.cluster.device)
    setting = "that grow" if grows else "of fixed sizes"
    pools = round((memory.reserved_overhead_bytes - allocated * fraction) / (1 + fraction))
    source = "cost/memory/peak.py; docs/explanation/memory.md"
    yield Explained(
        name="allocator reserve",
        value=memory.reserved_overhead_bytes,
        unit="B",
        formula="p + g * (A + p)",
        inputs=(
            _bytes("p", pools, "of streams whose highest level was at another moment"),
            number("g", fraction, f"kept in segments {setting} (fragmentation_fraction, profile)"),
            _bytes("A", allocated, "allocated: the terms above"),
        ),
        source=source,
    )
    groups = communicators(layout, case.training.traits or FSDP2)
    yield Explained(
        name="driver and libraries",
        value=memory.context_bytes,
        unit="B",
        formula="C + n * c",
        inputs=(
            _bytes("C", fit.context_bytes, "context and libraries (context_bytes, profile)"),
            number("n", groups, "communicators of this layout"),
            _bytes("c", fit.communicator_bytes, "of one (communicator_bytes, profile)"),
        ),
        source=source,
    )


def _bytes(symbol: str, value: float, words: str) -> Input:
    return Input(symbol=symbol, value=value, unit="B", words=words)


def _base(training: Training) -> str:
    """What the frozen matrices are stored in."""
    if training.adapters is None or training.adapters.base != "nf4":
        return training.activation_dtype
    return "nf4: 0.5 + 1/64 + 4/16384 bytes a weight"


def _elements(name: str, size: int, element_bytes: int, words: str, source: str) -> Explained:
    """A term that is a number of elements times the bytes of one."""
    return Explained(
        name=name,
        value=size,
        unit="B",
        formula="N * e",
        inputs=(
            number("N", size / element_bytes, f"parameters {words}"),
            _bytes("e", element_bytes, "of one, by its number format"),
        ),
        source=source,
    )
