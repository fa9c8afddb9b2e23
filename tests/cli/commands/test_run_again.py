"""`run` on Slurm: submitted, left, come back to, resumed, chained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.errors import SpecError
from fsdpplan.run.engines.slurm import Slurm
from tests.cli.on_slurm import OnSlurm
from tests.cli.small import words
from tests.schemas import obeys


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnSlurm:
    return OnSlurm(tmp_path, monkeypatch)


def leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the first question to the controller."""
    asked = Slurm.state

    def interrupted(self: Slurm, job_id: str) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return asked(self, job_id)

    monkeypatch.setattr(Slurm, "state", interrupted)


def test_a_job_is_remembered_and_its_code_is_the_runs(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    slurm.play("pending", "running", "failed")
    assert slurm.run("--json") == 7
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["job_id"], document["ended"]) == ("77", True)
    assert "waiting for nodes to become free" in err
    record = json.loads((slurm.run_folder / "job.json").read_text())
    assert (record["engine"], record["jobs"]) == ("slurm", ["77"])
    assert record["ending"] == {"state": "FAILED", "exit_code": 7}
    assert record["metrics"] == str(slurm.run_folder / "metrics.jsonl")


def test_who_leaves_comes_back_by_attach(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys)
    slurm.play("running")
    with monkeypatch.context() as patched:
        leave_at_once(patched)
        assert slurm.run() == 130
    out, err = capsys.readouterr()
    assert "was left running" in out
    assert "with exit code" not in out
    assert "fsdpplan run --attach" in err
    assert slurm.commands.arguments("scancel") == []

    slurm.report(steps=6, of=6)
    slurm.play("running", "running", "running", "completed")
    slurm.log.write_text("0: hello from a node\n")
    assert exit_code_of(words("run --attach --no-ledger")) == 0
    out, err = capsys.readouterr()
    assert "job 77: RUNNING on node[1-2]" in err
    assert "after 6 steps" in out
    assert "predicted" in out

    slurm.play("running")  # nobody is asked any more
    assert exit_code_of(words("run --attach --no-ledger --job 77 --json")) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("run", document)
    assert (document["job_exit_code"], document["seconds"]) == (0, None)
    assert document["measured"]["step_seconds"] == pytest.approx(0.5)


def test_what_a_run_that_has_ended_complained_of_is_said_again(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    slurm.play("failed")
    slurm.log.write_text("0: [rank 1] error: the disk is full\n")
    assert slurm.run() == 7
    capsys.readouterr()
    assert exit_code_of(words("run --attach --no-ledger")) == 7
    out, err = capsys.readouterr()
    assert "It said: the disk is full" in out
    assert "run 77 has ended: FAILED" in err


def test_cancel_on_exit_ends_the_job(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys)
    slurm.play("running")
    slurm.commands.make("scancel", f"echo 9999 >{slurm.folder}/said/asked; echo $1 >>$0.args")
    slurm.commands.answers(*[slurm.recorded("running")] * 50, slurm.recorded("cancelled"))
    asked = Slurm.state
    first = iter([True])

    def interrupted(self: Slurm, job_id: str) -> object:
        if next(first, False):
            os.kill(os.getpid(), signal.SIGTERM)
        return asked(self, job_id)

    monkeypatch.setattr(Slurm, "state", interrupted)
    assert slurm.run("--cancel-on-exit") == 143
    assert slurm.commands.arguments("scancel") == ["77"]


def test_a_run_that_ended_is_resumed_in_its_folder(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys, "--checkpoint-dir", "saved")
    slurm.play("cancelled")
    assert slurm.run() == 143
    (slurm.folder / "job.sbatch").write_text("changed since")
    slurm.play("completed")
    assert slurm.run("--resume") == 0
    record = json.loads((slurm.run_folder / "job.json").read_text())
    assert (record["jobs"], record["earlier"]) == (["78"], ["77"])
    scripts = [word for word in slurm.commands.arguments("sbatch") if word.startswith("/")]
    assert scripts == [str(slurm.run_folder / "job.sbatch")] * 2


def test_a_run_that_has_trained_all_its_steps_is_not_resumed(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys, "--checkpoint-dir", "saved")
    slurm.play("completed")
    assert slurm.run() == 0
    done = '{"event": "start", "step": 0, "steps": 2}\n{"event": "step", "step": 2}\n'
    (slurm.run_folder / "metrics.jsonl").write_text(done)
    capsys.readouterr()
    assert exit_code_of(words("run --resume --no-ledger")) == 5
    assert "has trained all of its 2 steps: fsdpplan run --attach" in capsys.readouterr().err


def test_a_second_run_waits_for_the_checkpoints_of_the_first(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys, "--checkpoint-dir", "saved")
    slurm.play("running")
    with monkeypatch.context() as patched:
        leave_at_once(patched)
        slurm.run()
    capsys.readouterr()
    slurm.play("running")
    assert slurm.run() == 5
    said = capsys.readouterr().err
    assert "run 77 of this folder is RUNNING on node[1-2] and saves to the same" in said
    assert "fsdpplan cancel --job 77" in said
    assert slurm.run_folder.name  # the only one

    slurm.emit(capsys, "--checkpoint-dir", "saved-too")
    slurm.play("completed")
    assert slurm.run() == 0


def test_a_job_that_was_not_taken_leaves_no_folder(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    slurm.commands.make("sbatch", '[ "$1" = --version ] || { echo no >&2; exit 1; }')
    assert slurm.run() == 5
    assert list((slurm.folder / "fsdpplan-runs").iterdir()) == []


def test_a_job_that_cannot_be_remembered_is_cancelled(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SpecError("job.json cannot be written: No space left on device")

    slurm.emit(capsys)
    monkeypatch.setattr("fsdpplan.run.follow.under_way.write_record", full)
    assert slurm.run() == 2
    assert slurm.commands.arguments("scancel") == ["77"]
    assert list((slurm.folder / "fsdpplan-runs").iterdir()) == []


def test_a_run_that_goes_on_is_not_resumed(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys)
    slurm.play("running")
    with monkeypatch.context() as patched:
        leave_at_once(patched)
        slurm.run()
    capsys.readouterr()
    assert exit_code_of(words("run --resume --no-ledger")) == 5
    err = capsys.readouterr().err
    assert "it is RUNNING on node[1-2]" in err


def test_a_chain_waits_and_what_is_not_needed_is_cancelled(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys, "--checkpoint-dir", "saved")
    slurm.play("running", "completed")
    asked = Slurm.state

    def trained(self: Slurm, job_id: str) -> object:
        slurm.report(steps=3, of=3)
        return asked(self, job_id)

    monkeypatch.setattr(Slurm, "state", trained)
    assert slurm.run("--chain 3") == 0
    submitted = slurm.commands.arguments("sbatch")
    assert [word for word in submitted if word.startswith("--dep")] == [
        "--dependency=afterany:77",
        "--dependency=afterany:78",
    ]
    assert slurm.commands.arguments("scancel") == ["79", "78"]
    assert json.loads((slurm.run_folder / "job.json").read_text())["jobs"] == ["77", "78", "79"]


def test_a_chain_that_is_not_taken_whole_is_taken_back(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys, "--checkpoint-dir", "saved")
    slurm.commands.make(
        "sbatch",
        'case "$*" in --version|*afterany:78*) [ "$1" = --version ] && exit 0; '
        "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1;; *afterany*) echo 78;; "
        "*) echo 77;; esac",
    )
    assert slurm.run("--chain 3") == 5
    err = capsys.readouterr().err
    assert "the first 2 were submitted and are cancelled again" in err
    assert slurm.commands.arguments("scancel") == ["78", "77"]


@pytest.mark.parametrize(
    ("options", "words_of_it"),
    [
        ("run --chain 2 --target slurm", "--checkpoint-dir"),
        ("run --chain 2 --target here", "--target slurm"),
        ("run --cancel-on-exit --target here", "leave it out"),
        ("run --smoke --chain 2 --from plan", "--smoke"),
        ("run --job 77", "--attach"),
        ("run --attach --resume", "leave one of them out"),
        ("run --attach --from plan", "--from"),
        ("run --attach --chain 2", "--chain"),
        ("run --attach --dry-run", "--dry-run"),
        ("run --resume --smoke", "--smoke"),
        ("run --attach --steps 3", "options of the job"),
        ("run --attach job.sbatch", "FILE"),
        ("run --attach --job 12_3", "job array"),
        ("run job.sbatch --from plan", "--from"),
        ("run job.sbatch --steps 3", "options of the job"),
        ("run nothing.sbatch", "does not exist"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    options: str, words_of_it: str, slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    slurm.play("completed")
    slurm.run()
    capsys.readouterr()
    assert exit_code_of(words(options)) == 2
    err = capsys.readouterr().err
    assert words_of_it in err
    assert err.count("\n") == 1


def test_nothing_to_come_back_to_is_said(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words("run --attach")) == 2
    assert "nothing was launched" in capsys.readouterr().err


def test_a_script_of_another_name_is_run_as_it_stands(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.emit(capsys)
    (slurm.folder / "job.sbatch").rename(slurm.folder / "other.sbatch")
    slurm.play("completed")
    assert slurm.run("other.sbatch") == 0
    assert "other.sbatch: trains 20 steps on" in capsys.readouterr().err


def test_a_task_of_a_job_array_runs_nothing(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.run() == 5
    assert "task of a job array" in capsys.readouterr().err


def test_a_run_comes_into_the_ledger_once(
    slurm: OnSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.emit(capsys)
    slurm.play("running")
    ledger = f"--ledger {slurm.folder}/ledger.sqlite"
    with monkeypatch.context() as patched:
        leave_at_once(patched)
        exit_code_of(words(f"run --target slurm {ledger}"))
    slurm.report(steps=6, of=6)
    slurm.play("completed")
    for _ in range(2):
        assert exit_code_of(words(f"run --attach {ledger}")) == 0
    capsys.readouterr()
    assert exit_code_of(words(f"ledger --json {ledger}")) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1


@pytest.fixture
def manifest(slurm: OnSlurm, capsys: pytest.CaptureFixture[str]) -> Path:
    assert exit_code_of(words("emit-launch --target jobset --image registry/image:1")) == 0
    path = slurm.folder / "job.yaml"
    path.write_text(capsys.readouterr().out)
    return path


def test_a_manifest_goes_to_kubernetes(
    manifest: Path, slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words("run job.yaml --dry-run")) == 0
    assert "would run: kubectl" in capsys.readouterr().err
    for options, why in (("--target slurm", "manifest"), ("--chain 2", "--chain")):
        assert exit_code_of(words(f"run job.yaml {options}")) == 2
        assert why in capsys.readouterr().err


def test_where_kubectl_is_missing_one_line_says_so(
    manifest: Path,
    slurm: OnSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(slurm.commands.folder))
    assert exit_code_of(words("run job.yaml --no-ledger")) == 5
    last = capsys.readouterr().err.splitlines()[-1]
    assert "kubectl is not on PATH" in last


def test_a_job_on_kubernetes_is_measured_by_what_its_pods_print(
    manifest: Path, slurm: OnSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"step": 6, "step_seconds": 0.5, "mfu_fraction": 0.4}
    lines = [
        '{"event": "start", "step": 5, "steps": 6}',
        json.dumps({"event": "step", **event}),
        "hello",
    ]
    stamp = "2026-11-22T10:00:00.5Z"
    log = "".join(f"[pod/fsdpplan-node-0-0-x/node] {stamp} {line}\n" for line in lines)
    (slurm.folder / "log").write_text(log)
    job = {
        "kind": "JobSet",
        "metadata": {"name": "fsdpplan"},
        "status": {"conditions": [{"type": "Completed", "status": "True"}]},
    }
    (slurm.folder / "jobs").write_text(json.dumps({"items": [job]}))
    slurm.commands.make(
        "kubectl",
        f"""
case "$1" in
  apply) touch {slurm.folder}/applied ;;
  get) if [ -e {slurm.folder}/applied ]; then cat {slurm.folder}/jobs
       else echo '{{"items": []}}'; fi ;;
  logs) cat {slurm.folder}/log ;;
esac""",
    )
    assert exit_code_of(words("run job.yaml --no-ledger --json")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["job_id"].startswith("jobset/")
    assert "hello" in err
    assert (document["steps"], document["measured"]["step_seconds"]) == (1, 0.5)
    (run,) = json.loads(answer_of("status --json", capsys))["runs"]
    assert (run["engine"], run["step"], run["exit_code"]) == ("kubernetes", 6, 0)


def answer_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert exit_code_of(words(command)) == 0
    return capsys.readouterr().out
