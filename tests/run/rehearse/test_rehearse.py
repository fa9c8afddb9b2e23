"""A rehearsed rank beside its prediction; which ranks are rehearsed; why none could be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.run.rehearse import rehearse as rehearse_module
from fsdpplan.run.rehearse.compare import RankReport, compared_rank
from fsdpplan.run.rehearse.ranks import DEFAULT_RANKS, ChosenRank, chosen_ranks, stage_of
from fsdpplan.run.rehearse.rehearse import Rehearsal, rehearse, shortened
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import torch_release
from tests.emit.plans import make_plan

ROOT = Path(__file__).resolve().parents[3]
EIGHT_BLOCKS = Model(
    name="eight",
    layers=8,
    hidden=64,
    ffn_hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=256,
)
PLAN = make_plan("cpu", nodes=2)
PIPELINE = Layout(pp=4, dp_shard=2, schedule="1f1b", num_microbatches=4)


@pytest.fixture(autouse=True)
def _where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def rehearsed() -> Rehearsal:
    """All ranks of a plan of two nodes of two CPU processes."""
    return rehearse(PLAN, chosen_ranks(PLAN.model, PLAN.layout, "0,1,2,3"))


def report_as(rehearsed: Rehearsal) -> RankReport:
    """What the trainer reported of rank 0."""
    rank = rehearsed.ranks[0]
    return RankReport(
        calls={(c.collective, c.axis, c.ranks, c.dtype): (c.count, c.bytes) for c in rank.calls},
        peak_bytes=rank.peak_bytes,
        peak_bytes_of=rank.peak_bytes_of,
        state_bytes=rank.state_bytes,
        parameters=rank.parameters,
        without_gradient=rank.without_gradient,
    )


def test_a_plan_rehearses_as_predicted(rehearsed: Rehearsal) -> None:
    assert rehearsed.errors == ()
    assert rehearsed.problems == ()
    assert rehearsed.agrees
    assert [rank.rank for rank in rehearsed.ranks] == [0, 1, 2, 3]
    first = rehearsed.ranks[0]
    assert {call.axis for call in first.calls} == {"dp_replicate", "dp_shard"}
    assert all(call.count > 0 for call in first.calls)


def test_another_python_rehearses_the_same(tmp_path: Path, rehearsed: Rehearsal) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    again = rehearse(PLAN, chosen_ranks(PLAN.model, PLAN.layout, "0"), python=str(python))
    assert again.ranks == rehearsed.ranks[:1]
    with pytest.raises(SpecError, match=r"no Python /no/python here"):
        rehearse(PLAN, (CHOSEN,), python="/no/python")


def test_it_vouches_for_the_release_that_it_ran_under_alone(rehearsed: Rehearsal) -> None:
    here = str(torch_release(rehearsed.torch_version))
    assert rehearsed.planned_torch is None
    assert rehearsed.agrees
    assert replace(rehearsed, planned_torch=here).agrees
    other = replace(rehearsed, planned_torch="2.0")
    assert not other.agrees
    assert other.said == (other.other_torch,)


def test_a_plan_whose_program_fails_says_where(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def build():\n    raise ValueError('no such size')\n", encoding="utf-8")
    plan = make_plan("cpu")
    found = rehearse(plan, chosen_ranks(plan.model, plan.layout, "0"), build=f"{mine}:build")
    (said,) = found.errors
    assert said.startswith("rank 0: in building the model, at mine.py line 2")
    assert "no such size" in said
    assert not found.agrees


CHOSEN = ChosenRank(rank=0, stands_for="all")
Change = Callable[[RankReport], RankReport]


def _one_call_more(report: RankReport) -> RankReport:
    key = next(iter(report.calls))
    count, size = report.calls[key]
    return replace(report, calls={**report.calls, key: (count + 1, size)})


def _other_bytes(report: RankReport) -> RankReport:
    key = next(iter(report.calls))
    count, size = report.calls[key]
    return replace(report, calls={**report.calls, key: (count, size + 1)})


def _another_collective(report: RankReport) -> RankReport:
    return replace(report, calls={**report.calls, ("broadcast", "tp", 2, "bf16"): (1, 8)})


def _more_memory(report: RankReport) -> RankReport:
    return replace(report, peak_bytes=report.peak_bytes + 2**28)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_one_call_more, "predicted are"),
        (_other_bytes, "predicted are"),
        (_another_collective, "broadcast over tp (2 ranks, bf16) 1 times with 8 bytes"),
        (_more_memory, "at its peak, predicted are"),
    ],
)
def test_what_differs_is_said(rehearsed: Rehearsal, change: Change, said: str) -> None:
    found = compared_rank(PLAN, CHOSEN, change(report_as(rehearsed)), whole=PLAN)
    (sentence,) = found.unpredicted
    assert said in sentence


def test_numbers_of_tokens_are_not_predicted(rehearsed: Rehearsal) -> None:
    report = report_as(rehearsed)
    told = replace(report, calls={**report.calls, ("all_to_all", "ep", 2, "int64"): (4, 64)})
    assert compared_rank(PLAN, CHOSEN, told, whole=PLAN).unpredicted == ()


def test_a_parameter_without_a_gradient_is_named(rehearsed: Rehearsal) -> None:
    report = replace(report_as(rehearsed), without_gradient=("a", "b", "c", "d"))
    found = compared_rank(PLAN, CHOSEN, report, whole=PLAN)
    assert found.unreached == ("rank 0: no gradient reaches a, b, c and 1 more",)


def _with_device_memory(plan: Plan, memory_bytes: int) -> Plan:
    device = replace(plan.cluster.device, memory_bytes=memory_bytes)
    return replace(plan, cluster=replace(plan.cluster, device=device))


def test_what_would_not_fit_is_said(rehearsed: Rehearsal) -> None:
    fits = compared_rank(PLAN, CHOSEN, report_as(rehearsed), whole=PLAN)
    small = _with_device_memory(PLAN, fits.device_bytes - 1)
    (said,) = compared_rank(small, CHOSEN, report_as(rehearsed), whole=small).unpredicted
    assert said.startswith("rank 0 would run out of memory")


def test_a_pipeline_is_rehearsed_by_its_kinds_of_stages() -> None:
    chosen = chosen_ranks(EIGHT_BLOCKS, PIPELINE, DEFAULT_RANKS)
    assert [(one.rank, one.stands_for) for one in chosen] == [
        (0, "stage 0"),
        (2, "stages 1 to 2"),
        (7, "stage 3"),
    ]
    odd = replace(EIGHT_BLOCKS, vocab=257)
    assert [one.rank for one in chosen_ranks(odd, PIPELINE, DEFAULT_RANKS)] == [0, 2, 6, 7]
    every = chosen_ranks(EIGHT_BLOCKS, PIPELINE, "stages")
    assert [one.stands_for for one in every] == [f"stage {stage}" for stage in range(4)]


@pytest.mark.parametrize("wish", ["first", "8", "1-3", "", "0,,1", "-1"])
def test_ranks_that_are_none_are_refused(wish: str) -> None:
    with pytest.raises(SpecError, match="--ranks"):
        chosen_ranks(EIGHT_BLOCKS, PIPELINE, wish)


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ({"num_microbatches": 3}, 3),
        ({"num_microbatches": 64}, 3),
        ({"nodes": 4, "num_microbatches": 64, "pp": 4, "schedule": "1f1b", "dp_replicate": 1}, 5),
    ],
)
def test_a_step_is_shortened_to_what_shows_all_of_it(layout: dict[str, Any], number: int) -> None:
    plan = make_plan("cpu", **layout)
    short = shortened(plan)
    assert short.layout.num_microbatches == number
    assert short.training.global_batch == short.layout.global_batch
    assert replace(short.layout, num_microbatches=plan.layout.num_microbatches) == plan.layout


@given(
    pp=st.sampled_from([1, 2, 4]),
    dp_replicate=st.integers(1, 4),
    dp_shard=st.integers(1, 8),
    tp=st.integers(1, 4),
)
def test_every_stage_is_stood_for(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> None:
    layout = Layout(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        tp=tp,
        schedule="none" if pp == 1 else "1f1b",
        num_microbatches=4,
    )
    ranks = [one.rank for one in chosen_ranks(EIGHT_BLOCKS, layout, DEFAULT_RANKS)]
    assert {0, layout.world - 1} <= set(ranks)
    assert ranks == sorted(set(ranks))
    assert {0, pp - 1} <= {stage_of(rank, layout) for rank in ranks}
    every = {one.rank for one in chosen_ranks(EIGHT_BLOCKS, layout, "stages")}
    assert {stage_of(rank, layout) for rank in every} == set(range(pp))


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python3: No module named 'torch'\n", "pip install torch"),
        ("warning\nerror: this trainer cannot run tp 3\n", "cannot run tp 3"),
        ("", "exit code 2"),
    ],
)
def test_why_there_is_no_report(monkeypatch: pytest.MonkeyPatch, stderr: str, said: str) -> None:
    ended = subprocess.CompletedProcess([sys.executable], 2, "", stderr)
    monkeypatch.setattr(rehearse_module, "_ended", lambda _words: ended)
    with pytest.raises(LaunchError, match=said):
        rehearse(make_plan("cpu"), (CHOSEN,))
