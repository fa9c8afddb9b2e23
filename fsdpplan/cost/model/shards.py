"""FSDP units: what one `fully_shard` call gathers, shards and reduces, padding included.

A unit is a run of `wrap_blocks` blocks, or the root with embedding, final norm and head. FSDP2
shards every parameter on dim 0 and pads it to a multiple of the shard group, parameter by
parameter, so a unit's gathered buffer is larger than its parameters. Under expert parallelism the
routed experts of each block are a unit of their own, over fewer ranks: those of several blocks
cannot be one, which recomputation of single operators would meet gathered in one block alone.

Source: torch 2.13 `fully_shard` (per-parameter sharding, chunks of ceil(dim0 / n) rows); checked
against its collectives under a fake process group (tests/ground_truth).

Rank shards: what one rank of a shard group holds, which for the last ones may be less.

FSDP2 gives each rank ceil(rows / ranks) rows of a parameter, as long as there are any: of 20
experts over 6 ranks five have four, and the last has none. Plans are priced for the fullest rank.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty`.

FSDP units of a stage: their sizes, and how many there are of each, in the order of forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod

from fsdpplan.cost.model.params import (
    ParameterTensor,
    block_tensors,
    dense_view,
    embedding_tensors,
    head_tensors,
    kind_places,
    kind_views,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.values import RemembersHash, remembered_hash, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Elements of one FSDP unit on one tensor-parallel rank."""

    elements: int
    """Parameters of the unit that are trained."""
    padded_elements: int
    """Their elements of its gathered buffer."""
    tensors: int
    """Number of parameters that are trained."""
    frozen_bytes: int = 0
    """What is frozen of it, as it is stored and gathered."""
    padded_frozen_bytes: int = 0
    """The same in its gathered buffer."""
    has_bytes: bool = False
    """Some of it is in 4 bits, so that the buffer is gathered as bytes."""

    def shard_elements(self, shard_ranks: int) -> int:
        """Trained elements that the fullest rank (rank 0) keeps."""
        return self.padded_elements // shard_ranks

    def gathered_bytes(self, element_bytes: int) -> int:
        """Its gathered buffer, with what is trained in `element_bytes` an element."""
        return self.padded_elements * element_bytes + self.padded_frozen_bytes


def sum_of_sizes(sizes: Iterable[tuple[UnitSize, int]]) -> UnitSize:
    """Of so many of each."""
    found = tuple(sizes)
    return UnitSize(
        elements=sum(number * size.elements for size, number in found),
        padded_elements=sum(number * size.padded_elements for size, number in found),
        tensors=sum(number * size.tensors for size, number in found),
        frozen_bytes=sum(number * size.frozen_bytes for size, number in found),
        padded_frozen_bytes=sum(number * size.padded_frozen_bytes for size, number in found),
        has_bytes=any(size.has_bytes for size, _ in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(RemembersHash):
    """What one pipeline rank holds of the model."""

    __hash__ = remembered_hash

    blocks: int
    """Transformer blocks, over all its virtual stages."""
    has_embedding: bool
    has_head: bool
    dense_blocks: int = 0
    """Those of its blocks that lack the model's experts; 0 for a dense model, whose blocks are all
    of one kind."""
    inner_boundaries: int = 0
    """Neighbouring stages of the pipeline that this rank holds both of: the foot of a V. Between
    them nothing is sent."""
    parts: tuple[Stage, ...] = ()
    """Its virtual stages, where a pipeline rank has several: no FSDP unit spans two of them."""

    gathers: int = 1
    """How often a step of a pipeline gathers its parameters under reshard never."""
    adds_gradients: bool = True
    """FSDP2 adds up its gradients before it reduces them; not where a split backward pass leaves
    all of them, in the compute dtype, until then."""
    waiting_blocks: int = 0
    """(micro-batch, block) pairs between the two halves of their backward pass when a pipeline rank
    holds most."""
    kept_blocks: int = 0
    """Those of its blocks, the last of each virtual stage, that keep all activations though the
    layout recomputes."""
    mix: tuple[int, ...] = ()
    """Of a model whose pattern says what each block is: how many there are of each kind, in the
    order of `kind_views`."""
    kept_mix: tuple[int, ...] = ()
    """Those of them that are also of `kept_blocks`."""

    @property
    def pieces(self) -> tuple[Stage, ...]:
        """Its virtual stages, or itself."""
        return self.parts or (self,)

    @property
    def kept_dense_blocks(self) -> int:
        """Those of `dense_blocks` that are also of `kept_blocks`: dense ones are the first."""
        return sum(
            max(0, piece.dense_blocks - (piece.blocks - piece.kept_blocks)) for piece in self.pieces
        )


@lru_cache(maxsize=64)
def whole_model(model: Model) -> Stage:
    """The only stage of a model without pipelining."""
    return Stage(
        blocks=model.layers,
        has_embedding=True,
        has_head=True,
        dense_blocks=dense_blocks_among(model=model, first_block=0, blocks=model.layers),
        mix=blocks_mix(kind_places(model)) if model.is_patterned else (),
    )


def _mix(model: Model, stage: Stage) -> tuple[int, ...]:
    """`Stage.mix`; all blocks, where there is one kind only."""
    kinds = len(kind_views(model))
    if len(stage.mix) == kinds:
        return stage.mix
    assert kinds == 1 or not stage.blocks, "a stage of several kinds must say how many of each"
    return (stage.blocks,) if kinds == 1 else (0,) * kinds


def blocks_mix(places: Sequence[int], kinds: int = 0) -> tuple[int, ...]:
    """How many of the blocks in `places` are of each kind; of `kinds` in all, or as many as there
    are."""
    number = kinds or max(places, default=-1) + 1
    return tuple(places.count(kind) for kind in range(number))


def dense_blocks_among(*, model: Model, first_block: int, blocks: int) -> int:
    """`Stage.dense_blocks` of the `blocks` blocks from `first_block` on, counted from 0."""
    if model.experts is None or model.is_patterned:
        return 0
    return max(0, min(model.dense_blocks - first_block, blocks))


def block_kinds(*, model: Model, stage: Stage) -> tuple[tuple[Model, int], ...]:
    """(model of the block, how many) for each kind of block in `stage`; kinds that it lacks are
    left out."""
    if model.is_patterned:
        return tuple(
            (view, n) for view, n in zip(kind_views(model), _mix(model, stage), strict=True) if n
        )
    kinds = (
        (dense_view(model), stage.dense_blocks),
        (model, stage.blocks - stage.dense_blocks),
    )
    return tuple((kind, blocks) for kind, blocks in kinds if blocks)


def blocks_in_order(*, model: Model, stage: Stage) -> tuple[Model, ...]:
    """The model of each block of `stage`. Of a part of a model with a pattern it is known how many
    there are of each kind, and one kind is taken after another."""
    if model.is_patterned and stage.blocks == model.layers:
        views = kind_views(model)
        return tuple(views[place] for place in kind_places(model))
    kinds = block_kinds(model=model, stage=stage)
    return tuple(kind for kind, blocks in kinds for _ in range(blocks))


@lru_cache(maxsize=4096)
def unit_blocks_in_order(
    model: Model, stage: Stage, *, wrap_blocks: int
) -> tuple[tuple[tuple[tuple[Model, bool, int], ...], ...], tuple[int, ...]]:
    """(FSDP units of `wrap_blocks` blocks, each once, as runs of (kind, whether such blocks keep
    all activations though others recompute, how many); which of them each unit is)."""
    blocks = [
        (kind, index >= stage.blocks - stage.kept_blocks)
        for index, kind in enumerate(blocks_in_order(model=model, stage=stage))
    ]
    places: dict[tuple[tuple[Model, bool, int], ...], int] = {}
    order = []
    for first in range(0, len(blocks), wrap_blocks):
        runs = groupby(blocks[first : first + wrap_blocks])  # the last unit may have fewer
        unit = tuple((*block, len(tuple(several))) for block, several in runs)
        order.append(places.setdefault(unit, len(places)))
    return tuple(places), tuple(order)


def block_cases(case: Case, stage: Stage) -> tuple[tuple[Case, int], ...]:
    """(the case as it is for the block, how many) for each kind of block in `stage` that is
    computed in its own way: those without experts have a model, those that keep everything a layout
    of their own."""
    if case.model.is_patterned:
        return _patterned_cases(case, stage)
    kept_dense = stage.kept_dense_blocks if stage.kept_blocks else 0
    found: list[tuple[Case, int]] = []
    for kind, blocks in block_kinds(model=case.model, stage=stage):
        is_dense = case.model.experts is not None and kind.experts is None
        kept = kept_dense if is_dense else stage.kept_blocks - kept_dense
        found += own_cases(case, kind, blocks=blocks, kept_blocks=kept)
    return tuple(found)


def _patterned_cases(case: Case, stage: Stage) -> tuple[tuple[Case, int], ...]:
    mix = _mix(case.model, stage)
    found: list[tuple[Case, int]] = []
    for place, view in enumerate(kind_views(case.model)):
        if blocks := mix[place]:
            kept = stage.kept_mix[place] if stage.kept_mix else 0
            found += own_cases(case, view, blocks=blocks, kept_blocks=kept)
    return tuple(found)


def own_cases(
    case: Case, kind: Model, *, blocks: int, kept_blocks: int
) -> tuple[tuple[Case, int], ...]:
    """The same of `blocks` blocks of one kind, of which `kept_blocks` keep everything."""
    of_kind = case.of_blocks(kind)
    if not kept_blocks:
        return ((of_kind, blocks),)
    kept = (replace(of_kind, layout=keeping(case.layout)), kept_blocks)
    return ((of_kind, blocks - kept_blocks), kept) if blocks > kept_blocks else (kept,)


@lru_cache(maxsize=4096)
def keeping(layout: Layout) -> Layout:
    """`layout` for blocks that keep all their activations."""
    return replace(layout, activation_checkpointing="none", checkpoint_blocks="all")


def shard_dim(tensor: ParameterTensor, local_shape: tuple[int, ...], shard_ranks: int) -> int:
    """The dimension that FSDP splits: that of the experts, if there is one for each rank.

    With fewer, ranks would hold nothing but padding: dim 1 is split instead, as torchtitan does
    (`_experts_shard_placement_fn` in models/llama4/infra/parallelize.py).
    """
    return 1 if tensor.is_expert and local_shape[0] < shard_ranks else 0


def unit_size(
    tensors: tuple[ParameterTensor, ...], *, tp: int, shard_ranks: int, ep: int = 1
) -> UnitSize:
    """Size of a unit made of `tensors`, sharded over `shard_ranks` ranks."""
    whole = padded = number = frozen = padded_frozen = 0
    for tensor in tensors:
        shape = tensor.local_shape(tp, ep)
        if not tensor.is_trained:
            for rows, each in _stored_rows(tensor, shape):
                frozen += rows * each
                padded_frozen += -(-rows // shard_ranks) * shard_ranks * each
            continue
        number += 1
        split = shape[shard_dim(tensor, shape, shard_ranks)]
        tensor_elements = prod(shape)
        whole += tensor_elements
        padded += tensor_elements // split * (-(-split // shard_ranks) * shard_ranks)
    return UnitSize(
        elements=whole,
        padded_elements=padded,
        tensors=number,
        frozen_bytes=frozen,
        padded_frozen_bytes=padded_frozen,
        has_bytes=any(tensor.stored == "nf4" for tensor in tensors),
    )


def _stored_rows(tensor: ParameterTensor, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(rows, bytes of one) of the tensors that a frozen one is stored in: of 4 bits flat ones."""
    for length, each in tensor.stored_parts(prod(shape)):
        rows = length if tensor.stored == "nf4" else shape[0]
        yield rows, each * length // rows


@lru_cache(maxsize=4096)
def block_size(*, model: Model, tp: int, shard_ranks: int, ep: int = 1) -> UnitSize:
    """Size of one transformer block; with experts, of one that has them.

    With ep above 1 the routed experts are a unit of their own: `expert_size`.
    """
    tensors = block_tensors(model)
    if ep > 1:
        tensors = tuple(t for t in tensors if not t.is_expert)
    return unit_size(tensors, tp=tp, shard_ranks=shard_ranks)


@lru_cache(maxsize=4096)
def expert_size(*, model: Model, tp: int, shard_ranks: int, ep: int) -> UnitSize:
    """Size of the routed experts of one block on one of `ep` ranks; nothing where ep is 1 or the
    model dense.

    Each expert-parallel rank holds `1 / ep` of the experts, and shares them with
    `shard_ranks / ep` ranks, so its shard is `shard_elements(shard_ranks // ep)`.
    """
    tensors = block_tensors(model) if ep > 1 else ()
    experts = tuple(t for t in tensors if t.is_expert)
    return unit_size(experts, tp=tp, shard_ranks=shard_ranks // ep, ep=ep)


def root_tensors(
    *, model: Model, has_embedding: bool, has_head: bool
) -> tuple[ParameterTensor, ...]:
    """What no block holds.

    A tied head on another stage than the embedding is a second copy of the table.
    """
    tensors: tuple[ParameterTensor, ...] = ()
    if has_embedding:
        tensors += embedding_tensors(model)
    if has_head:
        tensors += head_tensors(model)
        if model.tied_embeddings and not has_embedding:
            tensors += embedding_tensors(model)[:1]
    return tensors


@lru_cache(maxsize=4096)
def root_size(
    *, model: Model, tp: int, shard_ranks: int, has_embedding: bool, has_head: bool
) -> UnitSize:
    """Size of the root unit: what no block holds. A pipeline stage inside has none."""
    tensors = root_tensors(model=model, has_embedding=has_embedding, has_head=has_head)
    return unit_size(tensors, tp=tp, shard_ranks=shard_ranks)


def shares_table(*, model: Model, stage: Stage) -> bool:
    """Embedding and head are one parameter; on the rank of a V that has both they are in two
    stages, each with its own."""
    ends = any(piece.has_embedding and piece.has_head for piece in stage.pieces)
    return model.tied_embeddings and ends


def stage_root_size(*, model: Model, stage: Stage, tp: int, shard_ranks: int) -> UnitSize:
    """All root units of a stage together: two on the rank of a V that has embedding and head."""
    roots = [
        root_size(
            model=model,
            tp=tp,
            shard_ranks=shard_ranks,
            has_embedding=piece.has_embedding,
            has_head=piece.has_head,
        )
        for piece in stage.pieces
    ]
    return sum_of_sizes((root, 1) for root in roots)


@lru_cache(maxsize=4096)
def stage_elements(*, model: Model, stage: Stage, tp: int, ep: int = 1) -> int:
    """Parameters that one rank of a stage trains before FSDP shards them."""
    root = stage_root_size(model=model, stage=stage, tp=tp, shard_ranks=1)
    blocks = sum(
        number * unit_size(block_tensors(kind), tp=tp, shard_ranks=1, ep=ep).elements
        for kind, number in block_kinds(model=model, stage=stage)
    )
    return blocks + root.elements


@lru_cache(maxsize=4096)
def stage_frozen_bytes(*, model: Model, stage: Stage, tp: int, shard_ranks: int) -> int:
    """What the fullest rank of a stage holds of frozen parameters, padding included."""
    root = stage_root_size(model=model, stage=stage, tp=tp, shard_ranks=shard_ranks)
    blocks = (
        number * block_size(model=kind, tp=tp, shard_ranks=shard_ranks).padded_frozen_bytes
        for kind, number in block_kinds(model=model, stage=stage)
    )
    return (root.padded_frozen_bytes + sum(blocks)) // shard_ranks


def stage_shapes(model: Model, stage: Stage) -> Iterator[tuple[int, ...]]:
    """Shapes of the parameters of a stage, whole, in the order in which they are registered."""
    if stage.has_embedding:
        yield from (tensor.local_shape(1) for tensor in embedding_tensors(model))
    for kind, number in block_kinds(model=model, stage=stage):
        shapes = [each.local_shape(1) for each in block_tensors(kind) if each.is_trained]
        for _ in range(number):
            yield from shapes
    if stage.has_head:
        yield from (tensor.local_shape(1) for tensor in head_tensors(model))


@lru_cache(maxsize=4096)
def stage_shard_elements(
    *, model: Model, stage: Stage, tp: int, shard_ranks: int, ep: int = 1
) -> int:
    """Parameters that the fullest rank of a stage keeps and trains, padding included."""
    root = stage_root_size(model=model, stage=stage, tp=tp, shard_ranks=shard_ranks)
    kept = root.shard_elements(shard_ranks)
    for kind, number in block_kinds(model=model, stage=stage):
        block = block_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep)
        experts = expert_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep)
        kept += number * (
            block.shard_elements(shard_ranks) + experts.shard_elements(shard_ranks // ep)
        )
    return kept


def gradient_syncs(layout: Layout) -> int:
    """Backward passes a step in which gradients are reduced."""
    return 1 if layout.gradient_sync == "last" else layout.num_microbatches


def rank_shard_elements(case: Case, stage: Stage, *, rank: int) -> int:
    """Parameters that `rank` trains of its pipeline stage under FSDP."""
    model, layout = case.model, case.layout
    index = rank // layout.tp % layout.shard_ranks
    held = 0
    for kind, blocks in block_kinds(model=model, stage=stage):
        tensors = block_tensors(kind)
        apart = [t for t in tensors if t.is_expert and layout.ep > 1]
        whole = [t for t in tensors if t not in apart]
        held += blocks * _elements(whole, layout, ranks=layout.shard_ranks, index=index)
        ranks = layout.shard_ranks // layout.ep
        held += blocks * _elements(apart, layout, ranks=ranks, index=index // layout.ep)
    for piece in stage.pieces:
        root = root_tensors(model=model, has_embedding=piece.has_embedding, has_head=piece.has_head)
        held += _elements(root, layout, ranks=layout.shard_ranks, index=index)
    return held


def _elements(tensors: Iterable[ParameterTensor], layout: Layout, *, ranks: int, index: int) -> int:
    held = 0
    for tensor in (each for each in tensors if each.is_trained):
        shape = tensor.local_shape(layout.tp, layout.ep if tensor.is_expert else 1)
        rows = shape[shard_dim(tensor, shape, ranks)]
        each = -(-rows // ranks)
        held += prod(shape) // rows * min(each, max(0, rows - index * each))
    return held


NOTHING = UnitSize(elements=0, padded_elements=0, tensors=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUnit:
    """Equal FSDP units of a few blocks, one behind another in the model."""

    mix: tuple[tuple[Model, int, int], ...]
    """(model of the block, how many, how many of them keep all activations though the layout
    recomputes) of each kind of block, in the order of forward; those that keep are the last."""
    size: UnitSize
    """What is sharded over the whole shard group."""
    experts: UnitSize
    """Routed experts of one block on one expert-parallel rank, sharded over fewer; nothing where ep
    is 1."""
    number: int
    """Units like this."""

    @property
    def blocks(self) -> int:
        """Blocks of one unit."""
        return sum(blocks for _, blocks, _ in self.mix)

    @property
    def expert_blocks(self) -> int:
        """Those of them whose routed experts are gathered apart, each by itself."""
        if self.experts == NOTHING:
            return 0
        return sum(blocks for kind, blocks, _ in self.mix if kind.experts)


def unit_cases(case: Case, unit: BlockUnit) -> tuple[tuple[Case, int], ...]:
    """(the case as it is for the block, how many) of the blocks of one unit."""
    return tuple(
        own
        for kind, blocks, kept in unit.mix
        for own in own_cases(case, kind, blocks=blocks, kept_blocks=kept)
    )


def block_units(case: Case, stage: Stage) -> tuple[BlockUnit, ...]:
    """The block units of a stage, equal ones together."""
    layout = case.layout
    return _block_units(
        case.model, stage, layout.tp, layout.ep, layout.shard_ranks, layout.wrap_blocks
    )


@lru_cache(maxsize=4096)
def _block_units(
    model: Model, stage: Stage, tp: int, ep: int, shard_ranks: int, wrap_blocks: int
) -> tuple[BlockUnit, ...]:
    counts: dict[tuple[tuple[Model, int, int], ...], int] = {}
    blocks = blocks_in_order(model=model, stage=stage)
    for first in range(0, len(blocks), wrap_blocks):
        kinds = blocks[first : first + wrap_blocks]  # the last unit may have fewer
        kept = kinds[max(0, stage.blocks - stage.kept_blocks - first) :]
        mix = tuple((kind, kinds.count(kind), kept.count(kind)) for kind in dict.fromkeys(kinds))
        counts[mix] = counts.get(mix, 0) + 1
    return tuple(
        BlockUnit(
            mix=mix,
            size=sum_of_sizes(
                (block_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep), number)
                for kind, number, _ in mix
            ),
            experts=next(
                (
                    expert_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep)
                    for kind, *_ in mix
                    if kind.experts
                ),
                NOTHING,
            ),
            number=number,
        )
        for mix, number in counts.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnits:
    """FSDP units of what no block holds; nothing where there are none of a kind."""

    tables: UnitSize = NOTHING
    """The embedding's: gathered for forward alone, of which backward needs only indices."""
    head: UnitSize = NOTHING
    """With the final norm: gathered at the end of forward, and there until backward is past it."""
    root: UnitSize = NOTHING
    """The rest, or all: gathered first, and there until the end of backward."""


def end_units(case: Case, stage: Stage) -> EndUnits:
    """Units of embedding, final norm and head of a stage; none inside a pipeline."""
    return _end_units(
        case.model,
        stage.has_embedding,
        stage.has_head,
        tp=case.layout.tp,
        shard_ranks=case.layout.shard_ranks,
        apart=case.training.traits.units_of_ends,
    )


@lru_cache(maxsize=4096)
def _end_units(
    model: Model,
    has_embedding: bool,
    has_head: bool,
    *,
    tp: int,
    shard_ranks: int,
    apart: bool,
) -> EndUnits:
    tensors = root_tensors(model=model, has_embedding=has_embedding, has_head=has_head)
    if not apart or (has_embedding and has_head and model.tied_embeddings):
        return EndUnits(root=unit_size(tensors, tp=tp, shard_ranks=shard_ranks))
    tables = tuple(each for each in tensors if "_embeddings." in each.name and has_embedding)
    norms = tuple(each for each in tensors if each.name.startswith("embedding_norm."))
    head = tuple(each for each in tensors if each not in (*tables, *norms))
    sizes = (unit_size(each, tp=tp, shard_ranks=shard_ranks) for each in (tables, head, norms))
    return EndUnits(**dict(zip(("tables", "head", "root"), sizes, strict=True)))
