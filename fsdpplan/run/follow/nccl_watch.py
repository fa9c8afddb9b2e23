"""Look at what NCCL does while a job starts, and say when it does not do what was planned.

NCCL writes one file a process into the run's folder: the variables reach all ranks as
FSDPPLAN_METRICS does, since bash inherits them, `sbatch` gets SBATCH_EXPORT=ALL, and the script's
own `srun` says --export=ALL. A script for several nodes sets the same ones itself. Where the user
has set NCCL's log himself nothing is set, and what comes into the job's own log is read.

Whether what NCCL did is what the plan counts on, and what to do where it is not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from fsdpplan.emit.nccl.adapters import adapter_words, has_sockets_only, levels_between
from fsdpplan.run.follow.tail import FileTail
from fsdpplan.spec.cluster import Vendor
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_log import NcclLogReader
from fsdpplan.topology.read.nccl_report import Connection, NcclReport

PEER_MEMORY: dict[Vendor, str] = {
    "nvidia": "look for nvidia_peermem in lsmod, or for DMA-BUF (open kernel driver, Linux >= "
    "5.12)",
    "amd": "look for amdkfd under /sys/kernel/mm/memory_peers, or for a kernel with DMA-BUF",
}
"""Where to look for what lets adapters read device memory. Source: RCCL and NCCL, net_ib.cc."""
PLUGINS = {
    "efa": "aws-ofi-nccl",
    "fastrak": "Google's GPUDirect-TCPXO",
    "tcpxo": "Google's GPUDirect-TCPXO",
    "gib": "Google's gIB",
}
"""Networks that NCCL reaches by a plugin only."""


def socket_sentence(report: NcclReport, *, plan: Plan, folder: Path) -> str | None:
    """What is wrong where sockets carry traffic between nodes that have RDMA adapters.

    None where they do not, and where the nodes have none: then sockets are all there is.
    """
    sockets = report.sockets_between
    evidence = _evidence(report, plan) if sockets else None
    if evidence is None:
        return None
    where = f" ({', '.join(report.interfaces)})" if report.interfaces else ""
    return (
        f"NCCL carries traffic between {_pair(sockets)} over sockets{where} although {evidence}: "
        f"{_cause(report, plan, folder)}"
    )


def host_memory_warning(report: NcclReport, *, plan: Plan) -> str | None:
    """What is wrong where adapters cannot reach device memory although the plan counts on it.

    Only receivers are looked at: with some PCIe topologies NCCL sends through host memory by its
    own choice (NVIDIA/nccl issue 392).
    """
    if not plan.cluster.gpudirect:
        return None
    receivers = [
        one
        for one in report.between
        if one.end == "receive" and one.network is not None and not report.over_sockets(one)
    ]
    without = [one for one in receivers if not one.gpudirect]
    if not without:
        return None
    return (
        f"{len(without)} of {len(receivers)} connections that NCCL receives by from other nodes "
        f"pass through host memory (between {_pair(tuple(without))}), although the plan counts on "
        f"GPUDirect: {PEER_MEMORY[plan.cluster.device.vendor]}"
    )


def _evidence(report: NcclReport, plan: Plan) -> str | None:
    """Who says that there are RDMA adapters."""
    if has_sockets_only(plan):
        return None
    planned, network = adapter_words(plan), plan.cluster.network
    if planned is not None:
        return planned if network is None else f"{planned} ({network.evidence})"
    verbs = {(one.host, one.name) for one in report.adapters if one.link_layer is not None}
    if verbs:
        host = min(verbs)[0]
        names = sorted(name for place, name in verbs if place == host)
        return f"NCCL itself found {', '.join(names)} on {host}"
    return "libfabric chose EFA on some ranks" if "efa" in report.providers else None


def _cause(report: NcclReport, plan: Plan, folder: Path) -> str:
    """The likeliest reason and what to do about it, from what NCCL said."""
    for value in report.values_of("NCCL_IB_DISABLE"):
        if value != "0":
            return f"NCCL_IB_DISABLE={value} is set, so unset it"
    if "Socket" in report.values_of("NCCL_NET"):
        return "NCCL_NET=Socket is set, so unset it"
    if report.complains("no_verbs"):
        return "libibverbs is not installed where the ranks run, so install rdma-core there"
    plugin = PLUGINS.get(_transport(plan))
    if plugin is not None and report.complains("no_plugin"):
        return f"the plugin of NCCL ({plugin}, libnccl-net.so) was not found on LD_LIBRARY_PATH"
    if report.providers and "efa" not in report.providers:
        providers = ", ".join(report.providers)
        return f"libfabric chose {providers}, so set FI_PROVIDER=efa and look at fi_info -p efa"
    if report.complains("no_device"):
        for value in report.values_of("NCCL_IB_HCA"):
            return f"NCCL_IB_HCA={value} matches no adapter that is up, so correct or unset it"
        return (
            "NCCL found no adapter that is up, so look at ibv_devinfo on the nodes and whether "
            "the container has /dev/infiniband"
        )
    return f"look at Using network and NET/ in {folder}"


def _transport(plan: Plan) -> str:
    network = plan.cluster.network
    if network is not None:
        return network.transport
    levels = levels_between(plan)
    return levels[0].name if levels else ""


def _pair(connections: tuple[Connection, ...]) -> str:
    """Two hosts, such as `n01 and n02`."""
    pairs = {
        tuple(sorted((one.host, one.peer_host))) for one in connections if one.peer_host is not None
    }
    if not pairs:
        return f"{connections[0].host} and other nodes"
    return " and ".join(min(pairs))


ALLOWS_SOCKETS = "FSDPPLAN_ALLOW_SOCKETS"
"""Variable by which the job itself does not end over sockets."""
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET"
"""Adapters, communicators and the transport of each channel, the variables that NCCL took, and
whether adapters reach device memory. Unknown names (BOOTSTRAP before 2.23) are passed over."""
LOOK_SECONDS = 1.0
"""Between looks at the files: there may be hundreds, on a shared file system."""
STEPS_WATCHED = 2
"""Communicators connect when they are first used; by the second step all have been."""

_SET_BY_USER = re.compile(r"(?<!\w)NCCL_DEBUG(?:_FILE|_SUBSYS)?=")


class NcclWatch:
    """Follows NCCL's files of one run."""

    def __init__(self, *, folder: Path, plan: Plan, allow_sockets: bool = False) -> None:
        self._folder = folder
        self._plan = plan
        self._allow_sockets = allow_sockets
        self._reader = NcclLogReader()
        self._tails: dict[Path, FileTail] = {}
        self._next_look = 0.0
        self._news = self._spoken = self._settled = False
        self.verdict: str | None = None
        """Why the job has to end; None as long as nothing speaks against it."""
        self.warnings: tuple[str, ...] = ()
        """What is not as planned, but no reason to end the job."""

    @property
    def report(self) -> NcclReport | None:
        """What NCCL has said so far; None: nothing."""
        return self._reader.report() if self._spoken else None

    def feed(self, line: str) -> None:
        """A line of the job's own log."""
        self._news = self._reader.feed(line) or self._news

    def poll(self, *, steps: int, ended: bool = False) -> None:
        """Look at what is new, now and then; `steps`: how many the job has reported."""
        if not ended and (self._settled or time.monotonic() < self._next_look):
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._settled = steps >= STEPS_WATCHED
        for path in self._folder.glob("nccl.*.log"):
            tail = self._tails.setdefault(path, FileTail(path, from_start=True))
            # An unfinished last line may say less than NCCL meant: it is left out.
            for line in tail.poll():
                self.feed(line)
        self._spoken = self._spoken or self._news
        if self.verdict is None and (self._news or self._settled or ended):
            self._judge(ended=ended, connected=steps > 0 or ended)
        self._news = False

    def _judge(self, *, ended: bool, connected: bool) -> None:
        report = self.report
        if report is None:
            return
        sockets = socket_sentence(report, plan=self._plan, folder=self._folder)
        if sockets is not None and not self._allow_sockets and not ended:
            self.verdict = f"{sockets}; type fsdpplan run --allow-sockets to run it anyway"
            return
        slow = host_memory_warning(report, plan=self._plan) if connected else None
        self.warnings = tuple(text for text in (sockets, slow) if text is not None)


def uses_nccl(plan: Plan) -> bool:
    """Whether there is anything for NCCL to carry."""
    return plan.cluster.device.kind == "cuda" and plan.cluster.gpus > 1


def nccl_variables(
    *, script: str, environment: Mapping[str, str], folder: Path
) -> Mapping[str, str]:
    """What makes NCCL write its log into `folder`; nothing where the user has a log of his own."""
    lines = (line for line in script.splitlines() if not line.startswith("#"))
    own = any(name.startswith("NCCL_DEBUG") for name in environment)
    if own or any(map(_SET_BY_USER.search, lines)):
        return {}
    # %h and %p are the host and the process; a percent sign of the path is doubled.
    pattern = str(folder).replace("%", "%%") + "/nccl.%h.%p.log"
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": SUBSYSTEMS,
        "NCCL_DEBUG_FILE": pattern,
    }
