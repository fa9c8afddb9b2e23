"""The answer: one screen, one JSON object, one saved plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from tests.cli.small import DEMO, on_a_machine_without_gpus, words

ASKED = words(
    "recommend --model llama-3.2-3b --gpus 16 --hardware dgx-h100 --tokens 1T --global-batch 256"
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def ask(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[str, str]:
    """stdout and stderr of a command that succeeds."""
    code = exit_code_of(given)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


def ask_json(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    """The JSON object on stdout."""
    document: dict[str, Any] = json.loads(ask(capsys, *given, "--json")[0])
    return document


@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("given", [ASKED, DEMO], ids=["3b", "demo"])
def test_the_screen_is_never_wider_than_the_terminal(
    columns: int,
    given: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = ask(capsys, *given)
    assert max(map(len, out.splitlines())) <= columns
    assert all(line == line.rstrip() for line in out.splitlines())
    assert out.isascii()
    assert "\x1b" not in out, "no colour"


def test_the_screen_answers_which_will_it_fit_and_how_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = ask(capsys, *ASKED)
    for said in (
        "llama-3.2-3b (3.21 B parameters) on 16 x h100-sxm-80g (2 nodes, dgx-h100)",
        "  USE   ",
        "(80 %: ",
        "tokens/s",
        "MFU",
        "to train",
        "GiB per GPU",
        "sure to fit",
        "  limit ",
        "fitted from published runs",
        "Alternatives",
        "Guessed",
        "explain",
        "sequences of 4,096 tokens (--seq-len)",
        "8 % of device memory left free (--headroom)",
        "at least 95 % sure to fit (--fits)",
    ):
        assert said in out
    assert "saved as fsdpplan.json" in err
    assert "emit-launch" in err


def test_every_default_is_said_and_no_given_value_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(ask_json(capsys, *ASKED)["assumptions"])
    for flag in (
        "--seq-len",
        "--precision",
        "--reduce-dtype",
        "--optimizer",
        "--headroom",
        "--fits",
    ):
        assert flag in said
    for flag in ("--global-batch", "--hardware", "--gpus", "--tokens"):
        assert flag not in said


def test_no_gpu_here_means_the_default_profile_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = ask_json(capsys, *words("recommend --params 1e9 --gpus 8"))
    assert document["cluster"]["name"] == "dgx-h100"
    assert any("no GPU was found here" in text for text in document["assumptions"])
    assert any("the shape is inferred" in text for text in document["assumptions"])


def test_json_holds_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    document = ask_json(capsys, *ASKED)
    assert {"schema_version", "model", "cluster", "training", "plans", "search"} <= set(document)
    assert {"assumptions", "warnings"} <= set(document)
    counts = {"candidates", "feasible", "priced", "pruned"}
    assert {*counts, "rejected", "seconds"} == set(document["search"])
    ranks = {plan["rank"] for plan in document["plans"]}
    assert set(document["not_told_apart"]) <= ranks - {1}
    assert document["fastest_rank"] in ranks
    assert [plan["rank"] for plan in document["plans"]] == list(
        range(1, len(document["plans"]) + 1)
    )
    first = document["plans"][0]
    assert {"dp_replicate", "dp_shard", "tp", "pp", "micro_batch"} <= set(first["layout"])
    step = first["estimate"]["step_seconds"]
    assert step["lower"] <= step["expected"] <= step["upper"]
    assert first["estimate"]["memory"]["peak_allocated_bytes"] > 0
    assert document["training"]["tokens"] == 10**12


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = ask(capsys, *ASKED, "--json")
    assert out.startswith("{")
    assert out.endswith("}\n")
    assert "saved as" in err


def test_nothing_is_saved_where_nothing_is_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of([*ASKED, "--no-save"]) == 0
    assert "not saved" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert exit_code_of([*ASKED, "--no-save", "--save", "x.json"]) == 2
    assert "contradict" in capsys.readouterr().err


def test_the_saved_plan_is_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = ask_json(capsys, *ASKED, "--save", "other.json")
    plan = read_plan(tmp_path / "other.json")
    assert plan.layout.dp_shard == document["plans"][0]["layout"]["dp_shard"]
    assert plan.estimate.runnable
    assert len(plan.alternatives) == len(document["plans"])
    assert plan.assumptions == tuple(document["assumptions"])
    assert dict(plan.sources)["training.tokens"] == "flag --tokens"
    assert dict(plan.sources)["training.seq_len"] == "default"
    assert not (tmp_path / "fsdpplan.json").exists()


def test_a_plan_for_another_software_is_saved_for_a_program_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words("recommend --params 1e9 --gpus 8 --hardware dgx-h100 --runtime autocast")
    _, err = ask(capsys, *given)
    assert "--script train.py" in err
    assert not read_plan(Path("fsdpplan.json")).estimate.runnable


def test_nothing_fits_says_by_how_much_and_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "recommend --params 70e9 --gpus 8 --hardware dgx-h100 --offload none"
    code = exit_code_of(words(given))
    out, err = capsys.readouterr()
    assert code == 3
    assert out == ""
    assert "GiB too much" in err
    assert not Path("fsdpplan.json").exists()


def test_json_says_what_was_rejected_when_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words("recommend --params 70e9 --gpus 8 --hardware dgx-h100 --json --offload none")
    assert exit_code_of(given) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "NoFeasibleLayout"
    assert sum(error["rejected"].values()) > 0


def test_the_same_question_gets_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ask(capsys, *ASKED)[0], ask(capsys, *ASKED)[0]
    assert first == second


MIXTURES = {
    "mixtral-8x7b": (
        words("recommend --model mixtral-8x7b --gpus 64"),
        ("46.7 B parameters, 12.9 B active by 2 of 8 experts", "ep "),
    ),
    "two counts": (
        words("recommend --params 235e9 --active-params 22e9 --gpus 256"),
        ("22.0 B active by 8 of 128 experts", "ep "),
    ),
}


@pytest.mark.parametrize(("given", "said"), MIXTURES.values(), ids=MIXTURES.keys())
def test_a_mixture_of_experts_is_planned_and_saved(
    given: tuple[str, ...], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = ask(capsys, *given)
    flat = " ".join(out.split())
    for text in said:
        assert text in flat
    assert "fsdpplan run" in err
    assert read_plan(Path("fsdpplan.json")).model.experts is not None
    assert max(map(len, out.splitlines())) <= 80


def test_the_screen_says_what_the_band_stands_on_and_counts_memory_three_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flat = " ".join(ask(capsys, *ASKED)[0].split())
    assert "trust fitted from published runs" in flat
    flat = " ".join(ask(capsys, "explain")[0].split())
    assert "fitted from published runs)" in flat
    assert "GiB allocated" in flat
    assert "GiB reserved" in flat
    ask(capsys, *words("recommend --model llama-3.2-3b --gpus 16 --pp 4 --global-batch 256"))
    flat = " ".join(ask(capsys, "explain")[0].split())
    assert "of 4 is the fullest, the emptiest needs" in flat


def test_what_ties_with_the_fastest_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words("recommend --model llama-3.2-1b --gpus 8 --hardware dgx-h200")
    ranks = ask_json(capsys, *given)["not_told_apart"]
    assert len(ranks) > 1
    flat = " ".join(ask(capsys, *given)[0].split())
    assert f"(ranks 1 to {ranks[-1]} tie: inside the model's error)" in flat
    flat = " ".join(ask(capsys, "explain")[0].split())
    assert "It goes to the simpler layout: the fewest kinds of parallelism" in flat


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "asked",
    [
        "recommend --model llama-3.1-8b --gpus 24 --global-batch 960 --hardware dgx-h100",
        "recommend --params 70e9 --gpus 64 --hardware dgx-h100",
        "recommend --model llama-3.1-8b --gpus 1024 --hardware dgx-h100 --seq-len 8192",
    ],
)
def test_the_fastest_is_on_the_screen_and_in_the_json_with_the_figures_said_of_it(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ask_json(capsys, *words(asked))
    plans, rank = document["plans"], document["fastest_rank"]
    steps = [plan["estimate"]["step_seconds"]["expected"] for plan in plans]
    assert steps[rank - 1] == min(steps)
    for plan, step in zip(plans, steps, strict=True):
        assert plan["behind_fastest_fraction"] == pytest.approx(step / min(steps) - 1)
        assert plan["difference_error_fraction"] > 0
    assert rank > 1
    said = plans[0]["reason"]
    assert said.startswith(f"{steps[0] / min(steps) - 1:.1%} slower than the fastest (rank {rank})")
    flat = " ".join(ask(capsys, *words(asked))[0].split())
    shown = re.search(
        rf" {rank} [A-Z][A-Za-z0-9, ]*? ([0-9.]+) (m?s) [0-9.]+ GiB the fastest; ", flat
    )
    assert shown is not None
    unit_seconds = 1e-3 if shown[2] == "ms" else 1.0
    assert float(shown[1]) * unit_seconds == pytest.approx(min(steps), rel=0.005)


def test_what_fits_on_the_host_alone_is_planned_there_as_far_as_that_holds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words("recommend --params 70e9 --gpus 8 --hardware dgx-h100")
    out, _ = ask(capsys, *given)
    assert "of host memory each" in " ".join(out.split())
    assert exit_code_of([*given, "--host-memory", "512GiB"]) == 3
    assert "what is offloaded does not fit in host memory" in capsys.readouterr().err
    assert exit_code_of([*given, "--offload", "none"]) == 3
    assert "leave out --offload" in capsys.readouterr().err


def test_where_state_lies_on_the_host_adapters_that_need_none_are_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "recommend --model llama-3.2-3b --gpus 1 --hardware rtx-4090 --seq-len 1024 --no-save"
    assert exit_code_of(words(f"{asked} --offload cpu")) == 0
    # what is pinned stays: adapters with state on the host are refused
    assert "Adapters" not in capsys.readouterr().out
    assert exit_code_of(words(asked)) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert ("on the host" in screen) == ("--lora 16 (" in screen)
