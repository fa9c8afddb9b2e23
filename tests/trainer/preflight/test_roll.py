"""Ranks that differ from the others, or from the plan, are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.preflight.report import (
    append_bad_nodes,
    bad_nodes_words,
    planned_nodes,
    write_result,
)
from fsdpplan.trainer.preflight.roll import Presence, driver_version, judge_roll, versions
from tests.trainer.plans import plan_document

GIB = 2**30


def plan(**device: Any) -> PlanConfig:
    """For four nodes of two GPUs with 80 GiB."""
    document = plan_document(dp_shard=8, micro_batch=1)
    known = {"kind": "cuda", "name": "h100", "memory_bytes": 80 * GIB, "multiprocessors": 132}
    document["cluster"]["device"].update(known, **device)
    document["cluster"]["gpus_per_node"] = 2
    return parse_plan(json.dumps(document))


def roll() -> list[Presence]:
    """As planned."""
    return [
        Presence(
            rank=rank,
            host=f"n{rank // 2}",
            torch="2.13.0",
            cuda="13.0",
            nccl="2.29.3",
            driver="580.95.05",
            device="NVIDIA H100 80GB HBM3",
            device_id=f"GPU-{rank}",
            memory_bytes=80 * GIB,
            free_bytes=79 * GIB,
            multiprocessors=132,
        )
        for rank in range(8)
    ]


def changed(*ranks: int, **fields: Any) -> list[Presence]:
    return [replace(one, **fields) if one.rank in ranks else one for one in roll()]


def test_equal_ranks_are_fine() -> None:
    found = judge_roll(roll(), plan())
    assert not found.problem
    assert not found.bad
    assert not found.warnings


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"torch": "2.6.0"}, "torch is 2.6.0 on n1, and 2.13.0 on the others"),
        ({"nccl": "2.21.5"}, "NCCL is 2.21.5 on n1, and 2.29.3 on the others"),
        ({"cuda": None}, "CUDA is unknown on n1, and 13.0 on the others"),
        ({"device": "NVIDIA A100"}, "GPU is NVIDIA A100 on n1, and NVIDIA H100 80GB HBM3 on the"),
        (
            {"free_bytes": 40 * GIB},
            "the GPU of rank 2 on n1 has 40.0 GiB free, others 79.0 GiB: something else holds it",
        ),
    ],
)
def test_a_node_that_differs_is_bad(fields: dict[str, Any], words: str) -> None:
    found = judge_roll(changed(2, 3, **fields), plan())
    assert words in found.problem
    assert list(found.bad) == ["n1"]


def test_halves_that_differ_are_told_and_nobody_is_bad() -> None:
    found = judge_roll(changed(0, 1, 2, 3, torch="2.6.0"), plan())
    assert found.problem == "ranks differ: torch 2.6.0 on n0, n1, torch 2.13.0 on n2, n3"
    assert not found.bad


def test_drivers_may_differ() -> None:
    found = judge_roll(changed(2, 3, driver="570.1.2"), plan())
    assert not found.problem
    assert found.warnings == ("driver is 570.1.2 on n1, and 580.95.05 on the others",)


def test_two_ranks_of_one_gpu_are_a_mistake_of_the_launch() -> None:
    found = judge_roll(changed(2, 3, device_id="GPU-2"), plan())
    assert found.problem.startswith("ranks 2, 3 on n1 have one GPU together")
    assert not found.bad


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"memory_bytes": 40 * GIB}, "the plan is for h100: NVIDIA H100 80GB HBM3 has 80.0 GiB"),
        ({"multiprocessors": 114}, "has 132 multiprocessors, not 114"),
    ],
)
def test_another_gpu_than_planned_is_told(device: dict[str, Any], words: str) -> None:
    found = judge_roll(roll(), plan(**device))
    assert not found.problem
    assert words in found.warnings[0]


def test_other_nodes_than_planned_are_told() -> None:
    found = judge_roll([replace(one, host=f"n{one.rank // 4}") for one in roll()], plan())
    assert found.warnings == ("the plan is for h100: 4 ranks run on n0, not 2",)


@given(st.lists(st.sampled_from(["2.6.0", "2.13.0", "2.14.0"]), min_size=8, max_size=8))
def test_only_a_majority_decides(said: list[str]) -> None:
    ranks = [replace(one, torch=text) for one, text in zip(roll(), said, strict=True)]
    found = judge_roll(ranks, plan())
    assert bool(found.problem) == (len(set(said)) > 1)
    usual = max(set(said), key=said.count)
    if found.bad:
        assert 2 * said.count(usual) > len(said)
        assert 2 * len(found.bad) <= 4
    assert versions(ranks)["torch"] == sorted(set(said))


def test_the_drivers_version_is_read_where_it_is_shown(tmp_path: Path) -> None:
    shown = tmp_path / "version"
    shown.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert driver_version(shown) == "580.95.05"
    assert driver_version(tmp_path / "none") is None


def test_bad_nodes_are_one_line_each(tmp_path: Path) -> None:
    append_bad_nodes(tmp_path / "new", {"n1": "a\treason\nof two lines"})
    append_bad_nodes(tmp_path / "new", {"n2": "slow"})
    text = (tmp_path / "new/bad-nodes").read_text()
    assert text == "n1\ta reason of two lines\nn2\tslow\n"
    append_bad_nodes(None, {"n1": "nowhere to write"})
    assert bad_nodes_words(None, {"n1": ""}) == "; leave out n1"
    assert bad_nodes_words(tmp_path, {"n1": ""}) == (
        f"; leave out n1, as a retry does by {tmp_path / 'bad-nodes'}"
    )
    assert bad_nodes_words(None, {}).endswith("or leave the preflight out")


def test_a_folder_that_cannot_be_written_is_told_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    write_result(tmp_path / "file", {"passed": True})
    append_bad_nodes(tmp_path / "file", {"n1": "slow"})
    assert capsys.readouterr().err.count("preflight: ") == 2


def test_a_result_replaces_the_one_before(tmp_path: Path) -> None:
    write_result(tmp_path, {"passed": False})
    write_result(tmp_path, {"passed": True})
    assert [path.name for path in tmp_path.iterdir()] == ["preflight.json"]
    assert json.loads((tmp_path / "preflight.json").read_text()) == {"passed": True}


def test_the_nodes_of_the_newest_start_are_known(tmp_path: Path) -> None:
    assert planned_nodes(None) == planned_nodes(tmp_path) == ()
    events = [
        {"event": "attempt", "attempt": 1, "nodes": ["a", "b"]},
        {"event": "attempt_ended", "attempt": 1, "exit_code": 5, "next": "retry"},
        {"event": "attempt", "attempt": 2, "nodes": ["a", "c"]},
    ]
    path = tmp_path / "attempts.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert planned_nodes(tmp_path) == ("a", "c")
    path.write_text("{")
    assert planned_nodes(tmp_path) == ()
