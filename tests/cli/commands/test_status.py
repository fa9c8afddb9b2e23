"""`status`, `logs` and `cancel`: what this folder launched."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.job_records import RunRecord, write_record
from fsdpplan.run.engines.local import RUN_ID
from fsdpplan.run.follow import logs
from tests.cli.on_slurm import OnSlurm
from tests.cli.small import words
from tests.schemas import obeys


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnSlurm:
    return OnSlurm(tmp_path, monkeypatch)


def record(slurm: OnSlurm, name: str, **values: object) -> Path:
    """A run of this folder, as `run` leaves it when somebody detaches."""
    run_folder = slurm.folder / "fsdpplan-runs" / name
    run_folder.mkdir(parents=True)
    given = {
        "engine": "slurm",
        "jobs": ("77",),
        "folder": str(slurm.folder),
        "script": str(slurm.folder / "job.sbatch"),
        "plan_sha256": "",
        "metrics": str(run_folder / "metrics.jsonl"),
        "submitted_at": f"2026-11-22T10:00:{len(list(run_folder.parent.iterdir())):02}+00:00",
        **values,
    }
    write_record(run_folder, RunRecord(**given))  # type: ignore[arg-type]
    return run_folder


def answer(capsys: pytest.CaptureFixture[str], command: str, *, code: int = 0) -> str:
    """What a command prints."""
    assert exit_code_of(words(command)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_folder_that_launched_nothing_says_so(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Nothing was launched" in answer(capsys, "status")
    assert json.loads(answer(capsys, "status --json")) == {"runs": []}
    for command in ("logs", "cancel"):
        assert exit_code_of([command]) == 2
        assert "fsdpplan run" in capsys.readouterr().err


def test_a_running_job_is_a_row_with_its_pace_and_its_plan(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    slurm.play("running")
    record(slurm, "a")
    slurm.report(steps=10, of=40)
    out = answer(capsys, "status")
    assert max(map(len, out.splitlines())) <= 80
    row = next(line for line in out.splitlines() if "10/40" in line)
    assert row.split()[:3] == ["77", "RUNNING", "10/40"]
    assert row.endswith("15.0 s")
    assert "40.0 %" in row
    assert "77: RUNNING on node[1-2]" in out
    found = json.loads(answer(capsys, "status --json"))
    obeys("status", found)
    (run,) = found["runs"]
    assert (run["step"], run["steps"], run["left_seconds"]) == (10, 40, pytest.approx(15.0))
    assert run["planned_mfu_fraction"] > 0


def test_why_a_job_waits_stands_below_the_table(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("pending")
    record(slurm, "a")
    out = " ".join(answer(capsys, "status").split())
    assert "77: PENDING (Resources: waiting for nodes to become free), expected to start" in out


def test_an_end_is_asked_for_once(slurm: OnSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.play("failed")
    record(slurm, "a")
    assert "FAILED (7)" in answer(capsys, "status")
    slurm.play("running")
    found = json.loads(answer(capsys, "status --json"))
    obeys("status", found)
    (run,) = found["runs"]
    assert (run["state"], run["exit_code"], run["ended"]) == ("FAILED", 7, True)


@pytest.mark.parametrize(
    ("left", "state", "code"),
    [
        ("", "LOST", 1),
        ('{"event": "start", "step": 0, "steps": 1}\n{"step": 1}\n', "COMPLETED", 0),
    ],
)
def test_a_job_that_slurm_has_forgotten_is_what_its_files_say(
    left: str, state: str, code: int, slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.commands.make("scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    slurm.commands.make("sacct", "exit 1")
    (record(slurm, "a") / "metrics.jsonl").write_text(left)
    (run,) = json.loads(answer(capsys, "status --json"))["runs"]
    assert (run["state"], run["exit_code"]) == (state, code)


def test_why_a_forgotten_job_gave_up_is_what_its_script_said(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.commands.make("scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    slurm.commands.make("sacct", "exit 1")
    (record(slurm, "a") / "attempts.jsonl").write_text(
        '{"event": "attempt_ended", "attempt": 4, "exit_code": 9, "next": "end", '
        '"reason": "no retry is left"}\n'
    )
    out = answer(capsys, "status")
    assert "FAILED (9)" in out
    assert "no retry is left" in out


def test_where_slurm_is_missing_a_job_is_unknown(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(slurm, "a")
    monkeypatch.setenv("PATH", str(slurm.folder))
    (run,) = json.loads(answer(capsys, "status --json"))["runs"]
    assert (run["state"], run["ended"]) == ("UNKNOWN", None)
    assert "scontrol is not on PATH" in run["words"]


def test_a_job_that_was_submitted_by_sbatch_itself_is_found_by_its_folder(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("running")
    (slurm.folder / "fsdpplan-runs/job-77").mkdir(parents=True)
    assert "77" in answer(capsys, "status")
    assert "cancelled job 77" in answer(capsys, "cancel")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1, "engine": "pbs"}']
)
def test_a_record_that_was_damaged_hides_no_other_run(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    record(slurm, "good")
    path = record(slurm, "bad", jobs=("78",)) / "job.json"
    path.write_text(text)
    slurm.play("running")
    assert exit_code_of(["status"]) == 0
    out, err = capsys.readouterr()
    assert "77" in out
    assert f"warning: {path}" in err
    assert err.count("\n") == 1
    for command in ("logs", "cancel", "cancel --all", "run --attach --no-ledger"):
        assert exit_code_of(words(command)) == 2
        assert f"{path}" in capsys.readouterr().err
    answer(capsys, "cancel --job 77")


LINES = ["fsdpplan: starts", "0: zero", "1: one", "0: zero again"]


@pytest.fixture
def printed(slurm: OnSlurm) -> OnSlurm:
    slurm.play("running")
    record(slurm, "a")
    slurm.log.write_text("\n".join(LINES) + "\nunfinished")
    return slurm


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("", ["fsdpplan: starts", "node1: zero", "node2: one", "node1: zero again", "unfinished"]),
        ("--node node1", ["node1: zero", "node1: zero again"]),
        ("--tail 2", ["node1: zero again", "unfinished"]),
        ("--node node1 --tail 1", ["node1: zero again"]),
        ("--job 77 --tail 1", ["unfinished"]),
    ],
)
def test_lines_have_the_names_of_their_nodes(
    options: str, lines: list[str], printed: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, f"logs {options}").splitlines() == lines
    document = json.loads(answer(capsys, f"logs --json {options}"))
    obeys("logs", document)
    assert (document["lines"], document["job"]) == (lines, "77")


def test_a_node_that_is_not_there_is_refused_with_those_that_are(
    printed: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words("logs --node node9")) == 2
    assert "node1, node2" in capsys.readouterr().err


def test_a_log_is_followed_until_the_job_has_ended(
    printed: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ASK_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(logs, name, 0.0)
    printed.play("running", "running", "completed")
    assert answer(capsys, "logs --follow --tail 1").splitlines()[-1] == "unfinished"
    assert exit_code_of(words("logs --follow --json")) == 2
    capsys.readouterr()


def test_numbers_stay_where_starts_took_different_nodes(
    printed: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [{"event": "attempt", "attempt": n, "nodes": ["node1", f"node{n}"]} for n in (2, 3)]
    (printed.run_folder / "attempts.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    assert "1: one" in answer(capsys, "logs").splitlines()


def test_a_job_that_printed_nothing_yet_says_so(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("pending")
    record(slurm, "a")
    assert exit_code_of(["logs"]) == 2
    assert "has printed nothing" in capsys.readouterr().err


def test_the_run_that_goes_on_is_cancelled(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("running")
    record(slurm, "a", jobs=("77", "78"))
    assert answer(capsys, "cancel").split() == ["cancelled", "job", "77,", "78"]
    assert slurm.commands.arguments("scancel") == ["78", "77"]
    found = json.loads(answer(capsys, "cancel --json"))
    obeys("cancel", found)
    assert found["cancelled"][0]["jobs"] == ["77", "78"]


def test_of_several_that_go_on_one_must_be_named(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("running")
    record(slurm, "a")
    record(slurm, "b", jobs=("80",))
    assert exit_code_of(["cancel"]) == 2
    assert "80, 77" in capsys.readouterr().err
    assert "cancelled job 77" in answer(capsys, "cancel --job 77")
    assert len(answer(capsys, "cancel --all").splitlines()) == 2
    assert exit_code_of(words("cancel --all --job 77")) == 2
    assert exit_code_of(words("cancel --job 99")) == 2
    assert "name one of" in capsys.readouterr().err


def test_what_has_ended_is_said_and_no_error(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("completed")
    record(slurm, "a")
    assert "run 77 has ended: COMPLETED" in answer(capsys, "cancel")
    assert slurm.commands.arguments("scancel") == []


def test_a_job_that_slurm_does_not_cancel_is_an_error(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.play("running")
    slurm.commands.make("scancel", "exit 1")
    record(slurm, "a")
    assert exit_code_of(["cancel"]) == 5
    assert "did not cancel job 77" in capsys.readouterr().err


def test_a_run_on_this_host_is_known_by_its_processes(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = "0123456789abcdef-of-this-test"
    run_folder = record(slurm, "a", engine="here", jobs=(mark,), host=socket.gethostname(), log="")
    (run_folder / "job.log").write_text("hello\n")
    script = subprocess.Popen(["sleep", "300"], env={**os.environ, RUN_ID: mark})
    assert "RUNNING" in answer(capsys, "status")
    assert answer(capsys, "logs") == "hello\n"
    assert "told run a on this host to end" in answer(capsys, "cancel")
    assert script.wait(timeout=240) == -15
    assert "LOST" in answer(capsys, "status")


def test_a_run_on_another_host_is_ended_there(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    record(slurm, "a", engine="here", jobs=("mark",), host="elsewhere")
    assert "UNKNOWN" in answer(capsys, "status")
    assert exit_code_of(["cancel"]) == 5
    assert "elsewhere" in capsys.readouterr().err
