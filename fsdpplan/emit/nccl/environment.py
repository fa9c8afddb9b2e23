"""Environment of the ranks: a variable is set only where the plan gives a reason for it.

NCCL finds its own interfaces, adapters and algorithms, and what was a cure for one version slows
the next one down. So each line has a reason taken from the plan and its topology, the versions it
is for and its source, and gives way to a value that the user has exported.

Variables that many scripts set and ours never do, each with the reason.
"""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.fabric import FABRIC_RULES
from fsdpplan.emit.nccl.node import DEBUGGING_RULES, DEVICE_RULES, TORCH_VARIABLES
from fsdpplan.emit.nccl.rules import NCCL_GUIDE, ChosenValue, Rule, Unset, Variable
from fsdpplan.spec.plan import Plan

NEVER_SET: tuple[Unset, ...] = (
    Unset(
        names=("NCCL_NVLS_ENABLE",),
        why="NCCL >= 2.18 lets NVLink switches reduce wherever they can (2, its default)",
        source="NCCL v2.30.7-1 src/transport/nvls.cc",
        vendors=("nvidia",),
    ),
    Unset(
        names=("NCCL_MNNVL_ENABLE",),
        why="NCCL >= 2.21 finds NVLink between nodes itself (2), and says so where IMEX is broken",
        source="NCCL v2.30.7-1 src/mnnvl.cc",
        vendors=("nvidia",),
    ),
    Unset(
        names=("NCCL_ALGO", "NCCL_PROTO"),
        why="NCCL chooses by tables for the topology that it finds, and what was a cure for one "
        "release slows the next one down",
        source=NCCL_GUIDE,
    ),
    Unset(
        names=("NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE"),
        why="NCCL's maintainers advise to leave them; AWS's and Google's stacks set their own",
        source="https://github.com/NVIDIA/nccl/issues/1739",
    ),
    Unset(
        names=("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        why="more channels take multiprocessors from matmuls that run beside; nothing was measured "
        "here that says it pays",
        source="aws-ofi-nccl 2daf7d30 doc/efa-env-var.md",
    ),
    Unset(
        names=("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
        why="they hide a fault at the price of the network: find it by --nccl-debug INFO",
        source=NCCL_GUIDE,
    ),
    Unset(
        names=("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
        why="the default (3) ends a rank whose collective failed",
        source=TORCH_VARIABLES,
    ),
    Unset(
        names=("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
        why="it watches torch's watchdog, not collectives; their own limit is 10 minutes",
        source=TORCH_VARIABLES,
    ),
    Unset(
        names=("TORCH_NCCL_AVOID_RECORD_STREAMS",),
        why="torch >= 2.8 does it by default and warns of the variable; with older ones it saves "
        "memory where tensor parallelism is used",
        source="https://github.com/pytorch/torchtitan/pull/1088",
    ),
    Unset(
        names=("TORCH_NCCL_HIGH_PRIORITY",),
        why="nothing was measured here that says it pays",
        source=TORCH_VARIABLES,
    ),
    Unset(
        names=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        why="each rank takes its GPU by its number on the node; where Slurm sets one of them, "
        "another list would count within it",
        source="https://rocm.docs.amd.com/en/docs-7.1.1/reference/env-variables.html",
        vendors=("amd",),
    ),
    Unset(
        names=("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"),
        why="aws-ofi-nccl >= 1.7 with libfabric >= 1.18 needs none of them",
        source="aws-ofi-nccl 2daf7d30 doc/efa-env-var.md",
        transports=("efa",),
    ),
    Unset(
        names=(
            "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX",
            "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME",
            "NCCL_GPUDIRECTTCPX_TX_BINDINGS",
        ),
        why="TCPX comes without a script that sets them: give Google's lines for the release that "
        "is installed by --env-setup",
        source="https://github.com/GoogleCloudPlatform/cluster-toolkit",
        transports=("tcpx",),
    ),
)


RULES: tuple[Rule, ...] = (*DEVICE_RULES, *FABRIC_RULES, *DEBUGGING_RULES)
"""Every variable that a job can get, in the order in which they are written."""


def environment(*, plan: Plan, job: Job) -> tuple[Variable, ...]:
    """Variables for every rank of the plan, in the order they are written."""
    return tuple(
        Variable(
            name=rule.name,
            value=setting.value,
            reason=setting.reason,
            versions=rule.versions,
            source=rule.source,
            kind=rule.kind,
            expands=setting.expands,
            on_node=setting.on_node,
        )
        for rule in RULES
        if isinstance(setting := rule.decide(plan, job), ChosenValue)
    )


def left_unset(*, plan: Plan, job: Job) -> tuple[Unset, ...]:
    """What the plan leaves unset on purpose: rules without evidence, those that share a reason
    together, then what is never set."""
    names: dict[str, list[Rule]] = {}
    for rule in RULES:
        why = rule.decide(plan, job)
        if isinstance(why, str):
            names.setdefault(why, []).append(rule)
    without = [
        Unset(names=tuple(rule.name for rule in rules), why=why, source=rules[0].source)
        for why, rules in names.items()
    ]
    return (*without, *(unset for unset in NEVER_SET if unset.is_about(plan.cluster)))
