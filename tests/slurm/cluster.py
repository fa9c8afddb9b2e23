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
from dataclasses import dataclass, field
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scancel", "sinfo", "scontrol", "sacct")
TOOLS = ("ip", "nsenter", "unshare", "mount", "umount", "hostname")
START_SECONDS = 200.0
QUOTA_BYTES = 16 * 2**20
GUARD = r"""
if read -r said; then exit; fi
state=$1; shift
for file in "$state"/run/*.pid; do
  pid=$(cat "$file")
  case $(cat "/proc/$pid/comm" 2>/dev/null) in munged | slurmctld | slurmd) kill -9 "$pid" ;; esac
done
for file in $(grep -lzsxF "SLURM_CONF=$state/conf/slurm.conf" /proc/[0-9]*/environ); do
  file=${file#/proc/}
  kill -9 "${file%%/*}"
done
for namespace in "$@"; do ip netns del "$namespace"; done
for folder in "$state"/quota/*; do umount --lazy "$folder"; done
"""
"""Waits until the tests say that they have cleaned up, or are gone: then it does so."""
SILENT_SECONDS = 20
"""A node that does not answer for so long is down."""


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


def inherited() -> dict[str, str]:
    """The environment, which threads read while pytest names each test in it."""
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


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
    name: str = ""
    """Tells it from another one of the same process."""
    quotas: int = 0
    """Folders of a file system of its own each, `state/quota/0` and on, which can be filled."""
    max_jobs: int | None = None
    """Jobs that the queue holds, ended ones too; None: as many as Slurm pleases."""
    guards: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)
    """What cleans up if these tests are killed."""

    @property
    def prefix(self) -> str:
        """Begins the names of its namespaces."""
        return f"fsdpplan{os.getpid()}{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment for the client commands."""
        return {
            **{name: value for name, value in inherited().items() if not name.startswith("SLURM_")},
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
        self._start_guard()
        for folder in ("spool/ctld", "log", "run", "dev", "bin", "conf"):
            (self.state / folder).mkdir(parents=True)
        for node in self.node_names:
            (self.state / "spool" / node).mkdir()
        for gpu in range(self.gpus):
            (self.state / f"dev/gpu{gpu}").symlink_to("/dev/null")
        self._write_configuration()
        self._write_commands()
        self._mount_quotas()
        self._make_namespaces()
        self._start_daemons()
        self._wait_until_idle()

    def stop(self) -> None:
        """Cancel jobs, stop the daemons by their process ids, remove the namespaces."""
        if _daemon_pid(self.state / "run/slurmctld.pid") is not None:
            waiting = self.run("squeue", "--noheader", "--format=%A", cwd=self.state)
            if waiting.stdout.split():
                self.run("scancel", *waiting.stdout.split(), cwd=self.state)
                time.sleep(2)
        pids = [_daemon_pid(path) for path in (self.state / "run").glob("slurm*.pid")]
        _stop([pid for pid in pids if pid is not None])
        _stop([pid for pid in [_daemon_pid(self.state / "run/munged.pid")] if pid is not None])
        _stop([*self.processes(), *self._step_daemons()])
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for number in range(self.quotas):
            quota = str(self.state / f"quota/{number}")
            subprocess.run(["umount", "--lazy", quota], check=False, capture_output=True)
        for guard in self.guards:
            guard.communicate(b"done\n")

    @property
    def node_names(self) -> list[str]:
        """node1 and on."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def namespace(self, host: str) -> str:
        """The network namespace of a node, or of the controller, `ctl`."""
        return f"{self.prefix}-{host}"

    def start_slurmd(self, node: str) -> None:
        """Start the daemon of a node."""
        self._must("in-ns", self.namespace(node), node, "slurmd", "-N", node)

    def slurmd_pid(self, node: str) -> int | None:
        """The daemon of a node, if it runs."""
        return _daemon_pid(self.state / f"run/slurmd-{node}.pid")

    def tell_address(self, node: str, *, of: str, address: str | None) -> None:
        """Have `node` find another host at `address`; None: where it is."""
        known = self._addresses() | ({} if address is None else {of: address})
        # In place: the file is mounted over /etc/hosts of what runs there.
        self._hosts_file(node).write_text(_hosts(known))

    def processes(self, **variables: str) -> list[int]:
        """Processes of this cluster's jobs that have these variables, as SLURM_JOB_ID."""
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        mark = f"SLURM_CONF={self.state}/conf/slurm.conf".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = set((folder / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            in_job = any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)
            if in_job and mark in environment and wanted <= environment:
                found.append(int(folder.name))
        return [pid for pid in found if pid != os.getpid()]

    def _step_daemons(self) -> list[int]:
        """Those of steps whose node was cut off or lost; they have no job in their environment."""
        mark = f"SLURM_CONF={self.state}/conf/slurm.conf".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_one = (folder / "comm").read_text().strip() == "slurmstepd"
                if is_one and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def _addresses(self) -> dict[str, str]:
        nodes = {name: f"10.77.0.{10 + i}" for i, name in enumerate(self.node_names, 1)}
        return {"localhost": "127.0.0.1", "slurmctl": "10.77.0.1", **nodes}

    def _hosts_file(self, host: str) -> Path:
        return self.state / f"conf/hosts.{host}"

    def _namespaces(self) -> list[str]:
        return [self.namespace(name) for name in ("ctl", *self.node_names)]

    def _start_guard(self) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self.state), *self._namespaces()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": path},
            start_new_session=True,
        )
        self.guards.append(guard)

    def _mount_quotas(self) -> None:
        for number in range(self.quotas):
            folder = self.state / f"quota/{number}"
            folder.mkdir(parents=True)
            options = ("-t", "tmpfs", "-o", f"size={QUOTA_BYTES}", "tmpfs", str(folder))
            subprocess.run(["mount", *options], check=True, capture_output=True)

    def _write_configuration(self) -> None:
        conf = self.state / "conf"
        for host in ("slurmctl", *self.node_names):
            self._hosts_file(host).write_text(_hosts(self._addresses()))
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
        limit = "" if self.max_jobs is None else f"MaxJobCount={self.max_jobs}"
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
            ReturnToService=1
            CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
            KillWait=5
            MinJobAge=3600
            SlurmdTimeout={SILENT_SECONDS}
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            {limit}
            NodeName=node[1-{self.nodes}] NodeAddr=10.77.0.[11-{10 + self.nodes}] \
CPUs={self.cpus} RealMemory=8000 {gres} State=UNKNOWN
            PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
            PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
            """)

    def _write_commands(self) -> None:
        """`in-ns NAMESPACE HOST COMMAND...`, and the client commands from the controller's side."""
        bin_folder, conf = self.state / "bin", self.state / "conf"
        inside = (
            f'hostname "$1" && mount --bind "{conf}/hosts.$1" /etc/hosts && '
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
        controller = self.namespace("ctl")
        for name in self._namespaces():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", controller, "link", "add", "br0", "type", "bridge")
        _ip("-n", controller, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _ip("-n", controller, "link", "set", "br0", "up")
        for number, node in enumerate(self.node_names, 1):
            own, port = self.namespace(node), f"v{number}"
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
        self._must("in-ns", self.namespace("ctl"), "slurmctl", "slurmctld", "-c")
        for node in self.node_names:
            self.start_slurmd(node)

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


def _hosts(addresses: dict[str, str]) -> str:
    return "".join(f"{address} {name}\n" for name, address in addresses.items())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=START_SECONDS)


def _executable(path: Path, body: str) -> None:
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)


def _daemon_pid(pid_file: Path) -> int | None:
    """The daemon's process id, if that process is still a daemon of this kind."""
    try:
        pid = int(pid_file.read_text())
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(")")
    except (OSError, ValueError):
        return None
    # Z: nobody has asked yet how it ended.
    return pid if name in DAEMONS and not rest.startswith(" Z") else None


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
