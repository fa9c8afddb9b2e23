"""Rule: what legality says of a layout that cannot be trained or is not priced, and the rules of
pipelines (which schedules take how many stages and micro-batches) and of sharding (what goes with
DDP, ZeRO-1 and -2, FSDP, and keeping state on the host).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.cost.memory.peak import node_host_bytes
from fsdpplan.cost.schedule.actions import ACTIVE_STAGES
from fsdpplan.cost.schedule.order import microbatches_refusal, stages_refusal
from fsdpplan.cost.schedule.stages import layout_rank_stages, most_stages
from fsdpplan.search.enumerate import LOOPED_SCHEDULES
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import FSDP2, Runtime
from fsdpplan.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule."""

    reason: str
    """A few words, the same for every layout that breaks the rule."""
    sentence: str
    """The numbers, and what to use instead."""


def pipeline_problems(
    *, model: Model, layout: Layout, traits: Runtime = FSDP2
) -> Iterator[Problem]:
    """What is wrong with the pipeline; of the trainer's own software where no other is said."""
    yield from _stages(layout, model)
    if layout.pp > 1:
        yield from _micro_batches(layout, traits)
        yield from _reduction(layout)
        yield from _resharding(layout, traits)
        yield from _split_backward(layout)


def _stages(layout: Layout, model: Model) -> Iterator[Problem]:
    schedule, virtual_stages = layout.schedule, layout.virtual_stages
    refusal = stages_refusal(schedule=schedule, virtual_stages=virtual_stages)
    is_single = virtual_stages == 1 if schedule in LOOPED_SCHEDULES else virtual_stages > 1
    if refusal or (is_single and schedule in (*LOOPED_SCHEDULES, "none")):
        yield Problem(
            reason="stages a rank that the schedule does not take",
            sentence=refusal
            or f"schedule {schedule} does not go with virtual_stages {virtual_stages}: use "
            f"--virtual-stages of at least 2 with {', '.join(LOOPED_SCHEDULES)}, and 1 with others",
        )
    if layout.pp * virtual_stages > most_stages(model.layers) and layout.pp > 1:
        yield Problem(
            reason="more pipeline stages than blocks",
            sentence=f"{layout.pp * virtual_stages} pipeline stages for {model.layers} blocks, the "
            "embedding and the head; use a smaller --pp",
        )
    if layout.stage_blocks and sum(layout.stage_blocks) != model.layers:
        yield Problem(
            reason="stages do not hold all blocks",
            sentence=f"stage_blocks add up to {sum(layout.stage_blocks)}, but {model.name} has "
            f"{model.layers} blocks; use --stage-blocks that add up to it, or leave it out",
        )
    elif layout.stage_blocks and not refusal and _has_idle_rank(layout):
        yield Problem(
            reason="a pipeline rank without parameters",
            sentence=f"stage_blocks {list(layout.stage_blocks)} leave a rank without a block, the "
            "embedding or the head; give each rank a block",
        )


def _has_idle_rank(layout: Layout) -> bool:
    last = len(layout.stage_blocks) - 1
    filled = {0, last} | {index for index, blocks in enumerate(layout.stage_blocks) if blocks}
    return any(filled.isdisjoint(held) for held in layout_rank_stages(layout))


def _micro_batches(layout: Layout, traits: Runtime) -> Iterator[Problem]:
    if traits.shortens_warmup and layout.schedule == "1f1b":
        return
    number = layout.num_microbatches
    refusal = microbatches_refusal(schedule=layout.schedule, pp=layout.pp, num_microbatches=number)
    if refusal:
        yield Problem(
            reason="micro-batches that the schedule does not take",
            sentence=f"{refusal}; use another --micro-batch, --global-batch or --schedule",
        )


def _split_backward(layout: Layout) -> Iterator[Problem]:
    """What torch 2.13 cannot split into halves (tests/ground_truth/test_split_backward.py, and
    `_check_torch_compile_compatibility` in torch/distributed/pipelining/schedules.py)."""
    if layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    if layout.activation_checkpointing == "op":
        yield Problem(
            reason="split-backward schedules with recomputation of operations",
            sentence=f"schedule {layout.schedule} splits backward, which PyTorch 2.13 refuses for "
            "blocks that recompute some operations; use --activation-checkpointing full or none",
        )
    if layout.compile:
        yield Problem(
            reason="split-backward schedules with torch.compile",
            sentence=f"schedule {layout.schedule} splits backward, which PyTorch 2.13 refuses for "
            "compiled blocks; use --no-compile",
        )


def _reduction(layout: Layout) -> Iterator[Problem]:
    if layout.gradient_sync != "last":
        yield Problem(
            reason="a pipeline reduces after its last micro-batch",
            sentence=f"gradient_sync {layout.gradient_sync} with pp {layout.pp}: PyTorch's "
            "pipeline schedules reduce gradients after the last micro-batch; use "
            "--gradient-sync last",
        )


def _resharding(layout: Layout, traits: Runtime) -> Iterator[Problem]:
    """What is wrong with freeing parameters between the passes of a stage."""
    if layout.sharding != "fsdp" or layout.reshard_after_forward == "never":
        return
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield Problem(
            reason="split-backward schedules with resharding",
            sentence=f"schedule {layout.schedule} splits backward: with reshard after forward "
            "PyTorch 2.13 trains silently wrong with it; use --reshard-after-forward never",
        )
    if not traits.reshards_stages:
        yield Problem(
            reason="FSDP inside a pipeline without reshard never",
            sentence="PyTorch's schedules drive fsdp inside a pipeline without resharding, and "
            "only that is priced; use --reshard-after-forward never",
        )
        return
    if layout.reshard_after_forward != "always":
        yield Problem(
            reason="resharding to fewer ranks inside a pipeline",
            sentence=f"reshard_after_forward {layout.reshard_after_forward} with pp {layout.pp}: "
            f"{traits.words} frees the blocks of a stage or keeps them; use always or never",
        )
    if layout.virtual_stages > ACTIVE_STAGES:
        yield Problem(
            reason="resharding of more stages than torch keeps gathered",
            sentence=f"reshard_after_forward always with {layout.virtual_stages} stages a rank is "
            f"not priced: torch gathers stages as a whole beyond {ACTIVE_STAGES}; use "
            f"--virtual-stages of at most {ACTIVE_STAGES}, or --reshard-after-forward never",
        )


def sharding_problems(case: Case) -> Iterator[Problem]:
    """What is wrong with how state is sharded, gathered and reduced."""
    layout = case.layout
    yield from _whole_parameters(layout)
    yield from _shard_group(layout)
    yield from _buckets(case)
    yield from _offload(layout, case.cluster)
    yield from _compression(case)
    if case.training.fp8_all_gather and layout.sharding != "fsdp":
        yield Problem(
            reason="fp8 all-gather without sharded parameters",
            sentence=f"sharding {layout.sharding} gathers no parameters before a matmul: leave "
            "--fp8-all-gather out, or use --sharding fsdp",
        )


def _compression(case: Case) -> Iterator[Problem]:
    """Gradients are compressed by hooks of DDP."""
    layout, kind = case.layout, case.training.gradient_compression
    if kind == "none":
        return
    if layout.sharding != "ddp":
        yield Problem(
            reason="gradient compression without DDP",
            sentence=f"gradient_compression {kind} is a hook of DDP, and sharding is "
            f"{layout.sharding}: use --sharding ddp, or leave --gradient-compression out",
        )
    if layout.world == 1 and _is_bare(case):
        yield Problem(
            reason="gradient compression without replicas",
            sentence=f"gradient_compression {kind}: one GPU sends no gradients; leave "
            "--gradient-compression out, or use --gpus 2",
        )
    if max(layout.tp, layout.cp, layout.pp, layout.ep) > 1:
        yield Problem(
            reason="gradient compression beside other axes",
            sentence=f"gradient_compression {kind} with tp {layout.tp}, cp {layout.cp}, pp "
            f"{layout.pp} and ep {layout.ep}: gradients are compressed of whole replicas; use "
            "--tp 1 --cp 1 --pp 1 --ep 1, or leave --gradient-compression out",
        )
    if kind != "bf16" and layout.num_microbatches > 1 and layout.gradient_sync != "last":
        yield Problem(
            reason="PowerSGD of sums that were compressed before",
            sentence=f"gradient_compression {kind} with gradient_sync {layout.gradient_sync} would "
            "compress what earlier micro-batches compressed: use --gradient-sync last",
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
    is_alone = layout.sharding == "fsdp" and layout.dp_replicate == 1
    if layout.shard_ranks == 1 and not is_alone:
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


def _buckets(case: Case) -> Iterator[Problem]:
    """A bucket is FSDP's unit or DDP's buffer: the other one's does nothing."""
    layout, model = case.layout, case.model
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
    elif layout.ddp_bucket_bytes != DDP_BUCKET_BYTES and _is_bare(case):
        yield Problem(
            reason="a DDP bucket without replicas",
            sentence="--ddp-bucket is the bucket of DDP, and one replica reduces nothing: leave "
            "it out, or use --dp-replicate of at least 2",
        )


def _is_bare(case: Case) -> bool:
    """One replica of whole parameters, with nothing around it."""
    is_one = case.layout.sharding == "ddp" and case.layout.dp_replicate == 1
    return is_one and not case.training.traits.wraps_alone


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


def host_memory_problems(case: Case) -> Iterator[Problem]:
    """What is kept on a host has to fit there; where its size is not known, nothing is refused."""
    there, layout = case.cluster.host_memory_bytes, case.layout
    if there is None or layout.offload == "none" or layout.world != case.cluster.gpus:
        return
    if next(pipeline_problems(model=case.model, layout=layout), None):
        return  # no rank is known to hold anything
    needed = node_host_bytes(case)
    if needed > there:
        yield Problem(
            reason="what is offloaded does not fit in host memory",
            sentence=f"offload cpu keeps {format_gib(needed)} in the memory of a node, which has "
            f"{format_gib(there)}; use more nodes, or --offload none",
        )
