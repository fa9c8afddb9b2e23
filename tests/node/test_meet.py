from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.emit.slurm.node_check import node_check
from fsdpplan.node.meet import Report, listening, majority, own_addresses, verdict
from tests.ports import free_port

PROGRAM = node_check(several=True)
ALIKE = {"python": "3.11", "torch": "2.13.0", "nccl": "2.29.3", "driver": "570.1"}
NODES = ["n1", "n2", "n3"]


def good(**versions: str) -> Report:
    return Report("", {**ALIKE, **versions})


def test_nodes_that_are_alike_may_start() -> None:
    assert verdict("n1", NODES, dict.fromkeys(NODES, good())) == ({}, [], True)


def test_a_node_that_did_not_come_is_named() -> None:
    blame, remarks, _ = verdict("n1", NODES, {"n1": good(), "n3": good()})
    assert set(blame) == {"n2"}
    what = "n2: did not report to n1, the first host, within 30 s"
    assert f"{what}: see what it says itself, or leave it out" in remarks


def test_a_head_that_nobody_reaches_is_to_blame_itself() -> None:
    blame, _, _ = verdict("n1", NODES, {"n1": good()})
    assert set(blame) == {"n1"}
    # of two nodes, it is the other one: one cannot tell
    assert set(verdict("n1", NODES[:2], {"n1": good()})[0]) == {"n2"}


def test_what_most_nodes_cannot_do_is_no_fault_of_a_node() -> None:
    report = Report("train.py cannot be read here", ALIKE)
    assert verdict("n1", NODES, dict.fromkeys(NODES, report))[0] == {}
    assert verdict("n1", NODES, {"n1": good(), "n2": report, "n3": report})[0] == {}
    one = verdict("n1", NODES, {"n1": good(), "n2": report, "n3": good()})[0]
    assert one == {"n2": report.problem}


@pytest.mark.parametrize("name", ["torch", "nccl", "python"])
def test_another_version_than_most_have_is_named(name: str) -> None:
    reports = {"n1": good(), "n2": good(), "n3": good(**{name: "9"})}
    blame, remarks, alike = verdict("n1", NODES, reports)
    assert blame == {"n3": f"its {name} is not {ALIKE[name]}"}
    assert remarks == [
        f"{name} is not the same on all nodes: n3 has 9; most have {ALIKE[name]}; install the "
        "same, or name one by --python"
    ]
    assert not alike


def test_half_against_half_has_nobody_to_blame_and_does_not_start() -> None:
    blame, remarks, alike = verdict("n1", NODES[:2], {"n1": good(), "n2": good(torch="2.12.0")})
    assert (blame, alike) == ({}, False)
    assert "n1 has 2.13.0, n2 has 2.12.0" in remarks[0]


def test_another_driver_is_told_about_and_may_start() -> None:
    blame, remarks, alike = verdict("n1", NODES[:2], {"n1": good(), "n2": good(driver="5")})
    assert (blame, alike) == ({}, True)
    assert "driver is not the same" in remarks[0]


def test_a_majority_is_more_than_half() -> None:
    assert majority(["a", "a", "b"]) == "a"
    assert majority(["a", "b"]) == ""


def test_the_head_listens_at_one_address_only() -> None:
    with listening("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_head_whose_name_is_itself_alone_takes_the_address_towards_the_others() -> None:
    assert own_addresses("localhost", ["localhost", "127.0.0.1"]) == ["127.0.0.1"]


def together(
    tmp_path: Path, *nodes: str, seconds: float = 4.0
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What the check of each node says, all of them on this host."""
    environment = {
        **os.environ,
        "FSDPPLAN_PORT": str(free_port()),
        "FSDPPLAN_RUN": "7.0.1",
        "FSDPPLAN_JOIN_SECONDS": str(seconds),
        "FSDPPLAN_RUN_FOLDER": str(tmp_path / "run"),
    }
    # On one host, every name but the head's would be the node itself.
    program = PROGRAM.replace("if here != head and all(map(is_loopback, found)):", "if False:")
    started = {
        node: subprocess.Popen(
            [sys.executable, "-c", program, node, "", "0", "localhost", "localhost,127.0.0.1"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in nodes
    }
    said = {}
    for node, process in started.items():
        out, err = process.communicate(timeout=120)
        said[node] = subprocess.CompletedProcess([], process.returncode, out, err)
    return said


def test_two_nodes_meet_at_the_head_and_start(tmp_path: Path) -> None:
    said = together(tmp_path, "localhost", "127.0.0.1", seconds=60.0)
    assert {node: done.returncode for node, done in said.items()} == {
        "localhost": 0,
        "127.0.0.1": 0,
    }, said
    assert said["127.0.0.1"].stdout == "fsdpplan: 127.0.0.1 is ready\n"
    assert not (tmp_path / "run").exists()


def test_a_node_that_never_comes_is_named_in_words_and_in_the_file(tmp_path: Path) -> None:
    (head,) = together(tmp_path, "localhost").values()
    assert head.returncode == 5
    assert "127.0.0.1: did not report to localhost" in head.stderr
    assert (tmp_path / "run/bad-nodes").read_text().startswith("127.0.0.1\tdid not report")


def test_a_head_that_does_not_listen_is_named_with_its_address(tmp_path: Path) -> None:
    (node,) = together(tmp_path, "127.0.0.1").values()
    assert node.returncode == 5
    assert "cannot reach localhost, the first host, at 127.0.0.1" in node.stderr
