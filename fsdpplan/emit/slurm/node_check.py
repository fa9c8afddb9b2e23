"""The check that each node runs before anything starts: can it do its part?"""

from __future__ import annotations

import inspect

from fsdpplan.emit.job import Job, saves_to
from fsdpplan.emit.nccl.cloud import cloud_scripts
from fsdpplan.emit.nccl.environment import environment
from fsdpplan.emit.nccl.rules import is_nvidia, network_between
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.node import look, meet, near
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.torch_features import NUMA_BINDING, torch_need
from fsdpplan.spec.trainer_options import data_share

NODE_CHECK_NAME = "parts/node_check.py"
NEAR_NAME = "parts/near.py"
"""What a job folder has of the programs."""

IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"
"""Where the driver has them. Source: CUDA driver API, cuMemCreate; NVIDIA IMEX guide."""


def node_check(*, several: bool) -> str:
    """Text of the program that each node runs; of `several`, which meet in it."""
    text = inspect.getsource(look)
    if several:
        own = text.partition("\n\nif __name__ ==")[0]
        further = inspect.getsource(meet).split("\n")
        dropped = ("from __future__", "from fsdpplan.")
        text = own + "\n" + "\n".join(line for line in further if not line.startswith(dropped))
    assert "'" not in text, "it stands between apostrophes in the script"
    return text


def near_check() -> str:
    """Text of the program that says whether a node can keep ranks near their GPUs."""
    text = inspect.getsource(near)
    assert "'" not in text, "it stands between apostrophes in the script"
    return text


def binds(plan: Plan) -> bool:
    """Whether ranks are to stay near their GPUs where a node can do that: not under a torch that
    is known to lack it."""
    known = plan.known_torch
    return NUMA_BINDING.needed(plan.case) and (known is None or known >= NUMA_BINDING.since)


def assumptions(*, plan: Plan, job: Job) -> tuple[str, ...]:
    """What is taken for granted on every node, as arguments of the check."""
    names = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")
    saved = saves_to(job)
    variables = tuple(
        f"{variable.name}={variable.value}"
        for variable in environment(plan=plan, job=job)
        if variable.name in names
    )
    network = network_between(plan)
    files = [script.path for script in cloud_scripts(plan) if script.found]
    if not isinstance(network, str) and network.transport == "efa":
        files += network.net_plugins[:1]
    return (
        *_torch_needed(plan, job),
        *_build_needed(plan),
        *_imex_needed(plan),
        *(f"read={path}" for path in _read_by_all(job)),
        *([] if saved is None else [f"save={saved}"]),
        *variables,
        *(f"file={path}" for path in files),
    )


def _torch_needed(plan: Plan, job: Job) -> list[str]:
    """The oldest torch that the trainer can train the plan with; a program of the user's own knows
    what it needs itself."""
    if not isinstance(job.program, Trainer):
        return []
    need = torch_need(plan.case)
    return [f"torch={need.oldest},{need.because}"]


def _build_needed(plan: Plan) -> list[str]:
    """A torch that was built for CUDA sees none of AMD's GPUs, and does not say why."""
    device = plan.cluster.device
    return [] if device.kind == "cpu" or is_nvidia(device) else ["build=rocm"]


def _imex_needed(plan: Plan) -> list[str]:
    """What lets GPUs of one node reach those of another by NVLink (GB200 and GB300 NVL72)."""
    cluster = plan.cluster
    spans = any(level.name == "nvlink" and cluster.joins_nodes(level) for level in cluster.levels)
    needed = cluster.nodes > 1 and is_nvidia(cluster.device) and spans
    return [f"imex={IMEX_CHANNELS}"] if needed else []


def _read_by_all(job: Job) -> list[str]:
    program = job.program
    if not isinstance(program, Trainer):
        return [program.script]
    return [data_share(text)[0] for text in program.sources]
