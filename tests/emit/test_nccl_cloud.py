from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.emit.nccl_cloud import GIB_SCRIPT, TCPXO_SCRIPT, cloud_scripts
from fsdpplan.spec.network import Network
from tests.emit.networks import EFA, GIB, INFINIBAND, on
from tests.emit.plans import make_plan

PLAN = make_plan("cuda", nodes=2, per_node=8)


@pytest.mark.parametrize(
    ("network", "path", "libraries", "found"),
    [
        (GIB, GIB_SCRIPT, "/usr/local/gib/lib64", True),
        (replace(GIB, env_profiles=()), GIB_SCRIPT, "/usr/local/gib/lib64", False),
        (
            replace(GIB, transport="tcpxo", env_profiles=()),
            TCPXO_SCRIPT,
            "/var/lib/tcpxo/lib64",
            False,
        ),
        (replace(GIB, env_profiles=("/opt/x/net.sh",)), "/opt/x/net.sh", None, True),
    ],
)
def test_a_cloud_with_a_script_of_its_own_runs_it(
    network: Network, path: str, libraries: str | None, found: bool
) -> None:
    (script,) = cloud_scripts(on(network, PLAN))
    assert (script.path, script.libraries, script.found) == (path, libraries, found)
    assert script.source


@pytest.mark.parametrize("network", [INFINIBAND, EFA, replace(GIB, transport="tcpx"), None])
def test_others_have_none(network: Network | None) -> None:
    bare = network and replace(network, env_profiles=())
    assert cloud_scripts(on(bare, PLAN)) == ()


def test_one_node_needs_none() -> None:
    assert cloud_scripts(on(GIB, make_plan("cuda", per_node=8))) == ()
