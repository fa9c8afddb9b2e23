"""`calibrate`: a profile from a log, a check of a machine, and what does not go together."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import Measurement
from tests.cli.small import on_a_machine_without_gpus, words
from tests.cost.clusters import cluster
from tests.schemas import obeys
from tests.validate.artificial import SIZES, Clock, Faults, log_of


@pytest.fixture(autouse=True)
def _in_a_folder_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def write(rows: tuple[Measurement, ...], name: str = "log.jsonl") -> None:
    """A log as the measuring program writes it."""
    lines = [
        json.dumps({"kind": type(row).__name__.removeprefix("Measured").lower(), **asdict(row)})
        for row in rows
    ]
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], text: str, code: int = 0) -> tuple[str, str]:
    assert exit_code_of(words(text)) == code
    out, err = capsys.readouterr()
    return out, err


def document(capsys: pytest.CaptureFixture[str], text: str, code: int = 0) -> dict[str, Any]:
    out, _ = run(capsys, f"{text} --json", code)
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_log_of_gpus_becomes_a_profile_of_the_same_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    true = cluster(gpus=8)
    write(log_of(true))
    out, err = run(capsys, "calibrate --from log.jsonl")
    assert "8 x NVIDIA H100 80GB HBM3, n01, measured 2026-11-22" in out
    assert "as profile dgx-h100 has it" in out
    for heading in ("Links", "Calls", "Device", "To know"):
        assert f"\n{heading}" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "saved as measured.toml (measured: log.jsonl)" in err
    assert "next: fsdpplan recommend --hardware measured.toml --gpus 8" in err
    found = load_cluster("measured.toml", gpus=16).cluster
    assert found.device.evidence == "measured"
    assert found.device.fit.matmul_fraction == pytest.approx(0.845, rel=0.02)
    assert found.gpus_per_node == 8
    start = load_cluster("dgx-h100", gpus=16).cluster
    assert found.levels[1] == start.levels[1]
    assert found.levels[0] != start.levels[0]


def test_a_plan_can_be_made_with_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=16)))
    run(capsys, "calibrate --from log.jsonl --save mine.toml")
    shape = "--model llama-3-8b --gpus 16 --seq-len 4096 --global-batch 64"
    plan = document(capsys, f"estimate {shape} --hardware mine.toml --dp-shard 16 --micro-batch 1")
    guess = document(capsys, f"estimate {shape} --hardware dgx-h100 --dp-shard 16 --micro-batch 1")
    one, other = (d["step_seconds"] for d in (plan, guess))
    assert one["expected"] == pytest.approx(other["expected"], rel=0.03)
    # most of the band is the spread between stacks, of which no kernel tells
    assert one["upper"] / one["lower"] < other["upper"] / other["lower"]


def test_cpu_processes_start_from_their_own_profile(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster("cpu", gpus=4), sizes=SIZES[:8]))
    found = document(capsys, "calibrate --from log.jsonl --save here.toml")
    obeys("calibrate", found)
    assert found["start"] == "profile cpu"
    assert found["profile"] == "here.toml"
    assert found["evidence"] == "measured"
    loopback, between = found["levels"]
    assert loopback["measured"]["rows"] == 48
    assert between["measured"] is None
    assert found["device"]["matmul_fraction"]["before"] == 0.7
    assert {call["collective"] for call in found["calls"]} >= {"all_gather", "send_recv"}
    assert load_cluster("here.toml", gpus=2).cluster.gpus == 2


def test_a_measured_profile_can_be_the_start_of_the_next_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(log_of(cluster(gpus=8)))
    run(capsys, "calibrate --from log.jsonl --save first.toml")
    found = document(capsys, "calibrate --from log.jsonl --hardware first.toml --save again.toml")
    assert found["start"] == "profile first.toml"
    first, again = (load_cluster(f"{name}.toml", gpus=16).cluster for name in ("first", "again"))
    assert again.levels[1] == first.levels[1]
    share = first.device.fit.matmul_fraction
    assert again.device.fit.matmul_fraction == pytest.approx(share, rel=0.01)


def test_a_levels_numbers_that_nobody_measured_keep_their_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(log_of(cluster(gpus=8)))
    run(capsys, "calibrate --from log.jsonl")
    profile = tomllib.loads(Path("measured.toml").read_text(encoding="utf-8"))
    network = profile["levels"][1]
    assert "DGX H100" in profile["sources"][network["ports"]["source"]]["what"]
    inside = profile["levels"][0]["bandwidth_fraction"]["source"]
    assert "by fsdpplan calibrate" in profile["sources"][inside]["how"]


def test_a_healthy_machine_passes_its_check(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=16)))
    out, err = run(capsys, "calibrate --check --from log.jsonl")
    assert err == ""
    assert "0 past their limit" in " ".join(out.split())
    assert "\nSlow" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert not Path("measured.toml").exists()


def test_a_slow_gpu_fails_the_check_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=16), faults=Faults(ranks={13: 1.8})))
    out, err = run(capsys, "calibrate --check --from log.jsonl", code=6)
    assert "rank 13 on host n02 is 1.8" in err
    assert "--exclude" in err
    assert err.count("\n") == 1
    named, others = out.split("\nHealthy")
    assert named.count("rank 13 on host n02") == 5
    assert "rank 13" not in others


def test_the_failure_stands_in_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=16), faults=Faults(levels={"infiniband": 9.0})))
    found = document(capsys, "calibrate --check --from log.jsonl", code=6)
    obeys("calibrate_check", found)
    assert found["error"]["kind"] == "GateFailed"
    assert "fsdpplan detect says what is degraded" in found["error"]["message"]
    assert found["error"]["exit_code"] == 6
    assert [gate["name"] for gate in found["slow"]] == ["level infiniband: bandwidth"]
    assert all(gate["passed"] == (gate["value"] <= gate["limit"]) for gate in found["gates"])


def test_tolerance_decides(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=8), faults=Faults(ranks={1: 1.5})))
    run(capsys, "calibrate --check --from log.jsonl --tolerance 20%", code=6)
    run(capsys, "calibrate --check --from log.jsonl --tolerance 0.8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tolerance 10%", "add --check"),
        ("--check --save x.toml", "leave out --save"),
        ("--from log.jsonl --processes 4", "leave out --processes"),
        ("--from log.jsonl --seconds 4 --plan p.json", "leave out --seconds, --plan"),
        ("", "no GPU was found here"),
        ("--hardware cpu", "such as --processes 4"),
        ("--hardware dgx-h100", "none was found here"),
        ("--hardware nothing", "no hardware profile is called"),
        ("--from nothing.jsonl", "does not exist"),
        ("--processes none", "--processes"),
        ("--seconds 0", "--seconds"),
        ("--tolerance 200%", "--tolerance"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    _, err = run(capsys, f"calibrate {options}", code=2)
    assert said in err
    assert err.count("\n") == 1


def test_a_log_of_unknown_gpus_asks_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    machine, *rows = log_of(cluster(gpus=8))
    text = json.dumps({"kind": "machine", **asdict(machine), "device_name": "NVIDIA X1"})
    Path("log.jsonl").write_text(f"{text}\n", encoding="utf-8")
    _, err = run(capsys, "calibrate --from log.jsonl", code=2)
    assert "no profile has 8 x NVIDIA X1: say by --hardware" in err
    assert rows


def test_a_start_of_another_name_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=8)))
    same = document(capsys, "calibrate --from log.jsonl --hardware dgx-h100")
    obeys("calibrate", same)
    other = document(capsys, "calibrate --from log.jsonl --hardware dgx-h200")
    assert not any("name the right one" in note for note in same["notes"])
    assert any("but profile dgx-h200 is of NVIDIA H200" in note for note in other["notes"])


def test_a_log_of_gpus_does_not_fit_a_profile_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(log_of(cluster(gpus=8)))
    _, err = run(capsys, "calibrate --from log.jsonl --hardware cpu", code=2)
    assert "name another profile with --hardware" in err


@pytest.mark.gloo
def test_two_processes_of_this_machine_are_measured_and_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(capsys, "calibrate --hardware cpu --processes 2 --seconds 5 --save here.toml")
    assert len(read_measurements(Path("here.jsonl"))) > 10
    assert "measure: 1/" in Path("here.log").read_text()
    found = load_cluster("here.toml", gpus=2).cluster
    assert found.device.kind == "cpu"
    # a busy machine may show nothing of its links: their numbers are then those of the profile
    assert found.levels[0].name == load_cluster("cpu", gpus=2).cluster.levels[0].name
    check = "calibrate --check --from here.jsonl --hardware here.toml --tolerance 90%"
    assert exit_code_of(words(check)) in (0, 6)  # 6: one process had less of this machine
    assert "comparisons" in capsys.readouterr().out


def test_noise_does_not_change_what_is_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    write(log_of(cluster(gpus=8), clock=Clock(noise=0.1, seed=4)))
    first, second = (run(capsys, "calibrate --from log.jsonl")[0] for _ in range(2))
    assert first == second
