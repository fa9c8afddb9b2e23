from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan import __version__
from fsdpplan.emit.slurm.node_check import node_check
from fsdpplan.node import look
from fsdpplan.node.look import driver_in, folder_problem, versions
from fsdpplan.trainer.checkpoint.owner import note_saved, require_kept
from fsdpplan.trainer.errors import TrainerError

PROGRAM = node_check(several=True)
ROOT = str(Path(__file__).resolve().parents[2])


def check(
    version: str = "", gpus: int = 0, head: str = "", here: str = "n1", *, cwd: str = ROOT
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, here, version, str(gpus), head, ""],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_node_that_can_do_its_part_says_so() -> None:
    assert check(__version__) == (0, "fsdpplan: n1 is ready\n")


def test_another_version_of_fsdpplan_is_refused() -> None:
    code, said = check("99.0")
    assert code == 5
    assert f"fsdpplan {__version__} is installed here, fsdpplan 99.0 wrote the script" in said
    assert len(said.splitlines()) == 1


def test_too_few_gpus_are_refused() -> None:
    code, said = check(gpus=1000)
    assert code == 5
    assert "the plan uses 1000 a node" in said


def test_a_torch_that_is_not_built_for_rocm_is_refused_before_the_gpus_are_missed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "n1", "", "1000", "", "", "torch=2.8,", "build=rocm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "is not built for ROCm, and the plan is for GPUs of AMD" in done.stderr
    assert "--python" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_variables_that_hide_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    _, said = check(gpus=1000)
    assert "HIP_VISIBLE_DEVICES=1 ROCR_VISIBLE_DEVICES=0,1" in said


def test_a_first_host_that_nobody_knows_is_refused() -> None:
    code, said = check(head="no-such-host.invalid")
    assert code == 5
    assert "cannot resolve no-such-host.invalid" in said


def test_a_first_host_that_would_be_this_node_itself_is_refused() -> None:
    code, said = check(head="localhost", here="n2")
    assert code == 5
    assert "this node itself" in said
    assert check(head="localhost", here="localhost")[0] == 0


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, "n1", "", "0", "", ""],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "--env-setup" in done.stderr


def test_this_machine_knows_localhost() -> None:
    # What the test above rests on.
    assert any(info[4][0] in ("127.0.0.1", "::1") for info in socket.getaddrinfo("localhost", None))


HCAS = "=mlx5_0,mlx5_1:1"
TREE = {
    "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "infiniband/mlx5_1/ports/1/state": "4: ACTIVE\n",
    "infiniband/mlx5_1/ports/2/state": "1: DOWN\n",
    "net/eno1/operstate": "up\n",
    "net/ib0/operstate": "unknown\n",
    "net/eno2/operstate": "down\n",
}


def assumed(tmp_path: Path, word: str, *, exported: str | None = None) -> tuple[int, str]:
    """What the check says of one assumption on a node with the adapters of `TREE`."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    name, _, value = word.partition("=")
    program = PROGRAM.replace("/sys/class", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program, "n1", "", "0", "", "", word],
        env={**os.environ, name: value if exported is None else exported},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "word",
    [
        f"NCCL_IB_HCA={HCAS}",
        "NCCL_IB_HCA==mlx5_1",
        "NCCL_SOCKET_IFNAME==eno1",
        "NCCL_SOCKET_IFNAME==ib0",
        f"file={__file__}",
    ],
)
def test_a_node_with_what_the_variables_name_is_ready(tmp_path: Path, word: str) -> None:
    assert assumed(tmp_path, word) == (0, "fsdpplan: n1 is ready\n")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("NCCL_IB_HCA==mlx5_0,mlx5_7", "adapter mlx5_7, which NCCL_IB_HCA names, is missing"),
        ("NCCL_IB_HCA==mlx5_1:2", "adapter mlx5_1:2, which NCCL_IB_HCA names, is DOWN"),
        ("NCCL_SOCKET_IFNAME==eno2", "interface eno2, which NCCL_SOCKET_IFNAME names, is down"),
        ("NCCL_SOCKET_IFNAME==eth9", "is missing"),
        ("file=/no/such/libnccl-net.so", "/no/such/libnccl-net.so is missing"),
    ],
)
def test_a_node_without_it_is_named_with_the_adapter(tmp_path: Path, word: str, says: str) -> None:
    code, said = assumed(tmp_path, word)
    assert code == 5
    assert len(said.splitlines()) == 1
    assert said.startswith("fsdpplan: n1: ")
    assert says in said
    assert "--exclude" in said


def imex(
    tmp_path: Path, said: str | None, *, channel: bool = True, mnnvl: str = ""
) -> tuple[int, str]:
    """What the check says of IMEX where its daemon answers so; None: it cannot be asked."""
    folder = tmp_path / "channels"
    folder.mkdir(exist_ok=True)
    if channel:
        (folder / "channel0").touch()
    if said is not None:
        tool = tmp_path / "nvidia-imex-ctl"
        tool.write_text(f'#!/bin/sh\n[ "$*" = -q ] && echo "{said}"\n')
        tool.chmod(0o755)
    done = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM.replace("IMEX_SECONDS = 30.0", "IMEX_SECONDS = 0.0")),
            *("n1", "", "0", "", "", f"imex={folder}"),
        ],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NCCL_MNNVL_ENABLE": mnnvl},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("said", ["READY", "Failed to connect", "", None])
def test_nvlink_between_nodes_is_ready_with_a_channel(tmp_path: Path, said: str | None) -> None:
    assert imex(tmp_path, said) == (0, "fsdpplan: n1 is ready\n")


def test_nvlink_between_nodes_without_a_channel_is_refused(tmp_path: Path) -> None:
    code, said = imex(tmp_path, "READY", channel=False)
    assert code == 5
    assert f"{tmp_path}/channels has none that may be opened here" in said
    assert "NVIDIA_IMEX_CHANNELS=0" in said
    assert len(said.splitlines()) == 1


def test_a_daemon_of_imex_that_waits_is_refused_with_where_to_look(tmp_path: Path) -> None:
    code, said = imex(tmp_path, "WAITING_FOR_PEERS")
    assert code == 5
    assert "nvidia-imex, which is WAITING_FOR_PEERS here: nvidia-imex-ctl -N" in said
    assert len(said.splitlines()) == 1


def test_who_leaves_nvlink_between_nodes_needs_no_imex(tmp_path: Path) -> None:
    assert imex(tmp_path, "SHUTTING_DOWN", channel=False, mnnvl="0")[0] == 0


def test_a_torch_that_is_too_old_for_the_plan_is_refused(tmp_path: Path) -> None:
    code, said = assumed(tmp_path, "torch=99.1,ring attention by module")
    assert code == 5
    assert (
        "is installed here, and the layout (ring attention by module) needs 99.1 or newer" in said
    )
    assert "pip install torch~=99.1, take an image that has it, or plan again with --torch" in said
    assert len(said.splitlines()) == 1
    assert assumed(tmp_path, "torch=2.8,")[0] == 0


def test_a_value_of_the_users_own_is_not_looked_at(tmp_path: Path) -> None:
    assert assumed(tmp_path, "NCCL_IB_HCA==mlx5_7", exported="^mlx5_2")[0] == 0


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, said = assumed(tmp_path, "read=gone.py")
    assert code == 5
    assert "gone.py cannot be read here" in said


def test_a_folder_for_checkpoints_is_made_tried_and_left_empty(tmp_path: Path) -> None:
    assert folder_problem(str(tmp_path / "a/b")) == ""
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "cannot be written here" in folder_problem(str(tmp_path / "file"))


def test_a_folder_in_which_the_run_has_saved_is_waited_for_and_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    run.mkdir()
    monkeypatch.setenv("FSDPPLAN_RUN_FOLDER", str(run))
    note_saved(run, saved / "step-00000005")
    pauses: list[float] = []

    def mounted_at_the_third(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (saved / "step-00000005").mkdir(parents=True)

    monkeypatch.setattr(look.time, "sleep", mounted_at_the_third)
    assert folder_problem(str(saved)) == ""
    assert len(pauses) == 3
    assert capsys.readouterr().err.count(f"waits 60 s for {saved}, in which this run has") == 1
    shutil.rmtree(saved)
    monkeypatch.setattr(look, "MOUNT_SECONDS", 0.0)
    said = folder_problem(str(saved))
    assert "this run has saved step-00000005" in said
    assert f"to begin anew, remove {run / 'saves.jsonl'}" in said
    assert not saved.exists()
    assert folder_problem(str(tmp_path / "another")) == ""
    with pytest.raises(TrainerError) as refused:
        require_kept(run, saved)
    assert str(refused.value) == said


def test_what_a_node_has_is_told_without_importing_it() -> None:
    assert {"python", "torch", "fsdpplan"} <= set(versions())


def test_the_driver_says_its_version() -> None:
    said = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n"
        "GCC version: gcc version 12.3.0\n"
    )
    assert driver_in(said) == "570.133.20"
    assert driver_in("") == ""
