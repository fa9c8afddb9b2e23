"""What the trainer reads in NCCL's log is what `fsdpplan run` reads there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.nccl.adapters import NOT_ADAPTERS, RDMA
from fsdpplan.run.follow import nccl_watch
from fsdpplan.topology.read.nccl_report import (
    LIBFABRIC_NETWORKS,
    SOCKET_NETWORKS,
    SOCKET_PROVIDERS,
)
from fsdpplan.trainer.config import ClusterConfig, LevelConfig, NetworkConfig, parse_plan
from fsdpplan.trainer.preflight import nccl as preflight_nccl
from fsdpplan.trainer.preflight.nccl import (
    judge_transports,
    planned_adapters,
    uses_sockets,
    write_log,
)
from tests.topology.nccl_logs import read_nccl_log
from tests.trainer.plans import plan_document

LOGS = sorted((Path(__file__).parents[2] / "recordings/nccl").glob("*.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_it_finds_sockets_where_run_does(log: Path) -> None:
    lines = log.read_text(encoding="utf-8").splitlines()
    assert uses_sockets(lines) == bool(read_nccl_log(lines).sockets_between)


def test_some_recordings_have_sockets_and_some_have_not() -> None:
    assert {uses_sockets(log.read_text(encoding="utf-8").splitlines()) for log in LOGS} == {
        True,
        False,
    }


def test_both_mean_the_same_names() -> None:
    assert preflight_nccl.RDMA == RDMA
    assert preflight_nccl.NOT_ADAPTERS == NOT_ADAPTERS
    assert preflight_nccl.SUBSYSTEMS == nccl_watch.SUBSYSTEMS
    assert preflight_nccl.ALLOWS_SOCKETS == nccl_watch.ALLOWS_SOCKETS
    assert preflight_nccl.SOCKET_PROVIDERS == SOCKET_PROVIDERS
    assert preflight_nccl.SOCKET_NETWORKS == SOCKET_NETWORKS
    assert preflight_nccl.LIBFABRIC_NETWORKS == LIBFABRIC_NETWORKS


def cluster(*, level: str, gpudirect: bool, transport: str | None = None) -> ClusterConfig:
    """Two nodes of one GPU."""
    found = parse_plan(json.dumps(plan_document(dp_shard=2))).cluster
    joins = LevelConfig(
        name=level,
        domain_gpus=2,
        ports=1,
        port_bandwidth_bytes_per_second=1e9,
        bandwidth_fraction=1.0,
        half_bandwidth_bytes=0.0,
        gpudirect=gpudirect,
    )
    network = None if transport is None else NetworkConfig(transport=transport)
    return replace(found, gpus_per_node=1, levels=(joins,), network=network)


@pytest.mark.parametrize(
    ("of", "adapters"),
    [
        ({"level": "infiniband", "gpudirect": False}, "infiniband"),
        ({"level": "fabric", "gpudirect": True}, "fabric"),
        ({"level": "fabric", "gpudirect": False}, None),
        ({"level": "nvlink", "gpudirect": True}, None),
        ({"level": "ethernet", "gpudirect": False}, None),
        ({"level": "infiniband", "gpudirect": True, "transport": "ethernet"}, None),
        ({"level": "ethernet", "gpudirect": False, "transport": "roce"}, "roce"),
    ],
)
def test_what_the_plan_counts_on_between_nodes(of: dict[str, Any], adapters: str | None) -> None:
    assert planned_adapters(cluster(**of)) == adapters


def test_sockets_in_place_of_adapters_end_the_job_and_blame_no_node() -> None:
    found = judge_transports(["n1", "n2"], "infiniband")
    assert found.problem.startswith("NCCL on n1, n2 talks to other nodes over sockets although")
    assert not found.bad
    assert not judge_transports([], "infiniband").problem
    assert not judge_transports(["n1"], None).problem


def test_a_log_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    assert write_log(tmp_path, environment) is None
    assert environment == {"NCCL_DEBUG": "WARN"}
    assert write_log(None, {}) is None


def test_what_the_job_script_has_set_is_read(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    path = write_log(tmp_path, environment)
    assert write_log(tmp_path, environment) == path
    # where run judges, or sockets are allowed, nothing is judged here
    assert write_log(tmp_path, {**environment, preflight_nccl.ALLOWS_SOCKETS: "1"}) is None


def test_the_log_goes_where_run_looks_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "100%h"
    environment: dict[str, str] = {}
    path = write_log(folder, environment)
    assert path is not None
    assert path.parent == folder
    assert path.match("nccl.*.log")
    assert environment == dict(nccl_watch.nccl_variables(script="", environment={}, folder=folder))
