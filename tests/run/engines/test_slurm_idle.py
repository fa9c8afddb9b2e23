"""What Slurm has idle, read from what a real one (22.05.8) printed, and from variants of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.files.profiles.search import profiles_of_gres
from fsdpplan.run.engines.slurm_idle import (
    Idle,
    Node,
    Partition,
    idle_nodes,
    parse_nodes,
    parse_partitions,
    usable,
)

RECORDED = Path(__file__).parents[2] / "recordings" / "slurm"
NODES = (RECORDED / "show_node.txt").read_text()
PARTITIONS = (RECORDED / "show_partition.txt").read_text()


def test_only_nodes_on_which_a_job_starts_at_once_are_idle() -> None:
    """node1 is allocated, node2 in part, node4 is drained."""
    found = parse_nodes(NODES)
    assert [(node.name, node.is_idle) for node in found] == [
        *(("node1", False), ("node2", False), ("node3", True), ("node4", False))
    ]
    assert {(node.gpu_type, node.gpus, node.partitions) for node in found} == {
        ("h100", 8, ("main", "urgent"))
    }


@pytest.mark.parametrize(
    ("state", "is_idle"),
    [
        *(("IDLE", True), ("IDLE+CLOUD", True), ("IDLE+PLANNED", False), ("IDLE+RESERVED", False)),
        *(("IDLE+CLOUD+POWERED_DOWN", False), ("IDLE+NOT_RESPONDING", False), ("IDLE*", False)),
        *(("DOWN", False), ("MIXED", False), ("", False)),
    ],
)
def test_states(state: str, is_idle: bool) -> None:
    (node,) = parse_nodes(NODES.splitlines()[2].replace("State=IDLE", f"State={state}"))
    assert node.is_idle is is_idle


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h100:8(S:0-1)", ("h100", 8)),
        ("gpu:8", (None, 8)),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),nvme:2", ("nvidia_h100_80gb_hbm3", 8)),
        ("gpu:a100:4(S:0,2),gpu:a30:2", ("a100", 4)),
        ("(null)", (None, 0)),
        ("shard:80", (None, 0)),
    ],
)
def test_gres(gres: str, found: tuple[str | None, int]) -> None:
    (node,) = parse_nodes(NODES.splitlines()[2].replace("gpu:h100:8", gres))
    assert (node.gpu_type, node.gpus) == found


def test_what_a_reason_says_is_no_field() -> None:
    text = NODES.splitlines()[3] + " State=IDLE Gres=gpu:b200:64 Partitions=other"
    (node,) = parse_nodes(text)
    assert (node.is_idle, node.gpu_type, node.partitions) == (False, "h100", ("main", "urgent"))


def test_limits_of_a_partition() -> None:
    main, urgent = parse_partitions(PARTITIONS)
    assert (main.name, main.is_default, main.max_nodes, main.max_seconds) == (
        *("main", True, None, None),
    )
    assert not urgent.is_default
    limited = PARTITIONS.replace("MaxNodes=UNLIMITED", "MaxNodes=2").replace(
        "MaxTime=UNLIMITED", "MaxTime=1-12:00:30"
    )
    assert [(one.max_nodes, one.max_seconds) for one in parse_partitions(limited)] == [
        (2, 129630),
        (2, 129630),
    ]


MAIN = Partition(name="main", is_default=True, is_up=True, max_nodes=None, max_seconds=None)


def nodes(number: int, gpu_type: str | None, gpus: int) -> list[Node]:
    one = Node(name="n", partitions=("main",), is_idle=True, gpu_type=gpu_type, gpus=gpus)
    return [replace(one, name=f"n{index}") for index in range(number)]


def test_of_several_kinds_the_one_with_most_gpus_for_a_job_is_taken() -> None:
    mixed = [*nodes(6, "a100", 4), *nodes(2, "h100", 8)]
    many = usable(MAIN, mixed, waiting=0)
    assert (many.gpu_type, many.nodes, many.idle_nodes) == ("a100", 6, 6)
    few = usable(replace(MAIN, max_nodes=2), mixed, waiting=3)
    assert few == Idle(
        partition=replace(MAIN, max_nodes=2),
        nodes=2,
        idle_nodes=2,
        gpu_type="h100",
        gpus_per_node=8,
        waiting=3,
    )


@pytest.mark.parametrize(
    ("partition", "found", "said"),
    [
        (replace(MAIN, is_up=False), nodes(1, "h100", 8), "takes no jobs now"),
        (MAIN, nodes(1, None, 0), "has GPUs that Slurm knows of"),
        (replace(MAIN, name="other"), nodes(1, "h100", 8), "no node of partition other"),
        (MAIN, [replace(nodes(1, "h100", 8)[0], is_idle=False)], "none of the 1 nodes"),
    ],
)
def test_nothing_to_plan_for_is_said(partition: Partition, found: list[Node], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        usable(partition, found, waiting=1)


def test_without_slurm_it_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match=r"no Slurm answers here .*not found.*go to a login node"):
        idle_nodes(None)


def test_a_slurm_that_does_not_answer_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("fsdpplan.run.engines.slurm_idle.ANSWER_SECONDS", 0.2)
    with pytest.raises(ProbeError, match=r"no answer within 0\.2 seconds"):
        idle_nodes(None)


@pytest.mark.parametrize(
    ("gpu_type", "gpus", "device", "node"),
    [
        ("h100", 8, "h100-sxm-80g", "dgx-h100"),
        ("nvidia_h100_80gb_hbm3", 8, "h100-sxm-80g", "dgx-h100"),
        ("H100", 4, "h100-sxm-80g", "dgx-h100"),
        ("a100-sxm4-80gb", 8, "a100-sxm-80g", "dgx-a100-80g-hdr"),
        ("rtx4090", 8, "rtx-4090-24g", "pcie-8xrtx4090"),
        ("mi300x", 8, "mi300x-192g", "azure-nd-mi300x-v5"),
    ],
)
def test_a_type_of_gres_is_a_device(gpu_type: str, gpus: int, device: str, node: str) -> None:
    found = profiles_of_gres(gpu_type, gpus_per_node=gpus)
    assert {name: places[0] for name, places in found.items()} == {device: node}


def test_a_type_of_several_devices_leaves_it_open() -> None:
    assert len(profiles_of_gres("a100", gpus_per_node=4)) > 1
    assert profiles_of_gres("1g.10gb", gpus_per_node=8) == {}
