"""What to measure for a plan: matmuls and attention of its blocks, the axes of its mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from fsdpplan.cost.kernels.attention import head_channels
from fsdpplan.cost.kernels.products import Product, block_products
from fsdpplan.cost.network.placement import shard_group
from fsdpplan.cost.overlap.timing import block_work
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.measure.settings import (
    Attention,
    Axis,
    MeasuredDtype,
    Settings,
    Shape,
)


def settings_for_plan(settings: Settings, plan: Plan) -> Settings:
    """`settings` with the shapes, number formats and axes of `plan`."""
    return replace(
        settings,
        dtypes=settings.dtypes or _dtypes(plan),
        shapes=plan_shapes(plan),
        attention=plan_attention(plan),
        axes=plan_axes(plan.layout),
    )


def plan_shapes(plan: Plan) -> tuple[Shape, ...]:
    """m, n, k of the matmuls of one block on one rank: forward, and in backward by input and by
    weight; each once. Grouped ones of experts are left out: they are no single matmul."""
    work = block_work(plan.case)
    shapes = (
        shape
        for product in block_products(work)
        if product.groups == 1
        for shape in _passes(product)
    )
    return tuple(dict.fromkeys(shapes))


def plan_attention(plan: Plan) -> tuple[Attention, ...]:
    """Attention of one block on one rank, if its heads are of a width."""
    model, layout = plan.model, plan.layout
    query, value = head_channels(model)
    if query != value:
        return ()
    kv_heads = -(-model.kv_heads // layout.tp)
    heads = -(-model.heads // layout.tp)
    return (
        Attention(
            batch=layout.micro_batch,
            heads=-(-heads // kv_heads) * kv_heads,
            kv_heads=kv_heads,
            seq_len=plan.training.seq_len,
            head_dim=model.head_dim,
        ),
    )


def plan_axes(layout: Layout) -> tuple[Axis, ...]:
    """Axes of the mesh with more than one rank, outermost first; behind them the ranks that FSDP
    shards over, where those are two axes."""
    strides = layout.inner_ranks
    axes = [
        Axis(name=axis, ranks=getattr(layout, axis), stride=strides[axis])
        for axis in MESH_AXES
        if getattr(layout, axis) > 1
    ]
    shards = shard_group(layout)
    if layout.cp > 1 and layout.dp_shard > 1:
        axes.append(Axis(name="dp_shard_cp", ranks=shards.ranks, stride=shards.stride))
    return tuple(axes)


def _passes(product: Product) -> Iterator[Shape]:
    rows = max(1, round(product.rows))
    yield rows, product.n, product.k
    yield rows, product.k, product.n
    yield product.n, product.k, rows


def _dtypes(plan: Plan) -> tuple[MeasuredDtype, ...]:
    """That of the matmuls, and that of attention where it is another one."""
    training = plan.training
    both = (training.precision, training.activation_dtype)
    return cast(tuple[MeasuredDtype, ...], tuple(dict.fromkeys(both)))
