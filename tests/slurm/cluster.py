"""A real Slurm on this one machine: a controller and nodes, each in a network namespace.

munged, slurmctld and one slurmd a node are the distribution's own. Each node has its own address,
host name and /etc/hosts; the file system is shared. All state is below one folder; the daemons are
stopped by the process ids in it. Nothing outside the namespaces is changed.

Facts that cost time to find:

* slurmd needs /sys/fs/cgroup, which `ip netns exec` hides: `nsenter` and `unshare` do not.
* gres.conf takes GPUs only as character devices, so they are links to /dev/null.
* `hosts: files` in nsswitch.conf keeps look-ups from waiting for a name server.
* A fresh StateSaveLocation, since a drained node stays drained over a restart.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scancel", "sinfo", "scontrol", "sacct")
TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")
START_SECONDS = 30.0


def missing() -> str | None:
    """Why no cluster can be started here, or None when one can."""
    if os.geteuid() != 0:
        return "a Slurm in network namespaces needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in (*DAEMONS, *CLIENTS, *TOOLS) if not shutil.which(name, path=path)]
    if absent:
        packages = "slurmctld slurmd slurm-client munge iproute2 util-linux"
        return f"not installed: {', '.join(absent)} (Debian: {packages})"
    # In namespaces that vanish with the shell: nothing is left to remove.
    links = "ip link add br0 type bridge && ip link add v1 type veth peer name v2"
    binds = "mount --bind /etc/hosts /etc/hosts && hostname probe"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{links} && {binds}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        return f"this machine allows no network namespaces with links: {probe.stderr.strip()}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A running cluster."""

    state: Path
    """Folder of its files."""
    nodes: int
    cpus: int
    """CPUs that each node claims."""
    gpus: int
    """GPUs that each node claims; they are not there."""

    @property
    def prefix(self) -> str:
        """Begins the names of its namespaces."""
        return f"fsdpplan{os.getpid()}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment for the client commands."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": f"{self.state}/bin:{os.environ['PATH']}",
            "SLURM_CONF": f"{self.state}/conf/slurm.conf",
        }

    def run(
        self, *command: str, cwd: Path, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command and return what it said."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=seconds,
            check=False,
        )

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        for folder in ("spool/ctld", "log", "run", "dev", "bin", "conf"):
            (self.state / folder).mkdir(parents=True)
        for node in self._node_names():
            (self.state / "spool" / node).mkdir()
        for gpu in range(self.gpus):
            (self.state / f"dev/gpu{gpu}").symlink_to("/dev/null")
        self._write_configuration()
        self._write_commands()
        self._make_namespaces()
        self._start_daemons()
        self._wait_until_idle()

    def stop(self) -> None:
        """Cancel jobs, stop the daemons by their process ids, remove the namespaces."""
        waiting = self.run("squeue", "--noheader", "--format=%A", cwd=self.state)
        if waiting.stdout.split():
            self.run("scancel", *waiting.stdout.split(), cwd=self.state)
            time.sleep(2)
        pids = [_daemon_pid(path) for path in (self.state / "run").glob("slurm*.pid")]
        _stop([pid for pid in pids if pid is not None])
        _stop([pid for pid in [_daemon_pid(self.state / "run/munged.pid")] if pid is not None])
        _stop(self._left_over_steps())
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def _namespaces(self) -> list[str]:
        return [f"{self.prefix}-{name}" for name in ("ctl", *self._node_names())]

    def _write_configuration(self) -> None:
        conf = self.state / "conf"
        addresses = {name: f"10.77.0.{10 + i}" for i, name in enumerate(self._node_names(), 1)}
        hosts = ["127.0.0.1 localhost", "10.77.0.1 slurmctl"]
        hosts += [f"{address} {name}" for name, address in addresses.items()]
        (conf / "hosts").write_text("\n".join(hosts) + "\n")
        (conf / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (conf / "slurm.conf").write_text(self._slurm_conf())
        if self.gpus:
            (conf / "gres.conf").write_text(
                f"NodeName=node[1-{self.nodes}] Name=gpu Type=h100 "
                f"File={self.state}/dev/gpu[0-{self.gpus - 1}]\n"
            )
        (conf / "munge.key").write_bytes(os.urandom(1024))
        (conf / "munge.key").chmod(0o600)

    def _slurm_conf(self) -> str:
        """Small, quick and without accounting, as many small clusters are."""
        state = self.state
        gres = f"Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        return textwrap.dedent(f"""\
            ClusterName={self.prefix}
            SlurmctldHost=slurmctl(10.77.0.1)
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            CredType=cred/munge
            AuthInfo=socket={state}/run/munge.sock,cred_expire=10
            StateSaveLocation={state}/spool/ctld
            SlurmdSpoolDir={state}/spool/%n
            SlurmctldPidFile={state}/run/slurmctld.pid
            SlurmdPidFile={state}/run/slurmd-%n.pid
            SlurmctldLogFile={state}/log/slurmctld.log
            SlurmdLogFile={state}/log/slurmd-%n.log
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SwitchType=switch/none
            MpiDefault=none
            PlugStackConfig=/dev/null
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core_Memory
            DefMemPerCPU=100
            SlurmdParameters=config_overrides
            SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
            GresTypes=gpu
            ReturnToService=2
            CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
            KillWait=5
            MinJobAge=3600
            SlurmdTimeout=60
            NodeName=node[1-{self.nodes}] NodeAddr=10.77.0.[11-{10 + self.nodes}] \
CPUs={self.cpus} RealMemory=8000 {gres} State=UNKNOWN
            PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
            """)

    def _write_commands(self) -> None:
        """`in-ns NAMESPACE HOST COMMAND...`, and the client commands from the controller's side."""
        bin_folder, conf = self.state / "bin", self.state / "conf"
        inside = (
            f'hostname "$1" && mount --bind {conf}/hosts /etc/hosts && '
            f"mount --bind {conf}/nsswitch.conf /etc/nsswitch.conf || exit 125; "
            'shift; exec "$@"'
        )
        _executable(
            bin_folder / "in-ns",
            "namespace=$1; host=$2; shift 2\n"
            'exec nsenter --net="/run/netns/$namespace" unshare --mount --uts '
            f'sh -c \'{inside}\' sh "$host" "$@"\n',
        )
        for client in CLIENTS:
            # A job's own srun is in a namespace already.
            _executable(
                bin_folder / client,
                "here=$(ip netns identify $$ 2>/dev/null)\n"
                f'case "$here" in {self.prefix}-*) exec /usr/bin/{client} "$@" ;; esac\n'
                f'exec {bin_folder}/in-ns {self.prefix}-ctl slurmctl /usr/bin/{client} "$@"\n',
            )

    def _make_namespaces(self) -> None:
        controller = f"{self.prefix}-ctl"
        for name in self._namespaces():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", controller, "link", "add", "br0", "type", "bridge")
        _ip("-n", controller, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _ip("-n", controller, "link", "set", "br0", "up")
        for number, node in enumerate(self._node_names(), 1):
            own, port = f"{self.prefix}-{node}", f"v{number}"
            _ip(
                "-n",
                controller,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                own,
            )
            _ip("-n", controller, "link", "set", port, "master", "br0", "up")
            _ip("-n", own, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")

    def _start_daemons(self) -> None:
        run, conf = self.state / "run", self.state / "conf"
        self._must(
            "munged",
            # Its socket lies in a test's private folder, where only this user looks for it.
            "--force",
            f"--key-file={conf}/munge.key",
            f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.state}/log/munged.log",
            f"--seed-file={run}/munge.seed",
            "--num-threads=2",
        )
        self._must("in-ns", f"{self.prefix}-ctl", "slurmctl", "slurmctld", "-c")
        for node in self._node_names():
            self._must("in-ns", f"{self.prefix}-{node}", node, "slurmd", "-N", node)

    def _must(self, *command: str) -> None:
        # To a file, not a pipe: a daemon would keep the pipe open.
        log = self.state / "log/start.log"
        with log.open("a") as out:
            subprocess.run(
                command,
                env={**self.environment, "PATH": f"{self.environment['PATH']}:/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=START_SECONDS,
                check=True,
            )

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        said = ""
        while time.monotonic() < deadline:
            said = self.run("sinfo", "--noheader", "--format=%T %D", cwd=self.state).stdout
            if said.split() == ["idle", str(self.nodes)]:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the nodes did not become idle: {said!r}; see {self.state}/log")

    def _left_over_steps(self) -> list[int]:
        """Processes of this cluster's jobs that outlived its daemons."""
        mark = f"SLURM_CONF={self.state}/conf/slurm.conf".encode()
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            in_job = any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)
            if mark in environment and in_job and int(folder.name) != os.getpid():
                left.append(int(folder.name))
        return left


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=START_SECONDS)


def _executable(path: Path, body: str) -> None:
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)


def _daemon_pid(pid_file: Path) -> int | None:
    """The daemon's process id, if that process is still a daemon of this kind."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return None
    return pid if name in DAEMONS else None


def _stop(pids: list[int], *, seconds: float = 15) -> None:
    """TERM to all, then wait; KILL to what is left."""
    for pid in pids:
        _signal(pid, 15)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    for pid in pids:
        _signal(pid, 9)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
