"""A whole run on this host: its files, its ports, and no secret in anything that it leaves."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.small import words

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).resolve().parents[2]
UMASK = 0o027
"""Neither what a private file has, nor what everybody may read."""
SECRETS = {
    "HF_TOKEN": "hf_" + "Zq7" * 12,
    "WANDB_API_KEY": "0f1e2d3c" * 5,
    "AWS_SECRET_ACCESS_KEY": "wJalr/bPxRfiCYzEXAMPLEKEY1234567890abcde",
    "DB_PASSWORD": "correct-horse-battery",
}
PLAN = words(
    "recommend --layers 2 --hidden 64 --ffn-hidden 128 --heads 4 --kv-heads 2 --vocab 320 "
    "--seq-len 64 --global-batch 4 --precision fp32 --hardware cpu --gpus 2 --gpus-per-node 2 "
    "--dp-shard 2 --dp-replicate 1 --tp 1 --cp 1 --pp 1"
)
RUN = words(
    "run --target here --steps 3 --data texts --checkpoint-dir ck --checkpoint-every 2 "
    "--prometheus steps.prom --profile 2:1 --hang-seconds 0"
)
COMMANDS = (
    PLAN,
    ("emit-launch", "--out", "job", "--alerts", "alerts.yml"),
    ("run", "--dry-run", "--json", "--target", "here"),
    RUN,
    ("detect", "--record", "machine.json", "--json"),
    ("ledger", "--export", "ledger.csv"),
    ("explain",),
    ("emit-launch", "--env", f"HF_TOKEN={SECRETS['HF_TOKEN']}"),
)
PROGRAM = """
import json, sys
from fsdpplan.cli.app import exit_code_of
print([exit_code_of(words) for words in json.loads(sys.argv[1])])
"""
"""One process for all: what each costs is its start."""
CODES = b"[0, 0, 0, 0, 0, 0, 0, 2]"
LISTENS = "0A"
"""State of a socket in /proc/net/tcp. Source: proc(5), and TCP_LISTEN in the kernel's tcp.h."""
EVERYWHERE = ("00000000", "0" * 32)
THIS_HOST = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, in the kernel's byte order."""


@dataclass(frozen=True)
class Left:
    """What is left of a run."""

    folder: Path
    said: bytes
    """Of all commands, stdout and stderr."""
    alone: bool
    """Whether it had a network of its own."""
    listeners: set[tuple[str, str]]
    """(address, command line of the owner) of each socket that listened."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Plan, run, and look at it in all ways that leave something."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("some words to train on. " * 200)
    (folder / "tmp").mkdir()
    alone = own_network()
    said, listeners = run(folder, alone=alone)
    return Left(folder=folder, said=said, alone=alone, listeners=listeners)


def own_network() -> bool:
    """Whether this user can have a network namespace with a loopback device that works."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    trial = ("unshare", "--net", "ip", "link", "set", "lo", "up")
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def run(folder: Path, *, alone: bool) -> tuple[bytes, set[tuple[str, str]]]:
    """Output of the commands, and what listened meanwhile."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    if alone:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FSDPPLAN"))},
        **SECRETS,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "FSDPPLAN_LEDGER": str(folder / "ledger/runs.sqlite"),
    }
    with (folder / "tmp/said").open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=out, umask=UMASK
        )
        listeners = set(watched(process) if alone else ())
        process.wait(timeout=240)
    return (folder / "tmp/said").read_bytes(), listeners


def watched(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, str]]:
    """Listening sockets of the network that the process is in, as long as it lives."""
    ours, its = (Path(f"/proc/{pid}/ns/net") for pid in (os.getpid(), process.pid))
    while process.poll() is None:
        with suppress(OSError):
            if its.readlink() != ours.readlink():
                yield from listening(process.pid)
        time.sleep(0.1)


def listening(pid: int) -> Iterator[tuple[str, str]]:
    """What listens now in the network of a process."""
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        fields = (line.split() for line in lines)
        found |= {each[9]: each[1].partition(":")[0] for each in fields if each[3] == LISTENS}
    if found:
        yield from {(found[inode], owner) for inode, owner in owners(set(found))}


def owners(inodes: set[str]) -> Iterator[tuple[str, str]]:
    """(inode, command line) of the processes that have these sockets."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = {os.readlink(each) for each in (folder / "fd").iterdir()}
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        for inode in inodes:
            if f"socket:[{inode}]" in links:
                yield inode, command


def files(left: Left) -> list[Path]:
    """What the commands made, but for what Python and torch make in the folder for such."""
    own = {left.folder / name for name in ("texts", "texts/a.txt", "tmp")}
    everything = [path for path in left.folder.rglob("*") if path not in own]
    return [path for path in everything if (left.folder / "tmp") not in path.parents]


def test_it_trained_and_left_all_kinds_of_files(left: Left) -> None:
    names = {path.name for path in files(left)}
    wanted = {"fsdpplan.json", "job.sbatch", "job.log", "metrics.jsonl", "latest", "steps.prom"}
    wanted |= {"machine.json", "ledger.csv", "alerts.yml", "runs.sqlite", "trace-rank-0.json"}
    assert not wanted - names, left.said.decode()[-3000:]
    assert CODES in left.said


def test_no_secret_of_the_environment_is_in_anything_that_was_written(left: Left) -> None:
    for name, value in SECRETS.items():
        assert value.encode() not in left.said, name
        for path in left.folder.rglob("*"):
            assert not path.is_file() or value.encode() not in path.read_bytes(), (name, path)


def test_the_umask_decides_who_reads_what(left: Left) -> None:
    modes = {
        str(path.relative_to(left.folder)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in files(left)
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~UMASK
    }
    assert modes == {}


def test_nothing_listens_but_torchruns_rendezvous_and_gloo_on_the_loopback(left: Left) -> None:
    if not left.alone:
        pytest.skip("seeing all ports of a run needs root, for a network of its own")
    assert left.listeners
    for address, command in left.listeners:
        is_agent = "torch.distributed.run" in command
        assert address in THIS_HOST or (is_agent and address in EVERYWHERE), command
