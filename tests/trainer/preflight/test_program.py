"""The preflight on real ranks: what it says, whom it names, and that it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.preflight.program import preflight
from tests.trainer import jobs, plans, preflight_ranks
from tests.trainer.preflight_ranks import SCENES

TIMEOUT_SECONDS = 280
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all scenes were played."""
    folder = tmp_path_factory.mktemp("scenes")
    program = Path(preflight_ranks.__file__)
    subprocess.run(
        [sys.executable, str(program), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    return folder


def said(scenes: Path, name: str) -> str:
    return (scenes / name / "said").read_text(encoding="utf-8")


def result(scenes: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scenes / name / "preflight.json").read_text())
    return found


def bad_nodes(scenes: Path, name: str) -> dict[str, str]:
    path = scenes / name / "bad-nodes"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(line.split("\t") for line in lines)


def test_good_nodes_pass_in_one_line(scenes: Path) -> None:
    assert "preflight: 6 ranks on 3 nodes in " in said(scenes, "good")
    assert "error" not in said(scenes, "good")
    found = result(scenes, "good")
    assert found["passed"]
    assert not found["bad_nodes"]
    assert not bad_nodes(scenes, "good")
    assert found["nodes"] == ["node1", "node2", "node3"]
    assert {axis: of["ranks"] for axis, of in found["axes"].items()} == {
        "dp_replicate": 3,
        "dp_shard": 2,
    }
    assert all(of["ok"] and of["seconds"] > 0 for of in found["axes"].values())
    assert [level["where"] for level in found["levels"]] == ["inside", "between"]
    assert all(level["measured_bytes_per_second"] > 0 for level in found["levels"])
    assert found["versions"]["torch"]


@pytest.mark.parametrize(
    ("scene", "node", "words"),
    [
        ("stopped", "node2", "rank 3 on node2 did not answer in the all-reduce over dp_shard"),
        ("late", "node3", "rank 2 on node3 did not come to the all-reduce over dp_shard"),
        ("dead", "node2", "rank 1 on node2 did not answer in the all-reduce over dp_shard"),
        ("absent", "node3", "rank 2 on node3 did not answer in the start of the ranks"),
        ("slow", "node3", "node3: 1e-09 GB/s with each other node tried"),
    ],
)
def test_a_bad_node_is_named_with_its_axis_and_left_out(
    scenes: Path, scene: str, node: str, words: str
) -> None:
    assert words in result(scenes, scene)["problem"]
    errors = [line for line in said(scenes, scene).splitlines() if line.startswith("error: ")]
    assert len([line for line in errors if words in line]) >= 1
    assert list(bad_nodes(scenes, scene)) == [node]
    assert list(result(scenes, scene)["bad_nodes"]) == [node]
    assert not result(scenes, scene)["passed"]


def test_only_good_nodes_go_on(scenes: Path) -> None:
    codes = {name: int((scenes / name / "exit_code").read_text()) for name in SCENES}
    good = ("good", "tried", "plain")
    assert codes == {name: 0 if name in good else 5 for name in SCENES}


def test_training_goes_on_in_the_groups_that_were_tried(scenes: Path) -> None:
    assert "preflight: 2 ranks on 1 node in " in said(scenes, "tried")
    assert result(scenes, "tried")["passed"]
    assert "numbers right on dp_shard 2, " in said(scenes, "tried")
    assert result(scenes, "tried")["numbers"]["seconds"] > 0
    assert "preflight" not in said(scenes, "plain")
    assert jobs.losses(scenes / "tried") == jobs.losses(scenes / "plain")


def test_one_rank_has_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert preflight(parse_plan(plans.plan_text()), folder=None, seconds=1) is None


def test_a_program_of_ones_own_has_it_by_itself(tmp_path: Path) -> None:
    finished = subprocess.run(
        [*TORCHRUN, "-m", "fsdpplan.trainer.preflight", f"--run-folder={tmp_path}"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FSDPPLAN_PLAN": plans.plan_text(dp_shard=2),
            "SLURMD_NODENAME": "n07",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "preflight: 2 ranks on 1 node in " in finished.stderr
    assert json.loads((tmp_path / "preflight.json").read_text())["nodes"] == ["n07"]
