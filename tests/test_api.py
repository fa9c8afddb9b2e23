"""The public names: all there, none more, and they do what the commands do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import fsdpplan
from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import rules_document
from tests.cli.small import answer, on_a_machine_without_gpus, words

QUESTION = ("--model", "llama-3.1-8b", "--gpus", "16", "--hardware", "dgx-h100")


@pytest.fixture(scope="module")
def plan() -> fsdpplan.Plan:
    return fsdpplan.recommend(
        fsdpplan.load_model("llama-3.1-8b"),
        fsdpplan.load_cluster("dgx-h100", gpus=16),
        fsdpplan.Training(seq_len=4096, global_batch=256),
        tp=1,
    )


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(fsdpplan.__all__) == fsdpplan.__all__
    for name in fsdpplan.__all__:
        assert getattr(fsdpplan, name).__doc__, name
    assert set(dir(fsdpplan)) == {*fsdpplan.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        fsdpplan.torch  # noqa: B018


def test_importing_it_imports_nothing() -> None:
    asks = (
        "import sys; before = set(sys.modules); import fsdpplan; print(set(sys.modules) - before)"
    )
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert told.stdout == "{'fsdpplan'}\n"


def test_it_recommends_what_the_command_recommends(
    plan: fsdpplan.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = ("--seq-len", "4096", "--global-batch", "256", "--tp", "1", "--torch", "2.13")
    first = answer(capsys, "recommend", *QUESTION, *batch, "--no-ledger", "--no-save")["plans"][0]
    assert first["layout"]["dp_shard"] == plan.layout.dp_shard
    assert first["layout"]["micro_batch"] == plan.layout.micro_batch
    assert first["estimate"]["step_seconds"]["expected"] == plan.estimate.step_seconds.expected


def test_a_plan_is_estimated_saved_read_and_emitted(plan: fsdpplan.Plan, tmp_path: Path) -> None:
    again = fsdpplan.estimate(plan.model, plan.cluster, plan.training, plan.layout)
    assert again == plan.estimate
    path = tmp_path / "fsdpplan.json"
    fsdpplan.save_plan(plan, path)
    assert fsdpplan.load_plan(path) == plan
    assert fsdpplan.emit_launch(plan, job=fsdpplan.Job(job_name="mine")).startswith("#!/bin/bash")
    pods = fsdpplan.Pods(image="pytorch/pytorch:2.13.0")
    assert "kind: TrainJob" in fsdpplan.emit_launch(plan, "kubernetes", pods=pods)


@pytest.fixture(scope="module")
def small() -> fsdpplan.Plan:
    return fsdpplan.recommend(
        fsdpplan.load_model("llama-3.2-1b"),
        fsdpplan.load_cluster("dgx-h100", gpus=16),
        fsdpplan.Training(seq_len=2048, global_batch=96),
        **PINS,
    )


PINS: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}


def test_the_next_questions_have_the_answers_of_asking_directly(small: fsdpplan.Plan) -> None:
    model, training = small.model, small.training
    cluster = fsdpplan.load_cluster("dgx-h100", gpus=24)
    direct = fsdpplan.recommend(model, cluster, training, **PINS)
    then = fsdpplan.what_if(small, gpus=24, **PINS)
    assert then.best == direct == fsdpplan.what_if(small, cluster=cluster, **PINS).best
    assert then.same is not None
    assert then.same.case.layout.world == 24
    again = fsdpplan.replan(small, gpus=24, **PINS)
    assert again.plan == direct
    assert again.keeps_batch
    assert again.moved.saved_bytes == 12 * 1_235_814_400
    beside = fsdpplan.compare(small, direct)
    assert [one.name for one in beside.changed] == ["gpus"]
    change = sum(term.change for term in beside.difference.time)
    steps = [one.estimate.step_seconds.expected for one in (small, direct)]
    assert change == pytest.approx(steps[1] - steps[0])
    curve = fsdpplan.sweep(model, "dgx-h100", training, gpus=(24, 16, 56), **PINS)
    assert [one.plan for one in curve.points] == [small, direct, None]
    assert curve.knee is not None
    weak = fsdpplan.sweep(model, "dgx-h100", training, gpus=(16, 24), scaling="weak", **PINS)
    assert [one.plan.training.global_batch for one in weak.points if one.plan] == [64, 96]


def test_the_fewest_gpus_are_those_below_which_nothing_fits() -> None:
    model = fsdpplan.load_model("llama-3.1-8b")
    training = fsdpplan.Training(seq_len=4096, global_batch=64)
    pins = PINS | {"activation_checkpointing": "full", "offload": "none"}
    found = fsdpplan.min_gpus(model, "dgx-h100", training, **pins)
    assert found.cluster.gpus == 4
    cluster = fsdpplan.load_cluster("dgx-h100", gpus=2)
    with pytest.raises(fsdpplan.NoFeasibleLayout):
        fsdpplan.recommend(model, cluster, training, **pins)


def test_a_check_is_true_where_all_holds(small: fsdpplan.Plan, tmp_path: Path) -> None:
    held = fsdpplan.check(small, "mfu > 0.01", lock=tmp_path / "plan.lock", write_lock=True)
    assert held
    assert held.differs == () or all(one.is_unknown for one in held.differs)
    failed = fsdpplan.check(small, "mfu > 99%", "gpus == 16")
    assert not failed
    assert "FALSE" in repr(failed)
    other = fsdpplan.replan(small, gpus=24, **PINS).plan
    assert not fsdpplan.check(other, lock=tmp_path / "plan.lock")
    with pytest.raises(fsdpplan.SpecError, match="column 1 "):
        fsdpplan.check(small, "mfuu > 1")


def test_answers_are_short_tables_and_html_is_escaped(small: fsdpplan.Plan) -> None:
    hostile = replace(small, model=replace(small.model, name="<script>x</script>"))
    answers: list[Any] = [
        hostile,
        hostile.estimate,
        fsdpplan.compare(hostile, small),
        fsdpplan.what_if(hostile, **PINS),
        fsdpplan.replan(hostile, gpus=24, **PINS),
        fsdpplan.sweep(hostile.model, "dgx-h100", small.training, gpus=(16, 56), **PINS),
        fsdpplan.check(hostile, "model.name == '<b>'"),
        fsdpplan.sensitivities(hostile),
        fsdpplan.bill(hostile, tokens=10**9, price=2.0, pue=1.1, deadline_seconds=864000),
        fsdpplan.goodput(hostile, requeue_seconds=60.0),
        fsdpplan.rules(replace(hostile, estimate=_slow(hostile.estimate))),
    ]
    for one in answers:
        text, html = repr(one), one._repr_html_()
        assert len(text.splitlines()) < 30, text
        assert html.startswith("<table>")
        assert html.endswith("</table>")
        assert "<script>" not in html
        assert "<b>" not in html
        rows = ElementTree.fromstring(html).iter("tr")
        assert len(list(rows)) == len(text.splitlines()) - 1
    assert "&lt;script&gt;" in answers[0]._repr_html_()


def _slow(estimate: fsdpplan.Estimate) -> fsdpplan.Estimate:
    """With all-gathers that most of the step waits for."""
    time = estimate.time
    waits = 3 * time.total_seconds
    return replace(estimate, time=replace(time, exposed_communication_seconds=waits))


def test_what_cannot_be_is_an_error_of_one_line() -> None:
    cluster = fsdpplan.load_cluster("dgx-h100", gpus=1)
    training = fsdpplan.Training(seq_len=4096, global_batch=8)
    with pytest.raises(fsdpplan.NoFeasibleLayout, match=r"no layout of llama-3\.1-8b"):
        fsdpplan.recommend(fsdpplan.load_model("llama-3.1-8b"), cluster, training, offload="none")
    with pytest.raises(fsdpplan.SpecError, match="no model is called"):
        fsdpplan.load_model("lama-9")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A plan that a command saved, and what it printed of the bill."""
    folder = tmp_path_factory.mktemp("saved")
    asked = (
        "recommend --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --tp 1 --pp 1 --cp 1 "
        "--micro-batch 1 --seq-len 2048 --global-batch 96 --no-ledger --provider lambda "
        "--tokens 1T --pue 1.2 --co2-per-kwh 100 --deadline 30d --mtbf-node 500h --json"
    )
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        patch.chdir(folder)
        with (folder / "out.json").open("w") as out:
            patch.setattr(sys, "stdout", out)
            assert exit_code_of([*words(asked), "--save", "plan.json"]) == 0
    return folder / "plan.json", json.loads((folder / "out.json").read_text())


def test_each_call_has_the_numbers_of_its_command(
    saved: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, document = saved
    plan = fsdpplan.load_plan(path)
    own = fsdpplan.bill(
        plan, provider="lambda", pue=1.2, co2_grams_per_kwh=100, deadline_seconds=30 * 86400
    )
    bill = document["goal"]["bills"][0]
    assert {name: _plain(getattr(own, name)) for name in bill} == bill
    assert _plain(own.terms) == document["goal"]["terms"]

    told = answer(capsys, "explain", str(path), "--goodput", "--requeue", "5min")["goodput"]
    kept = fsdpplan.goodput(plan, requeue_seconds=300.0)
    assert not told.pop("every_steps_given")
    assert dict(kept.sources) == told.pop("sources")
    assert {name: _plain(getattr(kept, name)) for name in told} == told

    broken = answer(capsys, "explain", str(path), "--rules")["rules"]
    assert rules_document(fsdpplan.rules(plan).broken) == broken
    slow = replace(plan, estimate=_slow(plan.estimate))
    assert not fsdpplan.rules(slow)

    followed = answer(capsys, "what-if", str(path), "--sensitivities", "--no-ledger")
    found = fsdpplan.sensitivities(plan)
    assert [one["field"] for one in followed["sensitivities"]] == [one.field for one in found.found]
    for one in followed["sensitivities"]:
        for side in ("more", "less"):
            mine = getattr(found[one["field"]], side)
            its = one[side] and one[side]["step_elasticity"]
            assert (mine and mine.step) == its
    assert found.held_fraction == followed["held_fraction"]
    gains = [one.gain for one in found.measurements]
    assert gains == [one["gain"] for one in followed["measurements"]]


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def test_why_not_another_has_the_answer_of_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU: no link is turned, and layouts are few."""
    on_a_machine_without_gpus(monkeypatch)
    path = tmp_path / "one.json"
    question = "--model llama-3.2-1b --gpus 1 --hardware dgx-h100 --global-batch 8 --loss-chunks 1"
    asked = words(f"recommend {question} --micro-batch 1 --no-ledger --save")
    assert exit_code_of([*asked, str(path)]) == 0
    capsys.readouterr()
    document = answer(capsys, *words(f"explain {path} --no-ledger --why"), "full recompute")
    plan = fsdpplan.load_plan(path)
    pins = {"loss_chunks": 1, "micro_batch": 1}
    found = fsdpplan.why(plan, activation_checkpointing="full", pins=pins)
    assert found.with_it.best is not None
    best = found.with_it.best.estimate
    its = document["with_it"]["estimate"]
    assert best.step_seconds.expected == its["step_seconds"]["expected"]
    assert [one.knob.name for one in found.turned] == [one["input"] for one in document["inputs"]]
    far = [[each.far.value for each in one.thresholds] for one in found.turned]
    assert far == [
        [each["far"]["value"] for each in one["thresholds"]] for one in document["inputs"]
    ]
    text, html = repr(found), found._repr_html_()
    assert text.startswith("Why not activation_checkpointing full: llama-3.2-1b")
    assert len(text.splitlines()) < 30
    assert ElementTree.fromstring(html).tag == "table"
    its_own = plan.layout.activation_checkpointing
    has_it = fsdpplan.why(plan, activation_checkpointing=its_own, pins=pins)
    assert has_it.has_it
    assert has_it.difference is None
    with pytest.raises(fsdpplan.SpecError, match="nothing is wanted"):
        fsdpplan.why(plan)
    with pytest.raises(fsdpplan.SpecError, match="no axis"):
        fsdpplan.why(plan, split=("bananas",))


def test_a_job_that_saves_does_so_as_often_as_keeps_most(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    from fsdpplan.emit.trainer_program import Trainer

    plan = fsdpplan.load_plan(saved[0])
    program = Trainer(checkpoint_dir="/shared/saved", steps=10**6)
    text = fsdpplan.emit_launch(plan, job=fsdpplan.Job(program=program))
    assert f"--checkpoint-every={fsdpplan.goodput(plan).every_steps}" in text
    told = fsdpplan.Job(program=replace(program, checkpoint_every=123))
    assert "--checkpoint-every=123" in fsdpplan.emit_launch(plan, job=told)


def test_what_a_bill_lacks_is_said(small: fsdpplan.Plan) -> None:
    for given, what in (
        ({"price": 2.0}, "say its tokens"),
        ({"tokens": 10**9, "price": 2.0, "provider": "lambda"}, "contradict"),
        ({"tokens": 10**9, "price": -1.0}, "price"),
        ({"tokens": 10**9, "pue": 0.5}, "at least 1"),
        ({"tokens": 10**9, "co2_grams_per_kwh": -1}, "at least 0"),
    ):
        with pytest.raises(fsdpplan.SpecError, match=what):
            fsdpplan.bill(small, **given)
