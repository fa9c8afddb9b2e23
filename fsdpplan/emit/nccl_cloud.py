"""What a cloud's own network needs: the cloud's own script, never a list of ours.

Google's stacks come with a script that sets NCCL's variables for the release of the stack that is
installed; each node runs it for itself. AWS's plugin sets what it needs when NCCL loads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.nccl_rules import network_between
from fsdpplan.spec.network import Network, Transport
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
