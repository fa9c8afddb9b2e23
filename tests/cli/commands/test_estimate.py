"""One layout, predicted: what was not given is derived and said, what is illegal is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import words

BASE = "estimate --model llama-3.1-8b --gpus 64 --hardware dgx-h100 "


def estimate(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    """The JSON of one estimate."""
    code = exit_code_of([*words(BASE + options), "--json"])
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert code == (0 if document["fits"] else 3), err
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
    assert exit_code_of(given) == 3
    out, err = capsys.readouterr()
    assert "DOES NOT FIT" in " ".join(out.split())
    assert "the nearest that fits: --" in err
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    "given",
    [
        "--model llama-3.1-8b --gpus 64 --sharding ddp --micro-batch 8",
        "--model llama-3.1-8b --gpus 8 --dp-replicate 8",
        "--model llama-3.1-70b --gpus 32 --dp-shard 32 --micro-batch 4",
        "--model llama-3.1-70b --gpus 24 --dp-shard 3 --tp 8 --reshard-after-forward never",
        "--model llama-3.1-70b --gpus 16 --pp 2 --dp-shard 8",
        "--model llama-3.1-405b --gpus 64 --dp-shard 64",
        "--model mixtral-8x7b --gpus 16 --dp-shard 8 --dp-replicate 2",
    ],
)
def test_the_nearest_that_fits_does_as_it_is_typed(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["estimate", *words(given), "--hardware", "dgx-h100", "--no-ledger"]
    assert exit_code_of(asked) == 3
    _, _, advice = capsys.readouterr().err.strip().rpartition("too much; ")
    if advice.startswith("the nearest that fits: "):
        flags = advice.removeprefix("the nearest that fits: ").partition(" (")[0]
        assert exit_code_of([*asked, *words(flags)]) == 0
        return
    _, _, remedy = advice.partition("with fsdpplan recommend: use ")
    model = asked[asked.index("--model") + 1]
    again = ["recommend", "--model", model, "--hardware", "dgx-h100", "--no-ledger"]
    assert exit_code_of([*again, *words(remedy.partition(";")[0])]) == 0


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


def test_the_first_blocks_recompute_and_the_stages_are_those_that_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped = "--dp-shard 8 --pp 4 --stage-blocks 9,8,8,7"
    found = estimate(capsys, f"{piped} --checkpoint-blocks 2")
    layout = found["layout"]
    assert layout["stage_blocks"] == [9, 8, 8, 7]
    assert (layout["activation_checkpointing"], layout["checkpoint_blocks"]) == ("full", 2)
    every = estimate(capsys, f"{piped} --activation-checkpointing full")
    nothing = estimate(capsys, piped)
    assert every["layout"]["checkpoint_blocks"] == "all"
    peaks = [one["memory"]["peak_allocated_bytes"] for one in (every, found, nothing)]
    assert peaks == sorted(peaks)
    twice = estimate(capsys, "--dp-shard 8 --pp 4 --stage-blocks 4,4,4,4,4,4,4,4")
    assert twice["layout"]["virtual_stages"] == 2


def test_json_names_the_stages_of_a_pipeline_that_was_balanced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimate(capsys, "--dp-shard 8 --pp 4")
    stages = found["layout"]["stage_blocks"]
    assert len(stages) == 4
    assert sum(stages) == found["model"]["layers"]
    assert estimate(capsys, "--dp-shard 32")["layout"]["stage_blocks"] == []
    same = estimate(capsys, f"--dp-shard 8 --pp 4 --stage-blocks {','.join(map(str, stages))}")
    assert same["step_seconds"] == found["step_seconds"]
    assert same["layout"] == found["layout"]


def test_the_screen_says_the_chance_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(BASE + "--dp-shard 64")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"memory fits [a-z0-9 ]+ %: [0-9.]+ GiB \(80 % band [0-9.]+ GiB to", said)


def test_a_chance_below_the_one_asked_for_is_refused_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recomputed = "--dp-shard 64 --micro-batch 8 --activation-checkpointing full"
    several = (f"{recomputed} --checkpoint-blocks {blocks}" for blocks in range(20, 33, 2))
    chances = ((one, estimate(capsys, one)["memory"]["fits_fraction"]) for one in several)
    options, chance = next(one for one in chances if 0.5 < one[1] < 1 - 1e-9)
    more = f"{(chance + 1) / 2:.12f}"
    asked = [*words(f"{BASE}{options} --headroom 0%"), "--fits"]
    assert exit_code_of([*asked, f"{chance - 1e-6:.12f}"]) == 0
    capsys.readouterr()
    assert exit_code_of([*asked, more]) == 3
    out, err = capsys.readouterr()
    assert "NOT SURE TO FIT" in " ".join(out.split())
    assert "are asked for (--fits)" in err
    assert "the nearest that fits" in err


def test_memory_of_a_host_that_is_not_known_is_assumed_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def assumed(hardware: str) -> list[str]:
        document = estimate(capsys, f"--hardware {hardware} --dp-shard 64 --offload cpu")
        return [text for text in document["assumptions"] if "host memory" in text]

    assert assumed("dgx-h100") == []
    (said,) = assumed("azure-nd-h100-v5")
    assert "410 GB/s" in said


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_mfu_names_its_peak_and_a_time_what_it_leaves_out(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["estimate", "--model", "llama-3.2-1b", "--gpus", "8", "--hardware", "dgx-h100"]
    asked += ["--precision", precision, "--dp-shard", "8", "--tokens", "1T"]
    assert exit_code_of(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"% of the {precision} peak" in said
    assert said.count("% of the bf16 peak") == 1
    assert "left out restarts" in said
