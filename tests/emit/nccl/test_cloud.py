from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.cloud import GIB_SCRIPT, TCPXO_SCRIPT, cloud_scripts, gap_lines, gap_of
from fsdpplan.spec.nodes import Network
from tests.emit.bench import emit, shellcheck
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


TCPX = replace(GIB, transport="tcpx", env_profiles=())


def test_what_tcpx_needs_beside_the_script_is_said_in_its_head() -> None:
    plan = on(TCPX, PLAN)
    gap = gap_of(plan, Job())
    assert gap is not None
    assert gap.what.startswith("not runnable as emitted")
    for word in ("RxDM", "/run/tcpx", "UNIX_CLIENT_PREFIX", "/var/lib/tcpx/lib64", "_RX_BINDINGS"):
        assert word in gap.sentences
    script = emit(plan)
    head = " ".join(script.partition("#SBATCH")[0].replace("\n#", "").split())
    assert "Not runnable as emitted: the nodes are joined by GPUDirect-TCPX" in head
    assert all(need in head for need in gap.needs)
    assert shellcheck(script) == ""


@pytest.mark.parametrize(
    "job",
    [
        Job(env_setup=("source /opt/apps/TCPX-env.sh",)),
        Job(env=(("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", "/run/tcpx"),)),
    ],
)
def test_a_job_that_brings_tcpx_itself_lacks_nothing(job: Job) -> None:
    assert gap_of(on(TCPX, PLAN), job) is None
    assert gap_lines(on(TCPX, PLAN), job) == []


@pytest.mark.parametrize("network", [INFINIBAND, EFA, GIB, replace(TCPX, transport="tcpxo"), None])
def test_other_networks_lack_nothing_that_is_known(network: Network | None) -> None:
    assert gap_of(on(network, PLAN), Job()) is None


def test_one_node_lacks_nothing_of_a_network() -> None:
    assert gap_of(on(TCPX, make_plan("cuda", per_node=8)), Job()) is None


def test_one_node_needs_none() -> None:
    assert cloud_scripts(on(GIB, make_plan("cuda", per_node=8))) == ()
