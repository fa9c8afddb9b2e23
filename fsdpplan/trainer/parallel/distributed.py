"""Process groups: how a run begins and ends."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..config import PlanConfig
from ..errors import RankError, TrainerError
from ..torch_versions import keep_flight_records


def local_device(kind: str) -> torch.device:
    """The device of this rank."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainerError(
            "the plan is for CUDA devices but torch finds none here; `fsdpplan run --smoke` tries "
            "the layout on CPU processes"
        )
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise RankError(
            f"local rank {index} has no GPU: this node shows {torch.cuda.device_count()}; start "
            "as many processes a node as it has GPUs"
        )
    return torch.device("cuda", index)


def require_world(plan: PlanConfig) -> None:
    """Raise unless as many processes were started as the plan has ranks."""
    planned = plan.layout.world
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != planned:
        per_node = plan.cluster.gpus_per_node
        raise TrainerError(
            f"the plan is for {planned} processes but {started} were started: use torchrun "
            f"--nnodes {planned // per_node} --nproc-per-node {per_node}, or plan again for "
            f"--gpus {started}"
        )


def local_ranks(plan: PlanConfig) -> int:
    """Ranks of this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", plan.cluster.gpus_per_node))


def start(plan: PlanConfig) -> torch.device:
    """Join the process group, unless there is one, and return this rank's device."""
    device = local_device(plan.cluster.device.kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if dist.get_world_size() != plan.layout.world:
            raise TrainerError(
                f"the plan is for {plan.layout.world} processes but the process group has "
                f"{dist.get_world_size()}: start as many, or plan again for these"
            )
        return device
    require_world(plan)
    keep_flight_records()
    if device.type == "cuda":
        # offloaded gradients are on the host, where their norm is agreed upon
        backend = "cpu:gloo,cuda:nccl" if plan.layout.offload == "cpu" else "nccl"
        dist.init_process_group(backend, device_id=device, **_alone())
    else:
        dist.init_process_group("gloo", **_alone())
    return device


def _alone() -> dict[str, Any]:
    """Arguments for a group of one process that no launcher started."""
    if "RANK" in os.environ:
        return {}
    return {"rank": 0, "world_size": 1, "store": dist.HashStore()}  # type: ignore[attr-defined]


def leave(exit_code: int) -> NoReturn:
    """End this process with `exit_code`, without the interpreter's own ending.

    A gloo thread may drop the last reference to a tensor while the interpreter shuts down, which
    aborts the process after all work is done (seen with torch 2.13, half of the runs on 4 ranks).
    """
    if exit_code == 0 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
