"""Sharding rules: what goes with DDP, ZeRO-1 and -2, FSDP, and keeping state on the host."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, Layout
from fsdpplan.spec.model import Model


def sharding_problems(case: Case) -> Iterator[Problem]:
    """What is wrong with how state is sharded, gathered and reduced."""
    layout = case.layout
    yield from _whole_parameters(layout)
    yield from _shard_group(layout)
    yield from _buckets(layout, case.model)
    yield from _offload(layout, case.cluster)
    if case.training.fp8_all_gather and layout.sharding != "fsdp":
        yield Problem(
            reason="fp8 all-gather without sharded parameters",
            sentence=f"sharding {layout.sharding} gathers no parameters before a matmul: leave "
            "--fp8-all-gather out, or use --sharding fsdp",
        )


def _whole_parameters(layout: Layout) -> Iterator[Problem]:
    """DDP, ZeRO-1 and ZeRO-2 keep whole parameters."""
    if layout.sharding == "fsdp":
        return
    if layout.reshard_after_forward != "always":
        words = "DDP" if layout.sharding == "ddp" else "ZeRO-1 and ZeRO-2"
        yield Problem(
            reason=f"{words} {'does' if layout.sharding == 'ddp' else 'do'} not reshard",
            sentence=f"sharding {layout.sharding} has nothing to reshard; leave "
            "--reshard-after-forward out",
        )
    if layout.sharding != "ddp":
        return
    if layout.cp > 1:
        yield Problem(
            reason="DDP with context parallelism",
            sentence=f"sharding ddp with cp {layout.cp}: parameters are sharded over the "
            "context-parallel ranks too; use --sharding fsdp, or --cp 1",
        )
    if layout.gradient_sync == "reduce_scatter_only":
        yield Problem(
            reason="DDP has no reduce-scatter",
            sentence="sharding ddp only all-reduces; use --gradient-sync every or last",
        )


def _shard_group(layout: Layout) -> Iterator[Problem]:
    if layout.sharding == "ddp":
        return
    if layout.shard_ranks == 1:
        yield Problem(
            reason="a shard group of one rank",
            sentence=f"sharding {layout.sharding} over one rank shards nothing; use --sharding "
            "ddp, or --dp-shard of at least 2",
        )
    if layout.gradient_sync == "reduce_scatter_only" and layout.dp_replicate == 1:
        yield Problem(
            reason="reduce_scatter_only without replicas",
            sentence="gradient_sync reduce_scatter_only needs --dp-replicate of at least 2 "
            "(HSDP): without replicas there is no all-reduce to postpone; use every or last",
        )
    reshard = layout.reshard_after_forward
    if not isinstance(reshard, int):
        return
    if layout.shard_ranks % reshard or not 1 < reshard < layout.shard_ranks:
        yield Problem(
            reason="reshard size does not divide the shard group",
            sentence=f"reshard_after_forward {reshard} must divide the {layout.shard_ranks} "
            "ranks of the shard group and be smaller; or use always or never",
        )
    if layout.ep > 1:
        yield Problem(
            reason="resharding to fewer ranks with expert parallelism",
            sentence=f"reshard_after_forward {reshard} with ep {layout.ep}: routed experts are "
            "sharded over fewer ranks than the rest; use always or never",
        )
    if layout.tp > 1:
        # fsdp/_fully_shard/_fsdp_param.py of torch 2.13, to_sharded_post_forward.
        yield Problem(
            reason="resharding to fewer ranks with tensor parallelism",
            sentence=f"reshard_after_forward {reshard} with tp {layout.tp}: FSDP2 cannot keep "
            "parts of parameters that tensor parallelism has split; use always or never",
        )


def _buckets(layout: Layout, model: Model) -> Iterator[Problem]:
    """A bucket is FSDP's unit or DDP's buffer: the other one's does nothing."""
    if layout.sharding != "fsdp" and layout.wrap_blocks > 1:
        yield Problem(
            reason="wrap_blocks without FSDP",
            sentence=f"wrap_blocks {layout.wrap_blocks} is the bucket of FSDP, and sharding is "
            f"{layout.sharding}; leave --wrap-blocks out, or use --sharding fsdp",
        )
    if layout.wrap_blocks > model.layers:
        yield Problem(
            reason="more blocks a unit than there are",
            sentence=f"wrap_blocks {layout.wrap_blocks} is more than the {model.layers} blocks "
            f"of {model.name}; use --wrap-blocks {model.layers} or less",
        )
    if layout.sharding != "ddp" and layout.ddp_bucket_bytes != DDP_BUCKET_BYTES:
        other = (
            "use --wrap-blocks, the bucket of FSDP" if layout.sharding == "fsdp" else "leave it out"
        )
        yield Problem(
            reason="a DDP bucket without DDP",
            sentence=f"--ddp-bucket is the bucket of DDP, and sharding is {layout.sharding}; "
            f"{other}",
        )


def _offload(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if layout.offload == "none":
        return
    if layout.sharding != "fsdp":
        yield Problem(
            reason="offload without FSDP",
            sentence=f"offload cpu is FSDP2's CPUOffloadPolicy: sharding {layout.sharding} does "
            "not have it; use --sharding fsdp, or leave --offload out",
        )
    if cluster.device.kind == "cpu":
        yield Problem(
            reason="offload on a CPU",
            sentence="offload cpu moves nothing on a CPU; leave --offload out",
        )
