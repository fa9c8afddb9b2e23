"""What a cloud's own network needs: the cloud's own script, never a list of ours.

Google's stacks come with a script that sets NCCL's variables for the release of the stack that is
installed; each node runs it for itself. AWS's plugin sets what it needs when NCCL loads it. TCPX
has no such script, and what a job needs in its place is said wherever the job is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.rules import network_between
from fsdpplan.emit.safe_text import paragraph
from fsdpplan.spec.nodes import Network, Transport
from fsdpplan.spec.plan import Plan

GIB_SCRIPT = "/usr/local/gib/scripts/set_nccl_env.sh"
GIB_LIBRARIES = "/usr/local/gib/lib64"
TCPXO_SCRIPT_NAME = "nccl-env-profile.sh"
TCPXO_SCRIPT = f"/var/lib/tcpxo/lib64/{TCPXO_SCRIPT_NAME}"

USUAL_SCRIPTS: dict[Transport, str] = {"gib": GIB_SCRIPT, "tcpxo": TCPXO_SCRIPT}
"""Where Google's images put them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudScript:
    """A script of the cloud that each node runs before it starts its ranks."""

    path: str
    libraries: str | None
    """Folder of the NCCL and the plugin that it belongs to; it goes first on LD_LIBRARY_PATH."""
    reason: str
    versions: str
    source: str
    found: bool
    """It was seen on the nodes: one without it is refused. Otherwise it is run where it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What a job lacks, as it is emitted, to use the network of its nodes."""

    what: str
    needs: tuple[str, ...]
    remedy: str
    source: str

    @property
    def sentences(self) -> str:
        """All of it, as it is said on stderr."""
        return f"{self.what}. Still needed: {'; '.join(self.needs)}. {self.remedy}"


TCPX = Gap(
    what="not runnable as emitted: the nodes are joined by GPUDirect-TCPX, which nothing here sets "
    "up, and without it NCCL has plain sockets at best",
    needs=(
        "on each node Google's receive datapath manager (RxDM, tcpgpudmarxd), for as long as the "
        "job runs",
        "the folder of its sockets (/run/tcpx-JOBID in Google's Slurm blueprint), seen by the "
        "ranks and named by NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX",
        "Google's plugin of NCCL (/var/lib/tcpx/lib64) first on LD_LIBRARY_PATH, mounted into a "
        "container as well",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME, _CTRL_DEV, _TX_BINDINGS and _RX_BINDINGS, as the "
        "release that is installed wants them",
    ),
    remedy="Google's run-nccl-tests.sh for a3-highgpu-8g has them: give its lines by --env-setup "
    "'source FILE', and what a container must see by --container-mount",
    source="https://github.com/GoogleCloudPlatform/cluster-toolkit",
)
"""Source: cluster-toolkit examples/machine-learning/a3-highgpu-8g (README: prolog, RxDM, what jobs
must set and mount)."""


def gap_of(plan: Plan, job: Job) -> Gap | None:
    """What the plan's job lacks to use its network; None where nothing is known to be missing, or
    where the job's own lines speak of it."""
    network = network_between(plan)
    if isinstance(network, str) or network.transport != "tcpx":
        return None
    names = (name for name, _ in job.env)
    given = any(name.startswith("NCCL_GPUDIRECTTCPX_") for name in names)
    return None if given or any("tcpx" in line.lower() for line in job.env_setup) else TCPX


def gap_lines(plan: Plan, job: Job) -> list[str]:
    """The same as comment lines of a script."""
    gap = gap_of(plan, job)
    if gap is None:
        return []
    needs = (line for need in gap.needs for line in paragraph(f"- {need}"))
    what = f"{gap.what[0].upper()}{gap.what[1:]}. Still needed:"
    return ["#", *paragraph(what), *needs, *paragraph(f"{gap.remedy}.")]


def cloud_scripts(plan: Plan) -> tuple[CloudScript, ...]:
    """The scripts of the plan's cloud, in the order in which they run.

    Source: docs.cloud.google.com/ai-hypercomputer/docs/nccl/test-vms (gIB); cluster-toolkit
    1047080375 examples/machine-learning/a3-megagpu-8g/nccl-tests/run-nccl-tests.sh (TCPXO).
    """
    network = network_between(plan)
    if isinstance(network, str):
        return ()
    return tuple(
        CloudScript(
            path=path,
            libraries=_libraries(path),
            reason=f"the nodes are joined by {network.transport}, whose variables belong to the "
            "release that is installed",
            versions="whatever is installed",
            source=_source(path),
            found=path in network.env_profiles,
        )
        for path in _paths(network)
    )


def _paths(network: Network) -> tuple[str, ...]:
    usual = USUAL_SCRIPTS.get(network.transport)
    return network.env_profiles or (() if usual is None else (usual,))


def _libraries(path: str) -> str | None:
    if path == GIB_SCRIPT:
        return GIB_LIBRARIES
    folder, _, name = path.rpartition("/")
    return folder if name == TCPXO_SCRIPT_NAME else None


def _source(path: str) -> str:
    if path == GIB_SCRIPT:
        return "https://docs.cloud.google.com/ai-hypercomputer/docs/nccl/test-vms"
    return "https://github.com/GoogleCloudPlatform/cluster-toolkit"
