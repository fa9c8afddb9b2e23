"""A bug report has what helps, and nothing of who asks; what fails by a fault of ours names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.job_records import RunRecord, write_record
from fsdpplan.files.plans import plan_json
from fsdpplan.run.bug_report import TAIL_BYTES, tail
from fsdpplan.run.crash import allowed, crash_path, last_crash, note_crash
from tests.emit.plans import make_plan

ENVIRONMENT = {
    "USER": "qxuser",
    "HOME": "/home/qxuser",
    "HOSTNAME": "qxlogin7",
    "HF_TOKEN": "zqtokenvalue1",
    "SLURM_JWT": "zqjwtvalue22",
    "SLURM_JOB_USER": "qxuser",
    "SLURM_JOB_NODELIST": "qxnode[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SECRET_PROJECT": "qxproject",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "=ib0",
    "NCCL_CONF_FILE": "/home/qxuser/nccl.conf",
    "TORCH_DISTRIBUTED_DEBUG": "zqtokenvalue1",
    "FSDPPLAN_PLAN": "{}",
}
LOG = [
    "fsdpplan: qxnode1: cannot reach qxnode2, the first host, at 10.7.0.12, port 20017",
    '  File "/home/qxother/train.py", line 3, in main',
    "wandb_api_key=zqsecret33 sent to https://qxuser:zqpass44@tracker.team.example.com/run",
    "me@team.example.com said ```` no",
]
SECRET = ("zqtoken", "zqjwt", "zqsecret", "zqpass", "qxuser", "qxother", "qxlogin", "qxnode")
PRIVATE = (*SECRET, "qxproject", "10.7.0.12", "me@team", "example.com")


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan and a run that has failed."""
    for name in os.environ:
        if name.startswith(
            ("SLURM", "NCCL", "TORCH", "CUDA")
        ):  # torch sets some, for tests before this
            monkeypatch.delenv(name)
    for name, value in {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FSDPPLAN_LEDGER", raising=False)
    monkeypatch.chdir(tmp_path)
    document = json.loads(plan_json(make_plan("cuda", nodes=2)))
    document["sources"] = {"model": "/home/qxuser/llama/config.json"}
    (tmp_path / "fsdpplan.json").write_text(json.dumps(document))
    run = tmp_path / "fsdpplan-runs/20261126-101010"
    run.mkdir(parents=True)
    (run / "job.log").write_text("\n".join(LOG) + "\n")
    (run / "bad-nodes").write_text("qxnode2\tdoes not answer\n")
    (run / "attempts.jsonl").write_text('{"event": "attempt", "nodes": ["qxnode1", "qxnode2"]}\n')
    record = RunRecord(
        engine="here",
        jobs=("4711",),
        folder=str(tmp_path),
        script=str(run / "job.sbatch"),
        plan_sha256="",
        metrics=str(run / "metrics.jsonl"),
        submitted_at="2026-11-26T10:10:10+00:00",
        host="qxlogin7",
        log=str(run / "job.log"),
    )
    write_record(run, record)
    assert asdict(record)["host"] == "qxlogin7"
    return tmp_path


def test_it_has_what_helps_and_no_secret_user_host_or_address(
    launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = ValueError("zqtokenvalue1 of qxuser is no number")
    assert note_crash(["run", "--env", "HF_TOKEN=zqtokenvalue1", "it's"], fault)
    assert exit_code_of(["bug-report", "--run", "newest", "--json"]) == 0
    printed = capsys.readouterr()
    assert exit_code_of(["bug-report", "--run", "20261126-101010", "--out", "report.md"]) == 0
    page = (launched / "report.md").read_text()
    for text in (printed.out, page):
        found = [word for word in PRIVATE if word in text.lower()]
        assert found == []
    report = json.loads(printed.out)
    assert report["environment"] == allowed(os.environ) | {
        "NCCL_CONF_FILE": "~/nccl.conf",
        "TORCH_DISTRIBUTED_DEBUG": "***",
    }
    assert {"NCCL_DEBUG", "SLURM_JOB_NUM_NODES"} <= report["environment"].keys()
    assert report["plan"]["layout"]["dp_shard"]
    assert report["plan"]["sources"]["model"] == "~/llama/config.json"
    assert "alternatives" not in report["plan"]
    assert {"fsdpplan", "python", "system", "torch"} <= report["versions"].keys()
    assert "ValueError: *** of user-" in report["crash"]["traceback"]
    nodes = json.loads(report["run"]["attempts"][0])["nodes"]
    assert report["run"]["bad_nodes"].keys() <= set(nodes)
    assert report["run"]["log"][1].endswith('train.py", line 3, in main')
    assert report["left_out"]["user"] >= 2
    assert "left out or replaced: " in printed.err
    assert "read it before you pass it on" in printed.err
    assert "`````text" in page, "a log with ticks stays inside of its block"
    assert "## What happened" in page


def test_a_plan_that_is_none_is_said_and_other_options_are_obeyed(
    launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (launched / "fsdpplan.json").write_text("{nothing")
    assert exit_code_of(["bug-report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"].startswith("cannot be read: ")
    assert report["run"] is None
    assert exit_code_of(["bug-report", "--json", "--no-plan"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] is None
    for words in (["--plan", "gone.json"], ["--plan", "fsdpplan.json", "--no-plan"]):
        assert exit_code_of(["bug-report", *words]) == 2
        assert "--no-plan" in capsys.readouterr().err
    assert exit_code_of(["bug-report", "--run", "4712"]) == 2


def test_a_fault_of_ours_names_the_report_and_is_kept_for_it(launched: Path) -> None:
    program = "import fsdpplan.cli.app as app; app._run = lambda words: {}[3]; app.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "recommend", "--api-key", "zqsecret33", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "KeyError: 3" in done.stderr
    assert "fsdpplan bug-report --out report.md" in done.stderr.splitlines()[-1]
    assert json.loads(done.stdout)["error"]["kind"] == "KeyError"
    kept = last_crash()
    assert kept is not None
    assert kept["command"].startswith("recommend")
    assert crash_path().stat().st_mode & 0o077 == 0
    crash_path().write_text("[")
    assert last_crash() is None


def test_of_a_long_log_no_part_of_a_line_is_taken(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    last = "the last line\n"
    cut = f"HF_TOKEN=zqtokenvalue1 {'.' * (TAIL_BYTES - len(last) - 10)}\n"
    log.write_text(f"{cut}{last}")
    assert tail(log, lines=9) == ["the last line"]
    log.write_text(last)
    assert tail(log, lines=9) == ["the last line"]
