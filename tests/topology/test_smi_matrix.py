"""Matrices of `nvidia-smi topo`: read whole, or not at all."""

from __future__ import annotations

import pytest

from fsdpplan.topology.smi_matrix import read_matrix

MATRIX = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tPIX\t0-15,32-47\t0\t\tN/A
GPU1\tNV4\t X \tSYS\t16-31,48-63\t1\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
SPACED = MATRIX.replace("\t\t", "    ").replace("\t", "    ")
UNDERLINED = MATRIX.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1", 1).replace("ID\n", "ID\x1b[0m\n")


@pytest.mark.parametrize("text", [MATRIX, SPACED, UNDERLINED], ids=["tabs", "spaces", "underlined"])
def test_a_matrix_says_what_is_between_gpus_and_where_they_stand(text: str) -> None:
    matrix = read_matrix(text)
    assert matrix.cells == {(0, 0): "X", (0, 1): "NV4", (1, 0): "NV4", (1, 1): "X"}
    assert matrix.cpu_affinity == {0: "0-15,32-47", 1: "16-31,48-63"}
    assert matrix.numa_node == {0: 0, 1: 1}


def test_a_matrix_of_p2p_has_no_affinities() -> None:
    matrix = read_matrix(" \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tCNS\tX\t\n\nLegend:\n")
    assert matrix.cells[0, 1] == "CNS"
    assert matrix.cpu_affinity == matrix.numa_node == {}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("\tGPU0\tGPU1\tNIC0", "\tGPU0\tNIC0"),
        ("\tGPU0\tGPU1\tNIC0", "\tGPU1\tGPU0\tNIC0"),
        ("GPU1\tNV4", "GPU1\tNV2"),
        ("GPU1\tNV4", "GPU1\t"),
        ("GPU1\tNV4", "GPU1\tfast"),
        ("GPU1\tNV4", "GPU0\tNV4"),
        ("GPU0\t X \tNV4", "GPU0\tNV4\t X "),
        ("GPU1\tNV4\t X ", "GPU1\tNV4\tNV4"),
        (MATRIX, MATRIX.partition("GPU1\tNV4")[0]),
        (MATRIX, ""),
        (MATRIX, "NVIDIA-SMI has failed"),
    ],
)
def test_a_matrix_that_is_not_whole_says_nothing(was: str, now: str) -> None:
    assert was in MATRIX
    assert read_matrix(MATRIX.replace(was, now, 1)).cells == {}


def test_a_row_without_all_affinities_has_none() -> None:
    matrix = read_matrix(MATRIX.replace("0-15,32-47\t0\t\tN/A", "0\t\tN/A"))
    assert matrix.cpu_affinity == {1: "16-31,48-63"}
    assert matrix.numa_node == {1: 1}
    assert matrix.cells[0, 1] == "NV4"


def test_several_near_nodes_are_none() -> None:
    matrix = read_matrix(MATRIX.replace("\t1\t\tN/A", "\t0-1\t\tN/A"))
    assert matrix.numa_node == {0: 0}
