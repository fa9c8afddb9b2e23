"""`run`: what it says where it cannot run, and what it prints where it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.resolve import launch as which
from fsdpplan.run.launch import Launch
from tests.cli.small import DEMO, on_a_machine_without_gpus, words
from tests.emit.plans import make_plan
from tests.schemas import obeys

ROOT = Path(__file__).resolve().parents[3]
GPU_PLAN = words("recommend --model llama-3.2-1b --gpus 8 --hardware dgx-h100 --dp-shard 8 --tp 1")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the package is not installed
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)


def test_without_a_plan_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["run"]) == 2
    assert "fsdpplan recommend" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_slurm")
def test_a_plan_for_gpus_that_are_not_here_offers_a_smoke_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(GPU_PLAN) == 0
    capsys.readouterr()
    assert exit_code_of(["run"]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "fsdpplan run --smoke" in err


@pytest.mark.parametrize("content", ["", "#!/bin/bash\necho mine\n"], ids=["empty", "not ours"])
def test_a_script_that_is_not_ours_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    (tmp_path / "job.sbatch").write_text(content)
    capsys.readouterr()
    assert exit_code_of(["run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--from plan" in err


def test_smoke_runs_here_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(DEMO) == 0
    assert exit_code_of(words("run --smoke --target slurm")) == 2
    assert "--smoke" in capsys.readouterr().err


def test_a_dry_run_shows_the_script_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    assert exit_code_of(words("run --dry-run --target here")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert "bash job.sbatch" in err
    assert exit_code_of(words("run --dry-run --target here --json")) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("run_dry_run", document)
    assert document["script"] == out
    assert [path.name for path in tmp_path.iterdir()] == ["fsdpplan.json"]


def test_a_script_for_a_trial_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    assert exit_code_of(words("emit-launch --steps 7")) == 0
    trial = "the job trains 7 steps on made-up tokens, without checkpoints, so it starts once"
    assert f"{trial}: --data and --checkpoint-dir say otherwise" in capsys.readouterr().err
    full = words("emit-launch --steps 7 --data d.bin --checkpoint-dir ck")
    assert exit_code_of(full) == 0
    assert "trains" not in capsys.readouterr().err


@pytest.mark.gloo
def test_a_smoke_run_trains_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(GPU_PLAN) == 0
    capsys.readouterr()
    code = exit_code_of(words("run --smoke --steps 8 --json"))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "not how fast it will" in err
    document = json.loads(out)
    obeys("run", document)
    assert document["job_exit_code"] == 0
    assert document["measured"]["step_seconds"] > 0
    assert document["predicted"]["step_seconds"]["expected"] > 0
    assert {row["quantity"] for row in document["comparison"]} >= {"step_seconds", "mfu_fraction"}


NCCL_LOGS = ROOT / "tests/recordings/nccl"
UNTIL_TOLD = "trap 'exit 130' INT; for n in {1..6000}; do sleep 0.1; done"


@pytest.fixture
def a_job_that_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A job on two nodes of GPUs that writes a recorded log of NCCL."""
    monkeypatch.delenv("NCCL_DEBUG", raising=False)

    def prepared(name: str, *, waits: str = "") -> None:
        script = f'cat {NCCL_LOGS / name}.log >"${{NCCL_DEBUG_FILE//%h.%p/n01.7}}"\n{waits}'
        launch = Launch(script=script, plan=make_plan("cuda", nodes=2), origin="a test")
        started = which.Started(launch=launch, target="here", folder=tmp_path)
        monkeypatch.setattr(which, "prepare", lambda *_, **__: started)

    return prepared


def test_a_job_over_sockets_is_stopped_with_one_sentence(
    a_job_that_logs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_that_logs("2.14-sockets-ib-disabled", waits=UNTIL_TOLD)
    assert exit_code_of(words("run --json")) == 5
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["job_exit_code"] == 5
    assert document["stopped"] in err
    assert "NCCL_IB_DISABLE=1 is set, so unset it" in document["stopped"]
    assert document["nccl"]["transports"] == [
        {
            "transport": "P2P/IPC",
            "between_hosts": False,
            "gpudirect": None,
            "pairs": 2,
            "channels": 2,
        },
        {
            "transport": "NET/Socket",
            "between_hosts": True,
            "gpudirect": False,
            "pairs": 2,
            "channels": 2,
        },
    ]


def test_a_stopped_job_says_so_on_the_screen(
    a_job_that_logs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_that_logs("2.14-sockets-ib-disabled", waits=UNTIL_TOLD)
    assert exit_code_of(["run"]) == 5
    out = " ".join(capsys.readouterr().out.split())
    assert "NCCL 2.14.3: P2P/IPC; NET/Socket between nodes, 2 channels." in out
    assert "The job was stopped after 0 steps" in out


def test_sockets_may_be_allowed(
    a_job_that_logs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_that_logs("2.14-sockets-ib-disabled")
    assert exit_code_of(words("run --allow-sockets --json")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["stopped"] is None
    (warning,) = document["warnings"]
    assert f"warning: {warning}" in err


def test_what_nccl_did_is_one_line_and_one_object(
    a_job_that_logs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_that_logs("2.18-infiniband-nvls")
    assert exit_code_of(["run"]) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert (
        "NCCL 2.18.5: P2P/CUMEM; NET/IB with GPUDirect between nodes, 8 of 8 adapter ports in use, "
        "4 channels, NVLS."
    ) in " ".join(out.split())
    assert exit_code_of(words("run --json")) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("run", document)
    nccl = document["nccl"]
    assert nccl["hosts"] == ["n01", "n02"]
    assert nccl["channels"] == {"collective": 4, "nvls": 16, "point_to_point": 4, "tree": 4}
    assert nccl["nvls"] == {"multicast": True, "connected": True}
    assert nccl["variables"] == [{"name": "NCCL_IB_HCA", "value": "^mlx5_bond_0"}]
    assert nccl["adapters"][0] == {
        "host": "n01",
        "name": "mlx5_0",
        "port": 1,
        "link_layer": "IB",
        "gpudirect": True,
        "used": True,
    }


@pytest.mark.parametrize("more", ["", " --smoke"])
def test_sockets_cannot_be_allowed_where_nccl_has_no_nodes_to_join(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    assert exit_code_of(words(f"run --allow-sockets --target here{more}")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "leave it out" in err
