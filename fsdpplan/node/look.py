"""What a node finds of itself before anything starts: can it do its part?

The text travels in the job script between apostrophes, so it has none, and only the standard
library of Python 3.9 is there for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

SMALL_SHM_BYTES = 2**30
"""What NCCL asks of containers. Source: NCCL user guide, "Runtime and MPI issues"."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
IMEX_SECONDS = 30.0
"""How long its daemon may still be starting, as one that the job before ended."""
IMEX_NOT_READY = (
    *("INITIALIZING", "STARTING_AUTH_SERVER", "WAITING_FOR_PEERS"),
    *("WAITING_FOR_RECOVERY", "INIT_GPU", "SHUTTING_DOWN"),
)
"""What nvidia-imex-ctl -q says of a daemon that does not serve yet, or any more. Source: NVIDIA
DCGM, dcgm_fields.h, DCGM_FI_IMEX_DAEMON_STATUS. Any other answer may be that nobody may ask."""
MOUNT_SECONDS = 60.0
"""How long a disk may take to be mounted, as after a restart of the node."""
OTHERWISE = "plan again with what fsdpplan detect --nodes finds, or leave the node out by --exclude"


def main(words: list[str]) -> int:
    """The exit code of the check of one node: 0 or 5.

    Words: this node, the fsdpplan that must be importable (empty: none must), GPUs a node, the head
    and all nodes with commas between them (both empty: they do not meet), then what is taken for
    granted, each as `torch=OLDEST,WHY`, `build=rocm`, `imex=FOLDER`, `read=PATH`, `save=FOLDER`,
    `file=PATH`, `NCCL_IB_HCA=VALUE` or `NCCL_SOCKET_IFNAME=VALUE`.
    """
    return 5 if look(words) else 0


def look(words: list[str]) -> str:
    """Say what this node cannot do, or that it is ready; what it cannot do."""
    problem = own_problem(version=words[1], gpus=int(words[2]), assumed=words[5:])
    say(words[0], problem)
    return problem


def say(node: str, problem: str) -> None:
    """Say what the node cannot do, or that it can."""
    if problem:
        print(f"fsdpplan: {node}: {problem}", file=sys.stderr, flush=True)
    else:
        print(f"fsdpplan: {node} is ready", flush=True)


def own_problem(*, version: str, gpus: int, assumed: list[str]) -> str:
    """Why this node cannot do its part, in words; empty when it can."""
    problem = python_problem(version)
    if not problem and "build=rocm" in assumed:
        problem = build_problem()
    problem = problem or (gpu_problem(gpus) if gpus else "")
    for word in assumed:
        kind, _, value = word.partition("=")
        problem = problem or assumption_problem(kind, value)
    return problem


def python_problem(version: str) -> str:
    """Whether Python has torch and, where it is needed, the right fsdpplan."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch: give the right one by --python or --env-setup"
    if not version:
        return ""
    try:
        import fsdpplan
    except ImportError as error:
        return (
            f"{sys.executable} cannot import fsdpplan ({error}): install fsdpplan {version} "
            "there, or emit a job folder with its own trainer by --out DIR"
        )
    if fsdpplan.__version__ != version:
        return (
            f"fsdpplan {fsdpplan.__version__} is installed here, fsdpplan {version} wrote the "
            "script: install that one, or emit the script again"
        )
    return ""


def build_problem() -> str:
    """Whether torch was built for GPUs of AMD."""
    import torch

    if torch.version.hip is not None:
        return ""
    return (
        f"torch {torch.__version__} of {sys.executable} is not built for ROCm, and the plan is for "
        "GPUs of AMD: name a Python that has such a torch by --python or --env-setup, or take an "
        "image of rocm/pytorch"
    )


def gpu_problem(gpus: int) -> str:
    """Whether the planned GPUs are seen. Little shared memory is told about: NCCL may do without
    it."""
    import torch

    visible = torch.cuda.device_count()
    if visible < gpus:
        return (
            f"{visible} GPUs are visible{hidden_by()}, the plan uses {gpus} a node: ask for as "
            "many, or try the layout on CPU processes by fsdpplan run --smoke"
        )
    total = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    if total < SMALL_SHM_BYTES:
        library = "NCCL" if torch.version.hip is None else "RCCL"
        print(
            f"fsdpplan: {socket.gethostname()}: /dev/shm has {total >> 20} MiB, and "
            f"{library} may fail in it: a container takes --shm-size=1g or more",
            file=sys.stderr,
            flush=True,
        )
    return ""


def hidden_by() -> str:
    """Variables that hide GPUs, with their values; those of AMD count within each other."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    given = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return f" ({given})" if given else ""


def assumption_problem(kind: str, value: str) -> str:
    """Whether the node has what one word takes for granted. A variable in place of which the user
    exported another value is not looked at."""
    if kind == "torch":
        return torch_problem(value)
    if kind == "build":
        return ""  # looked at before the GPUs, of which such a torch sees none
    if kind == "imex":
        return imex_problem(value)
    if kind == "read":
        if not os.access(value, os.R_OK):
            return f"{value} cannot be read here: put it where every node sees it"
    elif kind == "file":
        if not os.access(value, os.R_OK):
            return f"{value} is missing, which the plan was told of: {OTHERWISE}"
    elif kind == "save":
        return folder_problem(value)
    elif os.environ.get(kind) == value:
        for name in value[value.startswith("=") :].split(","):
            problem = adapter_problem(kind, name)
            if problem:
                return problem
    return ""


def imex_problem(folder: str) -> str:
    """Whether NVLink can reach other nodes: NCCL ends where it finds such links and no IMEX, unless
    it is told to leave them.

    Source: NVIDIA IMEX guide, "IMEX Channels" (channels are not made by default, and are gone after
    a reboot); NCCL v2.30.7-1 src/mnnvl.cc.
    """
    if os.environ.get("NCCL_MNNVL_ENABLE") == "0":
        return ""
    without = "the slower network is taken by --env NCCL_MNNVL_ENABLE=0"
    found = os.listdir(folder) if os.path.isdir(folder) else []
    channels = [os.path.join(folder, name) for name in found if name.startswith("channel")]
    if not any(os.access(channel, os.R_OK) for channel in channels):
        return (
            f"NVLink reaches the other nodes by an IMEX channel only, and {folder} has none that "
            "may be opened here: have channel0 made on the node (NVreg_CreateImexChannel0=1 of "
            "the module nvidia) and let into a container (NVIDIA_IMEX_CHANNELS=0); " + without
        )
    state, end = imex_state(), time.monotonic() + IMEX_SECONDS
    while state in IMEX_NOT_READY and time.monotonic() < end:
        time.sleep(1)
        state = imex_state()
    if state not in IMEX_NOT_READY:
        return ""
    return (
        f"NVLink reaches the other nodes through nvidia-imex, which is {state} here: "
        "nvidia-imex-ctl -N shows which node is missing, systemctl status nvidia-imex why; "
        + without
    )


def imex_state() -> str:
    """What the daemon says of itself; empty where it cannot be asked, as in most containers."""
    try:
        asked = subprocess.run(
            ["nvidia-imex-ctl", "-q"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def torch_problem(needed: str) -> str:
    """Whether torch is new enough for the plan; needed: the oldest that is, a comma, and why."""
    oldest, _, why = needed.partition(",")
    here = installed("torch")
    if not release(here) or release(here) >= release(oldest):
        return ""
    what = f"the layout ({why})" if why else "fsdpplan"
    return (
        f"torch {here} is installed here, and {what} needs {oldest} or newer: pip install "
        f"torch~={oldest}, take an image that has it, or plan again with --torch "
        + ".".join(map(str, release(here)))
    )


def release(version: str) -> tuple[int, ...]:
    """Major and minor of a version of torch."""
    found = re.match("([0-9]+)[.]([0-9]+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def folder_problem(folder: str) -> str:
    """Whether something can be written there."""
    gone = gone_problem(folder)
    if gone:
        return gone
    trial = os.path.join(folder, f".fsdpplan-{socket.gethostname()}-{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        try:
            with open(trial, "x") as file:
                file.write("trial")
                file.flush()
                os.fsync(file.fileno())
        finally:
            if os.path.exists(trial):
                os.remove(trial)
    except OSError as error:
        return (
            f"--checkpoint-dir {folder} cannot be written here ({error.strerror}): take a folder "
            "with room that every node may write to"
        )
    return ""


def gone_problem(folder: str) -> str:
    """Whether this run has saved in a folder that has nothing saved here: where its disk is not
    mounted, a folder made in its place would have the run begin anew. It may be about to be."""
    run = os.environ.get("FSDPPLAN_RUN_FOLDER", "")
    saves = os.path.join(run, "saves.jsonl")
    end, waits = time.monotonic() + MOUNT_SECONDS, False
    while True:
        name = last_saved(saves, os.path.abspath(folder)) if run else ""
        if not name or has_checkpoint(folder):
            return ""
        if time.monotonic() > end:
            break
        if not waits:
            waits = True
            print(
                f"fsdpplan: {socket.gethostname()}: waits {MOUNT_SECONDS:.0f} s for {folder}, in "
                f"which this run has saved {name}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(1)
    return (
        f"this run has saved {name} in {folder}, where no checkpoint is now: its disk is not "
        "mounted here, or it was deleted; put it back and start the run again, or, to begin anew, "
        f"remove {saves}"
    )


def last_saved(saves: str, folder: str) -> str:
    """What the run saved last in a folder, as its own folder says; or nothing."""
    last = ""
    for line in text(saves).splitlines():
        try:
            said = json.loads(line)
            last = said["checkpoint"] if said["folder"] == folder else last
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a full disk
    return last


def has_checkpoint(folder: str) -> bool:
    """Whether something saved is there, whole or not: the trainer looks at it itself."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name == "latest" or name.startswith("step-") for name in names)


def adapter_problem(variable: str, name: str) -> str:
    """Whether an adapter that a variable of NCCL names is there and works."""
    device, _, port = name.partition(":")
    if variable == "NCCL_IB_HCA":
        what, folder = f"adapter {name}", f"/sys/class/infiniband/{device}/ports"
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        states = [text(f"{folder}/{p}/state") for p in found if not port or p == port]
        works = any("ACTIVE" in state for state in states)
    else:
        what, states = f"interface {name}", [text(f"/sys/class/net/{name}/operstate")]
        works = states[0] not in ("", "down")
    if works:
        return ""
    seen = " and ".join(filter(None, (state.rpartition(" ")[2] for state in states))) or "missing"
    return f"{what}, which {variable} names, is {seen}: {OTHERWISE}"


def text(path: str) -> str:
    """A small file, or nothing."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """What this node has; what it has not is left out."""
    found = {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": installed("torch"),
        "nccl": next(filter(None, map(installed, NCCL_PACKAGES)), ""),
        "fsdpplan": installed("fsdpplan"),
        "driver": driver_in(text("/proc/driver/nvidia/version"))
        or text("/sys/module/amdgpu/version"),
    }
    return {name: version for name, version in found.items() if version}


def installed(package: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_in(said: str) -> str:
    """The version in the first line of /proc/driver/nvidia/version."""
    words = said.splitlines()[0].split() if said else []
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), "")


def addresses_of(name: str) -> list[str]:
    """Addresses that a name resolves to here."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
