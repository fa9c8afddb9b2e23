"""Calibrating several nodes runs with the variables of the network that their job would get."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.clusters import load_cluster
from fsdpplan.run.calibrate.variables import network_variables
from fsdpplan.spec.nodes import Network

CLUSTER = replace(
    load_cluster("dgx-h100", gpus=16).cluster,
    network=Network(
        transport="infiniband",
        evidence="found",
        hcas=("mlx5_0", "mlx5_3"),
        hcas_left_out=("mlx5_1",),
        socket_interface="bond0",
        socket_interfaces_left_out=("docker0",),
    ),
)


def test_what_a_job_would_get_of_the_network_is_set() -> None:
    assert network_variables(CLUSTER, exported={}) == {
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_3",
    }


def test_what_is_exported_stays() -> None:
    found = network_variables(CLUSTER, exported={"NCCL_IB_HCA": "mlx5_9"})
    assert "NCCL_IB_HCA" not in found


def test_one_node_or_an_unknown_network_sets_nothing() -> None:
    assert network_variables(load_cluster("dgx-h100", gpus=8).cluster, exported={}) == {}
    assert network_variables(replace(CLUSTER, network=None), exported={}) == {}
