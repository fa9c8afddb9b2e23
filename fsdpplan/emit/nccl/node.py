"""Rules of what runs on a node: allocator, threads, order of kernels, logs and post-mortems."""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.rules import NCCL_GUIDE, ChosenValue, Rule, is_nvidia, library_of
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import TorchRelease

TORCH_VARIABLES = "torch 2.13 c10d/ProcessGroupNCCL.hpp"
ALLOC_CONF_SINCE = TorchRelease(2, 10)
"""Since then CUDA's allocator reads PYTORCH_ALLOC_CONF. In 2.9 only what all devices share does."""
BLACKWELL = 10
"""Major compute capability from which kernels start in order whatever the queues."""
LEAST_RECORDS = 2000
"""What torch 2.13 keeps by default (c10d/FlightRecorder.hpp)."""
STEPS_RECORDED = 2
"""The step that hung, and the whole one before it."""


def _allocator(plan: Plan, job: Job) -> ChosenValue | str:
    if not is_nvidia(plan.cluster.device):
        return _no_growing(plan)
    torch = plan.known_torch
    if torch is not None and torch < ALLOC_CONF_SINCE:
        return f"torch {torch} reads the older name only"
    return _growing("PYTORCH_CUDA_ALLOC_CONF")


def _allocator_of_older_torch(plan: Plan, job: Job) -> ChosenValue | str:
    if not is_nvidia(plan.cluster.device):
        return _no_growing(plan)
    torch = plan.known_torch
    if torch is None:
        return ChosenValue(
            value="$PYTORCH_ALLOC_CONF",
            expands=True,
            reason="the same setting, by its older name: nobody has said which torch will run",
        )
    if torch >= ALLOC_CONF_SINCE:
        return f"torch {torch} reads the newer name"
    return _growing("PYTORCH_ALLOC_CONF")


def _no_growing(plan: Plan) -> str:
    """Source: torch 2.13 c10/cuda/CUDAAllocatorConfig.h (not before ROCm 7); pytorch pull request
    177974."""
    if plan.cluster.device.kind == "cpu":
        return "it is for CUDA's allocator"
    return (
        "HIP's allocator has segments that grow only with ROCm 7 and a torch that was built for it "
        "(2.13 is), and they were not tried here; before torch 2.10 it reads PYTORCH_HIP_ALLOC_CONF"
    )


def _growing(other_name: str) -> ChosenValue:
    """Segments that grow, unless the user has set the allocator by its other name."""
    return ChosenValue(
        value=f"${{{other_name}:-expandable_segments:True}}",
        expands=True,
        reason="blocks are gathered and freed all the time; segments that grow leave fewer holes, "
        "so what is reserved stays near what is allocated",
    )


def _threads(plan: Plan, job: Job) -> ChosenValue | str:
    """A CPU device of a profile is one process on one core; a GPU's rank gets its share."""
    if plan.cluster.device.kind == "cpu":
        return ChosenValue(
            value="1",
            reason="the plan counts one core a rank; without it each rank would take all cores",
        )
    ranks = plan.cluster.gpus_per_node
    return ChosenValue(
        value=f"$(nproc) / {ranks}",
        expands=True,
        on_node=True,
        reason=f"{ranks} ranks share the node's cores; torchrun would give each one thread",
    )


def _queues(plan: Plan, job: Job) -> ChosenValue | str:
    """Source: Megatron-LM d98e8a64dd megatron/core/tensor_parallel/layers.py
    (linear_with_grad_accumulation_and_async_allreduce), megatron/training/arguments.py (refused
    with FSDP; without need on compute capability 10)."""
    layout, device = plan.layout, plan.cluster.device
    if not is_nvidia(device):
        return "it is for CUDA's hardware queues"
    if layout.tp == 1:
        return "it orders tensor parallelism's collectives, and there is none (tp 1)"
    if layout.async_tp:
        return "asynchronous tensor parallelism needs several queues"
    if layout.sharding == "fsdp" and layout.shard_ranks > 1:
        return "with one queue FSDP's gathers could not run beside matmuls"
    if not plan.training.traits.overlaps_weight_gradient:
        return (
            f"{plan.training.traits.words} waits for tensor parallelism's collectives where it "
            "uses them, so there is no order to keep"
        )
    if device.compute_capability is None:
        return f"the compute capability of {device.name} is not known: from 10 on it is without use"
    if int(device.compute_capability.partition(".")[0]) >= BLACKWELL:
        return f"since Blackwell kernels start in order without it ({device.name})"
    return ChosenValue(
        value="1",
        reason=f"gradients of {layout.tp} tensor-parallel ranks are reduced beside the matmuls of "
        "weights' gradients: with one queue the reduction starts first",
    )


def _records(plan: Plan, job: Job) -> ChosenValue | str:
    alone = _nothing_to_record(plan)
    if alone is not None:
        return alone
    a_step = sum(cost.count for cost in plan.estimate.communication)
    kept = max(LEAST_RECORDS, STEPS_RECORDED * a_step)
    steps = f", {kept / a_step:.1f} steps of {a_step:,}" if a_step else ""
    return ChosenValue(
        value=str(kept),
        reason=f"after a hang the last {kept:,} collectives of each rank{steps} say who is missing",
    )


def _dump(plan: Plan, job: Job) -> ChosenValue | str:
    return _nothing_to_record(plan) or ChosenValue(
        value="1", reason="a rank that waits in vain writes its record down before it ends"
    )


def _dump_file(plan: Plan, job: Job) -> ChosenValue | str:
    return _nothing_to_record(plan) or ChosenValue(
        value="${FSDPPLAN_METRICS:-$PWD/fsdpplan-${SLURM_JOB_ID:-$$}}.nccl-rank-",
        expands=True,
        reason="records go beside the run's metrics, one file a rank (read by torchfrtrace); by "
        "default a user's jobs overwrite each other's",
    )


def _nothing_to_record(plan: Plan) -> str | None:
    if plan.cluster.device.kind == "cpu":
        return "the flight recorder is that of torch's NCCL backend"
    return None if plan.cluster.gpus > 1 else "one rank runs no collectives"


def _log(plan: Plan, job: Job) -> ChosenValue | str:
    library = library_of(plan.cluster.device)
    if job.nccl_debug is None:
        return f"nobody asked for {library}'s log (--nccl-debug INFO)"
    return ChosenValue(value=job.nccl_debug, reason=f"asked for: {library} logs what it chose")


DEVICE_RULES: tuple[Rule, ...] = (
    Rule(
        name="PYTORCH_ALLOC_CONF",
        kind="allocator",
        when="GPUs of NVIDIA, and torch is not known to be older",
        versions=f"torch >= {ALLOC_CONF_SINCE}",
        source="torch 2.10 c10/cuda/CUDAAllocatorConfig.h",
        decide=_allocator,
    ),
    Rule(
        name="PYTORCH_CUDA_ALLOC_CONF",
        kind="allocator",
        when="GPUs of NVIDIA, and torch is older or not known",
        versions=f"torch < {ALLOC_CONF_SINCE}",
        source="torch 2.9 c10/cuda/CUDAAllocatorConfig.h",
        decide=_allocator_of_older_torch,
    ),
    Rule(
        name="OMP_NUM_THREADS",
        kind="threads",
        when="always: a rank's share of the node's cores, 1 for CPU processes",
        versions="torchrun, all versions",
        source="torch 2.13 torch/distributed/run.py",
        decide=_threads,
    ),
    Rule(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        kind="order",
        when="tensor parallelism that reduces beside weights' gradients (Megatron), without FSDP, "
        "before Blackwell",
        versions="Hopper and older",
        source="Megatron-LM d98e8a64dd megatron/training/arguments.py",
        decide=_queues,
    ),
)

DEBUGGING_RULES: tuple[Rule, ...] = (
    Rule(
        name="TORCH_FR_BUFFER_SIZE",
        kind="debugging",
        when="more than one GPU",
        versions="torch >= 2.8",
        source="https://github.com/NVIDIA/nvidia-resiliency-ext/pull/163",
        decide=_records,
    ),
    Rule(
        name="TORCH_NCCL_DUMP_ON_TIMEOUT",
        kind="debugging",
        when="more than one GPU",
        versions="torch >= 2.6; newer ones do it by default",
        source=TORCH_VARIABLES,
        decide=_dump,
    ),
    Rule(
        name="TORCH_FR_DUMP_TEMP_FILE",
        kind="debugging",
        when="more than one GPU",
        versions="torch >= 2.8",
        source="https://github.com/pytorch/torchtitan/pull/1748",
        decide=_dump_file,
    ),
    Rule(
        name="NCCL_DEBUG",
        kind="debugging",
        when="`--nccl-debug` asks for it",
        versions="NCCL, all versions",
        source=NCCL_GUIDE,
        decide=_log,
    ),
)
