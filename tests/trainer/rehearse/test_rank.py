"""A rehearsal calls what real ranks call, and catches what would end a job on the cluster."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.attention import Attention
from fsdpplan.trainer.model.feed_forward import FeedForward
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.rehearse import rank as rehearse
from fsdpplan.trainer.rehearse import rehearsal
from fsdpplan.trainer.rehearse.own_model import (
    ModelProgram,
    load_build,
    loss_of_output,
    rehearse_model,
)
from fsdpplan.trainer.text.data import open_sequences
from tests.trainer import jobs, plans, rehearsals
from tests.trainer.matrix_layouts import PIPED, SPLIT

HSDP = {"dp_replicate": 2, "dp_shard": 2}
PIPE = PIPED | {"dp_shard": 2}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 3 of 4 real gloo ranks called, by layout."""
    out = tmp_path_factory.mktemp("real") / "calls.json"
    return jobs.measured(4, "tests.trainer.rehearsals:count_all", out)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", [*rehearsals.LAYOUTS, *rehearsals.WITH_EXPERTS])
def test_a_rank_calls_what_it_calls_on_real_processes(real: dict[str, Any], name: str) -> None:
    plan = rehearsals.plan_of(name)
    sequences = open_sequences(plan, None, seed=0)
    found = rehearse.rehearse_rank(plan, 3, sequences=sequences, recipe=rehearsals.RECIPE)
    assert json.loads(json.dumps(rehearsals.as_lists(found.calls))) == real[name]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks one after another in this process, where faults can be put into the program."""
    monkeypatch.setattr(rehearsal, "cores", lambda: 1)


def report_of(tmp_path: Path, *ranks: int, **plan: Any) -> dict[str, Any]:
    """What `--rehearse` writes; a failure of the ranks is in it."""
    path, report = tmp_path / "plan.json", tmp_path / "report.json"
    path.write_text(plans.plan_text(**plan), encoding="utf-8")
    words = ["--plan", str(path), "--report", str(report), "--rehearse", ",".join(map(str, ranks))]
    options = parse_options(words)
    with contextlib.suppress(rehearsal.RehearsalFailed):
        rehearsal.rehearse_ranks(parse_plan(path.read_text(encoding="utf-8")), options)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def errors(report: dict[str, Any]) -> list[str]:
    return [rank["error"] for rank in report["ranks"]]


def on_rank(rank: int, act: Callable[[], object], *, after: bool = False) -> Callable[..., Any]:
    """The trainer's step; before or after it one rank does something that the others do not."""
    step = rehearse.train_step

    def with_fault(*arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == rank and not after:
            act()
        stepped = step(*arguments, **named)
        if dist.get_rank() == rank and after:
            act()
        return stepped

    return with_fault


@pytest.mark.usefixtures("one_process")
def test_ranks_that_do_the_same_match(tmp_path: Path) -> None:
    report = report_of(tmp_path, 0, 1, 3, **PIPE)
    assert errors(report) == [None] * 3
    assert report["mismatches"] == []
    assert [rank["place"]["pp"] for rank in report["ranks"]] == [0, 0, 1]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kept", [2, 4])
def test_ranks_that_keep_parameters_in_groups_match(tmp_path: Path, kept: int) -> None:
    report = report_of(
        tmp_path, 0, 5, 15, dp_replicate=2, dp_shard=8, reshard_after_forward=kept, micro_batch=1
    )
    assert errors(report) == [None] * 3
    assert report["mismatches"] == []


@pytest.mark.usefixtures("one_process")
def test_a_collective_that_one_rank_adds_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = on_rank(3, lambda: dist.all_reduce(torch.zeros(5)))
    monkeypatch.setattr(rehearse, "train_step", fault)
    (said,) = report_of(tmp_path, 0, 3, dp_shard=4)["mismatches"]
    assert "ranks 0 and 3 do not make the same calls over dp_shard: call 1" in said
    assert "all_reduce in fp32 of 20 bytes on rank 3" in said


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("after", "received"), [(False, "fp32 of 9,216 bytes"), (True, "none")], ids=["before", "after"]
)
def test_a_message_that_nobody_receives_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, received: str
) -> None:
    """Messages pair in their order: one too many shifts what follows, or is left over."""
    fault = on_rank(0, lambda: dist.send(torch.zeros(5), 2), after=after)
    monkeypatch.setattr(rehearse, "train_step", fault)
    (said,) = report_of(tmp_path, 0, 2, **PIPE)["mismatches"]
    assert "from stage rank 0 to 1 is fp32 of 20 bytes where it is sent (rank 0)" in said
    assert f"and {received} where it is received (rank 2)" in said


@pytest.mark.usefixtures("one_process")
def test_a_wrong_shape_is_said_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: forward(self, x[..., :-1]))
    (said,) = errors(report_of(tmp_path, 0, dp_shard=4))
    assert said.startswith("in a step, at feed_forward.py line ")
    assert "same reduction dim" in said


@pytest.mark.usefixtures("one_process")
def test_a_parameter_without_a_gradient_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Attention.forward
    monkeypatch.setattr(
        Attention, "forward", lambda self, *given, **named: forward(self, *given, **named).detach()
    )
    (said,) = errors(report_of(tmp_path, 0, dp_shard=4))
    assert "layers.0.attention" in said
    assert "has no gradient" in said


@pytest.mark.usefixtures("one_process")
def test_what_does_not_divide_is_caught(tmp_path: Path) -> None:
    three = {"heads": 3, "kv_heads": 3}
    (said,) = errors(report_of(tmp_path, 0, model=three, dp_shard=2, **SPLIT))
    assert "attention.py line" in said
    assert "multiply up to the size of dim 2" in said


def test_there_is_no_rank_behind_the_last(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="there is no rank 4: take ranks from 0 to 3"):
        report_of(tmp_path, 4, **HSDP)


def test_the_program_itself_rehearses(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    plan.write_text(plans.plan_text(dp_replicate=512, dp_shard=2, micro_batch=1), encoding="utf-8")
    words = ["--plan", str(plan), "--rehearse", "1023,0", "--report", str(report)]
    finished = subprocess.run(
        [sys.executable, "-m", "fsdpplan.trainer", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["world"] == 1024
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1023]
    groups = {group["axis"]: group for group in found["ranks"][1]["groups"]}
    assert (groups["dp_replicate"]["first"], groups["dp_replicate"]["stride"]) == (1, 2)
    assert set(found["ranks"][0]["peak_bytes_of"]) >= {"start", "step", "optimizer", "checkpoint"}


class Own(nn.Module):
    """A user's model, with a part that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def own_model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        model = Own()
    return model, (torch.zeros(2, 8),)


def plan_for(**layout: Any) -> PlanConfig:
    return parse_plan(plans.plan_text(**layout))


@pytest.mark.usefixtures("one_process")
def test_a_users_model_is_rehearsed() -> None:
    (rank,) = rehearse_model(own_model, plan_for(**HSDP), ranks=(3,))["ranks"]
    assert rank["error"] is None
    assert rank["without_gradient"] == ["idle.weight", "idle.bias"]
    rows = {(row["collective"], row["axis"]): row for row in rank["collectives"]}
    # three blocks, in forward and in backward; and the root, of which nothing is needed
    assert rows["all_gather", "dp_shard"]["count"] == 7
    assert rows["all_reduce", "dp_replicate"]["count"] == 3


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: (Own(), ()), "has values"),
        (lambda: (own_model()[0], (torch.zeros(2, 9),)), "in a step"),
    ],
    ids=["a model with values", "inputs of another width"],
)
def test_what_a_users_model_cannot_be_is_said(build: Any, said: str) -> None:
    (rank,) = rehearse_model(build, plan_for(dp_shard=4))["ranks"]
    assert said in rank["error"]


def whole_model() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    with torch.device("meta"):
        model = rehearsals.OwnModel()
    return model, (torch.zeros(rehearsals.OWN_INPUT),), {"tp_plan": rehearsals.OWN_SPLIT}


@pytest.mark.gloo
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", rehearsals.OWN)
def test_whole_copies_of_a_users_model_call_what_real_processes_call(
    real: dict[str, Any], name: str
) -> None:
    plan = rehearsals.plan_of(name)
    with rehearse.fake_cluster(plan, 3, cuda_like=False):
        stage = rehearse.Stage()
        program = ModelProgram(whole_model, plan, loss_of_output, stage)
        found = rehearse.measured(program, 3, stage=stage)
    assert without_counts(json.loads(json.dumps(rehearsals.as_lists(found.calls)))) == (
        without_counts(real[name])
    )


def without_counts(calls: list[Any]) -> list[Any]:
    """Calls but for how many targets ranks had, which tensors without values do not say."""
    kept = [
        [axis, ranks, [call for call in made if call[1] != "int64"]] for axis, ranks, made in calls
    ]
    return [each for each in kept if each[2]]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("replicas", [1, 4])
def test_whole_copies_hold_what_they_must(replicas: int) -> None:
    """Parameters and both moments, all in fp32; and of copies buckets of all gradients."""
    plan = plan_for(dp_replicate=replicas, sharding="ddp")
    (rank,) = rehearse_model(whole_model, plan, ranks=(0,))["ranks"]
    copies = 3 + (replicas > 1)
    bytes_needed = 4 * copies * rank["parameters"]
    assert bytes_needed <= rank["state_bytes"] <= bytes_needed + 512 * 100
    assert rank["without_gradient"] == []


@pytest.mark.parametrize("where", ["nothing.py:build", "build", __file__ + ":absent"])
def test_a_function_that_is_not_there_is_said(where: str) -> None:
    with pytest.raises(TrainerError, match=r"FILE\.py:FUNCTION"):
        load_build(where)


ORPHAN = """
import os, sys, time
from fsdpplan.trainer.rehearse.rehearsal import end_with_parent
parent, child = os.getpid(), os.fork()
if child == 0:
    time.sleep(float(sys.argv[1]))
    end_with_parent(parent)
    time.sleep(600)
print(child, flush=True)
time.sleep(1 - float(sys.argv[1]))
"""


@pytest.mark.parametrize("begins", ["0", "1"], ids=["while it runs", "before it watches"])
def test_a_rehearsal_ends_with_whoever_started_it(begins: str) -> None:
    command = [sys.executable, "-c", ORPHAN, begins]
    started = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    orphan = Path("/proc") / started.stdout.decode().split()[0]
    deadline = time.monotonic() + 120
    while orphan.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not orphan.exists()
