"""One layout, predicted: what was not given is derived and said, what is illegal is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import words

BASE = "estimate --model llama-3.1-8b --gpus 64 --hardware dgx-h100 "


def estimate(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    """The JSON of one estimate."""
    code = exit_code_of([*words(BASE + options), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_the_degree_that_is_left_is_derived_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    document = estimate(capsys, "--dp-replicate 8")
    assert document["layout"]["dp_shard"] == 8
    assert "dp_shard 8, the GPUs left by the other degrees" in document["assumptions"]


def test_whole_copies_need_no_degree(capsys: pytest.CaptureFixture[str]) -> None:
    layout = estimate(capsys, "--sharding ddp")["layout"]
    assert (layout["dp_replicate"], layout["dp_shard"], layout["sharding"]) == (64, 1, "ddp")


def test_a_pipeline_has_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    layout = estimate(capsys, "--pp 4 --dp-shard 16")["layout"]
    assert layout["schedule"] == "1f1b"
    interleaved = estimate(capsys, "--pp 4 --dp-shard 16 --virtual-stages 2")["layout"]
    assert interleaved["schedule"] == "interleaved_1f1b"


def test_the_global_batch_is_kept_by_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    document = estimate(capsys, "--dp-shard 64 --micro-batch 2 --global-batch 512")
    assert document["layout"]["num_microbatches"] == 4


def test_json_has_the_fields_of_the_estimate_beside_the_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = estimate(capsys, "--dp-shard 64")
    assert {"layout", "step_seconds", "tokens_per_second", "time", "memory"} <= set(document)
    assert {"communication", "mfu_fraction", "bottleneck", "runnable", "fits"} <= set(document)


def test_what_does_not_fit_is_still_priced_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(BASE + "--sharding ddp --micro-batch 8")
    assert exit_code_of(given) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("columns", [80, 50])
def test_the_collectives_fit_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert exit_code_of(words(BASE + "--dp-replicate 4 --tp 4 --pp 2 --micro-batch 1")) == 0
    out = capsys.readouterr().out
    assert "send_recv" in out
    assert max(map(len, out.splitlines())) <= columns


def test_an_illegal_layout_is_refused_with_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code_of(words(BASE + "--dp-shard 64 --gradient-sync reduce_scatter_only"))
    assert code == 2
    assert "--dp-replicate" in capsys.readouterr().err
