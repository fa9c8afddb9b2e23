"""Evaluation: one loss under every layout, and no trace of it in the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.evaluation import held_out, undisturbed
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.assemble import Assembled
from fsdpplan.trainer.parallel.pipeline import forward_ticks
from tests.trainer import evaluation_layouts, jobs, plans

TOLERANCE = 1e-5

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """All layouts, measured one after the other in one set of processes."""
    out = tmp_path_factory.mktemp("evaluation") / "results.json"
    return jobs.measured(
        4, "tests.trainer.evaluation_layouts:measure_all", out, asked=asked("name")
    )


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", evaluation_layouts.LAYOUTS)
def test_the_loss_is_that_of_one_process(results: Results, name: str) -> None:
    found = results[name]["judged"]["held_out"]
    expected = results["reference of experts" if name == "experts" else "reference"]
    assert [loss for loss, _ in found] == pytest.approx(expected, rel=TOLERANCE)
    targets = evaluation_layouts.SEQUENCES * evaluation_layouts.SEQ_LEN
    assert {counted for _, counted in found} == {targets}


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", evaluation_layouts.LAYOUTS)
def test_training_goes_on_as_if_it_had_not_been(results: Results, name: str) -> None:
    judged, alone = results[name]["judged"], results[name]["alone"]
    assert judged | {"held_out": []} == alone


@pytest.mark.gloo
def test_documents_are_judged_apart_where_they_are_trained_apart(results: Results) -> None:
    loss, targets = results["packed"]["held_out"][0]
    expected_loss, expected_targets = results["documents"]  # type: ignore[misc]
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert targets == expected_targets


@pytest.fixture(scope="module")
def judged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that evaluates after every second step, saves after four and goes on."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "held.txt").write_text("what nobody trains on, in bytes. " * 20)
    options = ["--eval-data", str(folder / "held.txt"), "--eval-every", "2"]
    options += ["--prometheus", str(folder / "run.prom"), "--warmup-steps", "1"]
    options += ["--checkpoint-dir", str(folder / "saved")]
    jobs.train(folder, 2, "--steps", "4", *options, **BYTES)
    out = jobs.train(folder, 2, "--steps", "7", "--allow-changes", *options, **BYTES)
    (folder / "out").write_text(out)
    return folder


BYTES: dict[str, Any] = {"dp_shard": 2, "model": {"vocab": 257}}


@pytest.mark.gloo
def test_a_run_tells_each_evaluation_once(judged_run: Path) -> None:
    events = jobs.lines(judged_run, "eval")
    assert [event["step"] for event in events] == [2, 4, 6, 7]
    # 20 times 33 bytes and an end: 27 whole sequences of 24
    assert {(event["sequences"], event["targets"]) for event in events} == {(27, 27 * 24)}
    for event in events:
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))
    out = (judged_run / "out").read_text()
    assert "held-out data: 27 sequences, as many as 3.4 steps train on" in out
    assert f"held-out loss {events[-1]['loss']:.4f} (perplexity" in out
    assert "training_eval_loss{" in (judged_run / "run.prom").read_text()


def test_nothing_is_drawn_or_dropped_meanwhile() -> None:
    model = nn.Dropout(0.5)
    meshes = cast(Any, None)
    assembled = Assembled(model=model, parts=(model,), meshes=meshes, pipeline=None, scaler=None)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with undisturbed(assembled):
        torch.rand(5)
        assert model(torch.ones(9)).min() == 1
        assert not torch.is_grad_enabled()
    assert torch.rand(3).tolist() == expected.tolist()
    assert model.training


def test_as_many_sequences_are_taken_as_tokens_allow(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("x" * 1000)
    plan = parse_plan(plans.plan_text(model={"vocab": 257}))
    words = ["--eval-data", str(tmp_path / "held.txt"), "--eval-tokens"]
    taken = {tokens: held_out(plan, parse_options([*words, tokens])) for tokens in ("1", "100")}
    assert [held and held.windows for held in taken.values()] == [1, 4]
    held = taken["100"]
    assert held is not None
    assert "4 sequences of 41" in held.words(plan)
    assert not held.counted(4).any()
    assert held.counted(3).all()


@pytest.mark.parametrize("option", [["--eval-every", "3"], ["--eval-tokens", "3"]])
def test_there_must_be_something_to_judge_by(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(option)
    assert f"{option[0]} needs --eval-data" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 1, 0]])
@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_each_stage_takes_each_micro_batch_once_and_in_order(
    ranks: list[int], micro_batches: int
) -> None:
    ticks = forward_ticks(ranks, micro_batches)
    taken = [action for tick in ticks for action in tick]
    assert len(taken) == len(set(taken)) == len(ranks) * micro_batches
    for number in range(micro_batches):
        assert [stage for stage, which in taken if which == number] == list(range(len(ranks)))
    for tick in ticks:
        on = [ranks[stage] for stage, _ in tick]
        assert len(on) == len(set(on))


def test_ranks_of_a_pipeline_work_at_the_same_time() -> None:
    assert len(forward_ticks([0, 1, 2, 3], 16)) == 16 + 3
    # two passes over four ranks, and as long as the first micro-batch takes to come back
    assert len(forward_ticks([0, 1, 2, 3] * 2, 16)) <= 2 * 16 + 3 + 4
