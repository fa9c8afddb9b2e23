"""What goes wrong on a cluster, done to one on purpose: each is undone by `heal`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.slurm.cluster import SlurmCluster, inherited

NOBODY = "10.77.0.99"
"""An address of the cluster's net that no node has."""
SLOW = ("rate", "400kbit", "burst", "3000", "limit", "20000000")
"""A token bucket that lets a packet of 1500 bytes wait for some 30 ms."""
TRIES_SECONDS = 200.0


def ranks(cluster: SlurmCluster, job_id: str, *, node: str | None = None) -> list[int]:
    """Process ids of a job's ranks, on one node or on all."""
    return [pid for pid in _of_job(cluster, job_id, node) if b"\0RANK=" in _read(pid, "environ")]


def agents(cluster: SlurmCluster, job_id: str, *, node: str | None = None) -> list[int]:
    """Process ids of the torchrun agents of a job."""
    return [
        pid
        for pid in _of_job(cluster, job_id, node)
        if b"\0RANK=" not in _read(pid, "environ")
        # Its own words, not those of a shell that carries them in a script.
        and b"\0-m\0torch.distributed.run\0" in _read(pid, "cmdline")
    ]


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def choke(pid: int) -> Callable[[], object]:
    """Let a process have no more memory than it has, in a group of its own: the kernel ends it when
    it asks for more, as it ends a job over its limit. Returns what removes the group."""
    group = Path(f"/sys/fs/cgroup/memory/fsdpplan-{pid}")
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / "memory.limit_in_bytes").write_text("4096")
    except OSError:  # no such groups here, or none that we may make
        kill([pid])
    return partial(_remove_group, group)


def _remove_group(group: Path) -> None:
    def gone() -> bool:
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:  # somebody is still in it
            return False
        return True

    if group.exists():
        kill([int(pid) for pid in (group / "cgroup.procs").read_text().split()])
        until(gone, what=f"the end of {group.name}")


def shift_clock(folder: Path, draw: random.Random) -> None:
    """As if the node that wrote what lies there had another time."""
    seconds = time.time() + draw.choice((-1, 1)) * draw.uniform(60, 2 * 86400)
    for path in [folder, *folder.rglob("*")]:
        with suppress(FileNotFoundError):
            os.utime(path, (seconds, seconds))


def hide(folder: Path) -> Callable[[], object]:
    """Take a folder away, as a file system that is not mounted any more; returns what brings it
    back."""
    aside = folder.with_name("elsewhere")
    if not folder.exists():
        return lambda: None
    folder.rename(aside)

    def back() -> None:
        assert not folder.exists(), f"{folder} was made anew: {sorted(folder.rglob('*'))}"
        aside.rename(folder)

    return back


def preempt(cluster: SlurmCluster, node: str, *, seconds: float) -> str:
    """Have a job that goes before all others take a node; its id."""
    words = (f"--nodelist={node}", "--partition=urgent", "--exclusive", "--parsable")
    options = (f"--wrap=sleep {seconds:.1f}", "--output=/dev/null", "--job-name=urgent")
    done = cluster.run("sbatch", *words, *options, cwd=cluster.state)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def held(cluster: SlurmCluster, job_id: str) -> Iterator[None]:
    """Stop the ranks, so that the job does not end before something happens to it."""
    stopped = ranks(cluster, job_id)
    kill(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        kill(stopped, signal.SIGCONT)


def kill_slurmd(cluster: SlurmCluster, node: str) -> None:
    """End a node's daemon at once."""
    pid = cluster.slurmd_pid(node)
    if pid is not None:
        kill([pid])
        # On a busy machine it takes a while to go, and would be taken for running.
        until(lambda: cluster.slurmd_pid(node) != pid, what=f"the end of slurmd on {node}")


def start_slurmd(cluster: SlurmCluster, node: str) -> None:
    """Start it again, if it is not there."""
    deadline = time.monotonic() + TRIES_SECONDS
    while cluster.slurmd_pid(node) is None:
        try:
            cluster.start_slurmd(node)
        except subprocess.CalledProcessError:
            # Its port may be in use for a moment still.
            assert time.monotonic() < deadline, f"slurmd of {node} does not start"
        time.sleep(0.5)


def set_down(cluster: SlurmCluster, node: str) -> None:
    """What an operator types."""
    _scontrol(cluster, "update", f"nodename={node}", "state=down", "reason=a test")


def drain(cluster: SlurmCluster, node: str) -> None:
    """Have no job get it any more."""
    _scontrol(cluster, "update", f"nodename={node}", "state=drain", "reason=a test")


def resume(cluster: SlurmCluster, node: str) -> None:
    """Have jobs get it again."""
    _scontrol(cluster, "update", f"nodename={node}", "state=resume")


def cut(cluster: SlurmCluster, node: str) -> None:
    """Take a node off the net."""
    _ip("-n", cluster.namespace(node), "link", "set", "eth0", "down")


def mend(cluster: SlurmCluster, node: str) -> None:
    """Put it back."""
    _ip("-n", cluster.namespace(node), "link", "set", "eth0", "up")


def slow(cluster: SlurmCluster, node: str) -> None:
    """Make what a node sends wait, by tc."""
    _ip("netns", "exec", cluster.namespace(node), "tc", *_QDISC.format("replace").split(), *SLOW)


def quick(cluster: SlurmCluster, node: str) -> None:
    """As it was."""
    words = ("tc", *_QDISC.format("del").split()[:-1])
    _ip("netns", "exec", cluster.namespace(node), *words, check=False)


def cannot_slow() -> str | None:
    """Why no link can be slowed here, or None where one can."""
    tried = f"ip link set lo up && tc {_QDISC.format('add').replace('eth0', 'lo')} {' '.join(SLOW)}"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", tried],
        env=inherited() | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"tc slows no link here: {done.stderr.strip()}" if done.returncode else None


def fill(folder: Path) -> Path:
    """Leave no byte free on the file system of `folder`; returns the file that does."""
    path = folder / "full"
    with path.open("wb", buffering=0) as file:
        piece = bytes(2**16)
        while piece:
            try:
                file.write(piece)
            except OSError:
                piece = piece[: len(piece) // 2]
    return path


def heal(cluster: SlurmCluster, nodes: tuple[str, ...]) -> None:
    """Have these nodes linked, with their daemons, and Slurm know it."""
    for node in nodes:
        mend(cluster, node)
        quick(cluster, node)
        cluster.tell_address(node, of=node, address=None)
        start_slurmd(cluster, node)

    def all_up() -> bool:
        words = ("--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T")
        said = cluster.run("sinfo", *words, cwd=cluster.state).stdout.split()
        states = dict(zip(said[::2], said[1::2], strict=True))
        for node, state in states.items():
            if state.startswith(("down", "drain")):
                _scontrol(cluster, "update", f"nodename={node}", "state=resume", must=False)
        return all(state in ("idle", "mixed", "allocated") for state in states.values())

    until(all_up, what=f"{nodes} up")


def until(true: Callable[[], bool], *, what: str, seconds: float = 200) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.1)


_QDISC = "qdisc {} dev eth0 root tbf"


def _of_job(cluster: SlurmCluster, job_id: str, node: str | None) -> list[int]:
    on_node = {} if node is None else {"SLURMD_NODENAME": node}
    return cluster.processes(SLURM_JOB_ID=job_id, **on_node)


def _read(pid: int, name: str) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _scontrol(cluster: SlurmCluster, *words: str, must: bool = True) -> None:
    done = cluster.run("scontrol", *words, cwd=cluster.state)
    assert not must or done.returncode == 0, done.stderr


def _ip(*words: str, check: bool = True) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = inherited() | {"PATH": path}
    subprocess.run(["ip", *words], env=environment, check=check, capture_output=True, timeout=200)
