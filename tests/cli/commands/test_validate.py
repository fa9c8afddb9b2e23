"""`validate`: one table by source, the JSON contract, and one line where the table is no table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.schemas import obeys
from tests.validate.tables import GPT_PIPELINE, LLAMA_8B, table

ROW = {
    "row",
    "source_id",
    "status",
    "reason",
    "measured_step_seconds",
    "predicted_step_seconds",
    "measured_peak_memory_bytes",
    "memory_kind",
    "predicted_peak_memory_bytes",
    "predicted_fits",
}
SOURCE = {
    "source_id",
    "rows",
    "predicted",
    "median_abs_error_fraction",
    "mean_abs_error_fraction",
    "bias_fraction",
    "coverage_fraction",
}


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Two sources: one predicted row and one skipped, and one row out of memory."""
    path = tmp_path / "runs.csv"
    path.write_text(
        table(
            LLAMA_8B | {"peak_mem_gib": "50", "notes": "mem_kind=reserved"},
            LLAMA_8B | {"offload": "nvme"},
            GPT_PIPELINE | {"source_id": "theirs", "oom": "y", "step_time_s": ""},
        )
    )
    return str(path)


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert exit_code_of(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def report(capsys: pytest.CaptureFixture[str], runs: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(show(capsys, "validate", runs, "--json"))
    return document


@pytest.mark.parametrize("columns", [80, 50])
def test_the_screen_shows_sources_skips_and_assumptions(
    columns: int, runs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = show(capsys, "validate", runs)
    assert max(map(len, out.splitlines())) <= columns
    for words in ("mine", "theirs", "offload", "mean over sources", "Assumed", "80 %"):
        assert words in " ".join(out.split())


def test_the_json_keeps_its_contract(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = report(capsys, runs)
    obeys("validate", document)
    assert [row["row"] for row in document["rows"]] == [0, 1, 2]
    assert all(row.keys() >= ROW for row in document["rows"])
    assert all(source.keys() >= SOURCE for source in document["sources"])
    first, expert, out_of_memory = document["rows"]
    assert first["status"] == "predicted"
    assert first["reason"] is None
    band = first["predicted_step_seconds"]
    assert band["lower"] <= band["expected"] <= band["upper"]
    assert first["measured_step_seconds"] == 1.3
    assert first["measured_peak_memory_bytes"] == 50 * 2**30
    assert first["memory_kind"] == "reserved"
    assert first["predicted_peak_memory_bytes"] > 2**30
    assert expert["status"] == "skipped"
    assert "offload" in expert["reason"]
    assert expert["predicted_step_seconds"] is None
    assert out_of_memory["predicted_fits"] in (True, False)
    assert out_of_memory["measured_step_seconds"] is None


def test_sources_without_a_time_have_no_error(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = report(capsys, runs)["sources"]
    assert (mine["rows"], mine["predicted"]) == (2, 1)
    assert mine["median_abs_error_fraction"] == abs(mine["bias_fraction"])
    assert (theirs["rows"], theirs["predicted"]) == (1, 1)
    assert theirs["median_abs_error_fraction"] is None


def test_a_hostile_name_does_not_break_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table(LLAMA_8B | {"source_id": "$(x) \u4e2d'; " + "w" * 500}))
    assert "wwww" in show(capsys, "validate", str(path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("validate", "none.csv"), "none.csv does not exist"),
        (("validate", "."), "is not a file"),
        (("validate", ""), "check the path"),
        (("validate", "a.csv", "b.csv"), "b.csv"),
        (("validate", "--source", "x"), "--source"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "add one row"),
        ("a,b\n1,2\n", "unknown column 'a'"),
        (table(LLAMA_8B)[:-40], "fields"),
        (table(LLAMA_8B | {"gpus": "many"}), "column gpus"),
        (table(LLAMA_8B | {"step_time_s": "1e400"}), "column step_time_s"),
        ("\x00\x01\x02", "unknown column"),
        ('"' * 10_001, "CSV"),
    ],
)
def test_a_bad_table_is_one_line_and_a_json_error(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    assert exit_code_of(("validate", str(path), "--json")) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert len(err.splitlines()) == 1
    assert json.loads(out)["error"]["exit_code"] == 2


@pytest.mark.together("validate/published")
def test_without_a_table_it_takes_the_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document: dict[str, Any] = json.loads(show(capsys, "validate", "--json"))
    assert len(document["rows"]) == 2686
    assert document["fits"]["ran"] > 1600
    assert {pair["change"] for pair in document["pairs"]} == {"compile", "async_tp", "fp8"}
    assert document["ranking"]["groups"] == len(document["groups"]) > 30
    assert {one["kind"] for one in document["memory"]} >= {"reserved", "nvidia-smi"}


def test_from_a_wheel_one_line_says_where_the_published_runs_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdpplan.files.runs.table.BENCH", Path("nowhere"))
    assert exit_code_of(("validate",)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "in a clone" in err
    assert "fsdpplan validate RUNS.csv" in err
    assert len(err.splitlines()) == 1


COLLECTIVES = """gpu,gpus,nodes,fabric,collective,bytes,time_us
H100-80GB,8,1,NVLink,all_gather,268435456,700
H100-80GB,16,2,8x400 Gb,all_gather,268435456,800
TPU,8,1,ICI,all_gather,268435456,700
"""
MATMULS = """gpu,dtype,m,n,k,achieved_tflops
H100-SXM,bf16,8192,8192,8192,780
"""


def test_tables_of_kernels_are_scored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calls, products = tmp_path / "calls.csv", tmp_path / "products.csv"
    calls.write_text(COLLECTIVES)
    products.write_text(MATMULS)
    words = ("validate", "--collectives", str(calls), "--matmuls", str(products))
    said = show(capsys, *words)
    assert "3 timed collectives, 2 predicted" in said
    assert "1 timed matmuls, 1 predicted" in said
    assert "no hardware profile for the GPU (1)" in said
    document = json.loads(show(capsys, *words, "--json"))
    obeys("validate_kernels", document)
    groups = document["collectives"]["groups"]
    assert [group["span"] for group in groups] == ["one node", "across nodes"]
    assert groups[0]["rows"] == 1
    assert document["collectives"]["rows"][2]["status"] == "skipped"
    assert document["matmuls"]["groups"][0]["tflop"] == "0.5-5"


def test_runs_and_kernels_are_scored_apart(
    capsys: pytest.CaptureFixture[str], runs: str, tmp_path: Path
) -> None:
    assert exit_code_of(("validate", runs, "--matmuls", str(tmp_path / "any.csv"))) == 2
    assert "scored apart" in capsys.readouterr().err
