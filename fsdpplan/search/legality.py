"""Legality: why a layout cannot be trained, before anything is priced.

Each rule gives (reason, sentence): the reason is what the search counts, the sentence is what the
user reads, with what would be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule."""

    reason: str
    """A few words, the same for every layout that breaks the rule."""
    sentence: str
    """The numbers, and what to use instead."""


def legal_layout_problem(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> str | None:
    """The first rule that `layout` breaks, as a sentence; None if it is legal."""
    problem = first_problem(model=model, cluster=cluster, training=training, layout=layout)
    return problem.sentence if problem else None


def first_problem(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> Problem | None:
    """The first rule that `layout` breaks."""
    rules = (
        _not_priced(layout, training),
        _ranks(layout, cluster),
        _sharding(layout),
        _batch(layout, training),
        _model(layout, model, training),
        _pipeline(layout, model),
    )
    return next((problem for rule in rules for problem in rule), None)


def _not_priced(layout: Layout, training: Training) -> Iterator[Problem]:
    if layout.cp > 1:
        yield Problem(
            reason="context parallelism is not priced yet",
            sentence=f"cp {layout.cp}: context parallelism is not priced yet; use --cp 1",
        )
    if layout.ep > 1:
        yield Problem(
            reason="expert parallelism is not priced yet",
            sentence=f"ep {layout.ep}: expert parallelism is not priced yet; use --ep 1",
        )
    if training.precision == "fp8":
        yield Problem(
            reason="fp8 is not priced yet",
            sentence="precision fp8: fp8 recipes are not priced yet; use --precision bf16",
        )
    if training.runtime == "autocast" and max(layout.tp, layout.pp) > 1:
        yield Problem(
            reason="runtime autocast is data-parallel",
            sentence=f"runtime autocast is priced for DDP and FSDP, not with tp {layout.tp} and pp "
            f"{layout.pp}; use --tp 1 --pp 1, or --runtime fsdp2",
        )
    if layout.async_tp:
        yield Problem(
            reason="async TP is not priced yet",
            sentence="async_tp: overlapped tensor parallelism is not priced yet; leave it off",
        )
    if layout.sharding in ("zero1", "zero2"):
        yield Problem(
            reason="ZeRO-1 and ZeRO-2 are not priced yet",
            sentence=f"sharding {layout.sharding}: not priced yet; FSDP2's nearest is "
            "--sharding fsdp --reshard-after-forward never",
        )
    if layout.tp > 1 and not (layout.sequence_parallel and layout.loss_parallel):
        yield Problem(
            reason="TP without sequence and loss parallelism is not priced yet",
            sentence=f"tp {layout.tp} is priced with sequence_parallel and loss_parallel only",
        )


def _ranks(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if layout.world != cluster.gpus:
        yield Problem(
            reason="degrees do not multiply to the GPUs",
            sentence=f"pp {layout.pp} x dp_replicate {layout.dp_replicate} x dp_shard "
            f"{layout.dp_shard} x cp {layout.cp} x tp {layout.tp} = {layout.world} ranks, but "
            f"there are {cluster.gpus} GPUs; change --gpus or a degree",
        )


def _sharding(layout: Layout) -> Iterator[Problem]:
    if layout.sharding == "ddp":
        if layout.reshard_after_forward != "always":
            yield Problem(
                reason="DDP does not reshard",
                sentence="sharding ddp has nothing to reshard; leave --reshard-after-forward out",
            )
        if layout.gradient_sync == "reduce_scatter_only":
            yield Problem(
                reason="DDP has no reduce-scatter",
                sentence="sharding ddp only all-reduces; use --gradient-sync every or last",
            )
        return
    if layout.shard_ranks == 1:
        yield Problem(
            reason="a shard group of one rank",
            sentence="sharding fsdp over one rank shards nothing; use --sharding ddp, or "
            "--dp-shard of at least 2",
        )
    if layout.gradient_sync == "reduce_scatter_only" and layout.dp_replicate == 1:
        yield Problem(
            reason="reduce_scatter_only without replicas",
            sentence="gradient_sync reduce_scatter_only needs --dp-replicate of at least 2 "
            "(HSDP): without replicas there is no all-reduce to postpone; use every or last",
        )
    reshard = layout.reshard_after_forward
    if isinstance(reshard, int) and (
        layout.shard_ranks % reshard or not 1 < reshard < layout.shard_ranks
    ):
        yield Problem(
            reason="reshard size does not divide the shard group",
            sentence=f"reshard_after_forward {reshard} must divide the {layout.shard_ranks} "
            "ranks of the shard group and be smaller; or use always or never",
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


def _model(layout: Layout, model: Model, training: Training) -> Iterator[Problem]:
    if model.positions == "learned" and training.seq_len > model.max_positions:
        yield Problem(
            reason="sequence longer than the position table",
            sentence=f"{model.name} has {model.max_positions} learned positions; use --seq-len "
            f"{model.max_positions} or less, not {training.seq_len}",
        )
    split = {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn_hidden": model.ffn_hidden,
        "vocab": model.vocab,
        "seq_len": training.seq_len,
    }
    for field, value in split.items():
        if value % layout.tp:
            yield Problem(
                reason=f"tp does not divide {field}",
                sentence=f"tp {layout.tp} does not divide {field} {value} of {model.name}",
            )


def _pipeline(layout: Layout, model: Model) -> Iterator[Problem]:
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield Problem(
            reason="split-backward schedules are not offered",
            sentence=f"schedule {layout.schedule} splits backward: not priced yet, and with "
            "reshard after forward PyTorch 2.13 trains silently wrong with it; use "
            "--schedule 1f1b or interleaved_1f1b",
        )
    if layout.schedule == "looped_bfs":
        yield Problem(
            reason="looped_bfs is not priced yet",
            sentence="schedule looped_bfs is not priced yet; use --schedule interleaved_1f1b",
        )
    interleaved = layout.schedule == "interleaved_1f1b"
    if interleaved != (layout.virtual_stages > 1):
        yield Problem(
            reason="virtual stages without an interleaved schedule",
            sentence=f"schedule {layout.schedule} does not go with virtual_stages "
            f"{layout.virtual_stages}: interleaved_1f1b needs at least 2, the others 1",
        )
    if layout.pp == 1:
        return
    stages = layout.pp * layout.virtual_stages
    if stages > model.layers:
        yield Problem(
            reason="more pipeline stages than blocks",
            sentence=f"{stages} pipeline stages for {model.layers} blocks; use a smaller --pp",
        )
    if layout.num_microbatches < layout.pp:
        yield Problem(
            reason="fewer micro-batches than pipeline stages",
            sentence=f"{layout.num_microbatches} micro-batches for {layout.pp} pipeline stages: "
            "PyTorch's schedules need at least as many; use a smaller --micro-batch or --pp",
        )
    if interleaved and layout.num_microbatches % layout.pp:
        yield Problem(
            reason="interleaving needs a multiple of pp micro-batches",
            sentence=f"interleaved_1f1b needs a multiple of pp {layout.pp} micro-batches, not "
            f"{layout.num_microbatches}",
        )
    if layout.gradient_sync != "last":
        yield Problem(
            reason="a pipeline reduces after its last micro-batch",
            sentence=f"gradient_sync {layout.gradient_sync} with pp {layout.pp}: PyTorch's "
            "pipeline schedules reduce gradients after the last micro-batch; use "
            "--gradient-sync last",
        )
    if layout.sharding == "fsdp" and layout.reshard_after_forward != "never":
        yield Problem(
            reason="FSDP inside a pipeline without reshard never",
            sentence="fsdp inside a pipeline is priced with --reshard-after-forward never, "
            "which is how PyTorch's schedules drive it",
        )
