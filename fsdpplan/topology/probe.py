"""What this host is: the only place that runs commands and opens NVML; and which torch an
environment has: this one, another Python's, or that of an image file.

Torch itself is never imported: that takes seconds, and a login node may not be able to.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdpplan import __version__
from fsdpplan.errors import LaunchError, ProbeError, SpecError
from fsdpplan.spec.training import (
    NEWEST_TESTED,
    OLDEST,
    TorchRelease,
    release_of_image,
    torch_release,
)
from fsdpplan.topology.read.nvml import Facts, gpu_names, gpu_text, nvml_facts, visible_indices
from fsdpplan.topology.read.reading import host_files, host_links
from fsdpplan.topology.read.recording import (
    ENVIRONMENT,
    PACKAGES,
    Recording,
    commands_for,
    kept_text,
)

COMMAND_SECONDS = 20.0
"""scontrol waits for a controller that is busy; lspci reads the registers of every bridge."""
KILL_SECONDS = 1.0
"""A command that hangs in the driver does not even die."""
MAX_OUTPUT_BYTES = 8 * 2**20
"""Most that is kept of what a command prints, before `kept_text` shortens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """One GPU as the driver reports it."""

    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int
    """All memory of the board; torch sees a little less."""


def may_have_other_accelerators() -> bool:
    """Whether a driver of accelerators that are not NVIDIA's is loaded."""
    classes = ("kfd", "accel", "habanalabs")
    return any(Path("/sys/class", name).exists() for name in classes)


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """The GPUs of this machine that a program may use; none where there is no NVIDIA driver.

    Raises ProbeError when there is a driver that does not answer.
    """
    nvml = _import_nvml()
    if nvml is None:
        return ()
    try:
        with _opened(nvml) as driver:
            return () if not driver else tuple(_visible_gpus(nvml))
    except nvml.NVMLError as error:
        raise ProbeError(
            f"NVML failed at reading the GPUs: {error}; run nvidia-smi to see why, or name the "
            "hardware with --hardware (`fsdpplan profiles` lists it)"
        ) from error


def _visible_gpus(nvml: Any) -> Iterator[VisibleGpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [gpu_names(nvml, index, handle) for index, handle in enumerate(handles)]
    for index in visible_indices(wanted, named):
        yield VisibleGpu(
            name=gpu_text(nvml.nvmlDeviceGetName(handles[index])),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handles[index]).total),
        )


def _import_nvml() -> Any | None:
    """The NVML binding, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextmanager
def _opened(nvml: Any) -> Iterator[bool]:
    """NVML, open; False when there is no NVIDIA driver here, which is an answer, not a failure."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value not in (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            raise
        yield False
        return
    try:
        yield True
    finally:
        nvml.nvmlShutdown()


def record_host(*, root: Path = Path("/")) -> Recording:
    """All that is read of this host. `root` is where its files stand.

    It reads what `topology.places` lists and nothing else, and never fails: what could not be read
    is said in `failed` and `nvml_error`.
    """
    files, failed = host_files(root)
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    hostname = files.get("/proc/sys/kernel/hostname", "").strip()
    nvml, nvml_error = _nvml_reading()
    commands, not_run = _run_all(commands_for(hostname=hostname, environment=environment))
    return Recording(
        about=f"recorded by fsdpplan {__version__}",
        date=date.today().isoformat(),
        files=files,
        links=host_links(root),
        commands=commands,
        failed=failed | not_run,
        environment=environment,
        packages=_versions(PACKAGES),
        nvml=nvml,
        nvml_error=nvml_error,
    )


def record_software() -> Recording:
    """What of this host says its versions: a file, the packages and NVML. It never fails."""
    place = Path("/proc/driver/nvidia/version")
    try:
        files = {str(place): place.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError):
        files = {}
    nvml, nvml_error = _nvml_reading()
    return Recording(files=files, packages=_versions(PACKAGES), nvml=nvml, nvml_error=nvml_error)


def run_command(command: Sequence[str], *, timeout_seconds: float = COMMAND_SECONDS) -> str:
    """What the command prints, in English. Raises ProbeError where it does not succeed in time."""
    line = " ".join(command)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"LC_ALL": "C"},
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ProbeError(f"{line}: not found") from None
    except OSError as error:
        raise ProbeError(f"{line}: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ProbeError(f"{line}: no answer within {timeout_seconds:g} seconds") from None
    if process.returncode != 0:
        said = (errors or output).decode(errors="replace").strip().splitlines()
        raise ProbeError(": ".join([line, f"exit code {process.returncode}", *said[:1]]))
    return output[:MAX_OUTPUT_BYTES].decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started, and do not wait for one that cannot end."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=KILL_SECONDS)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _run_all(commands: Iterable[Sequence[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """(line -> output, line -> why there is none), all at once: each may take its time."""
    from concurrent.futures import ThreadPoolExecutor

    outputs: dict[str, str] = {}
    failed: dict[str, str] = {}
    wanted = list(commands)
    with ThreadPoolExecutor(max_workers=8) as pool:
        for command, answer in zip(wanted, pool.map(_answer, wanted), strict=True):
            line = " ".join(command)
            if isinstance(answer, ProbeError):
                failed[line] = str(answer).removeprefix(f"{line}: ")
            else:
                outputs[line] = kept_text(line, answer)
    return outputs, failed


def _answer(command: Sequence[str]) -> str | ProbeError:
    try:
        return run_command(command)
    except ProbeError as error:
        return error


def _nvml_reading() -> tuple[Facts | None, str | None]:
    """(what NVML said, what it failed at)."""
    nvml = _import_nvml()
    if nvml is None:
        return None, "nvidia-ml-py is not installed"
    try:
        with _opened(nvml) as driver:
            facts, failures = nvml_facts(nvml) if driver else (None, ())
    except nvml.NVMLError as error:
        return None, str(error)
    return facts, "; ".join(failures) or None


def _versions(packages: Iterable[str]) -> Mapping[str, str]:
    """Versions of the distributions that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


ASK = (
    "import importlib.metadata as have\n"
    "try: print(have.version('torch'))\n"
    "except have.PackageNotFoundError: print('none')"
)
ASK_PACKAGES = (
    "import importlib.util as have, sys\n"
    "print(*[name for name in sys.argv[1:] if have.find_spec(name) is None])"
)
IMAGE_SECONDS = 120.0
"""An image of 20 GB on a busy file system."""
IMAGE_PLACES = (
    "usr/local/lib/python3*/*-packages/torch-*.dist-info",
    "usr/lib/python3*/*-packages/torch-*.dist-info",
    "opt/*/lib/python3*/site-packages/torch-*.dist-info",
    "opt/*/*/lib/python3*/site-packages/torch-*.dist-info",
    "*/lib/python3*/site-packages/torch-*.dist-info",
)
"""Where images have their packages: NVIDIA's, the PyTorch project's (conda), virtual environments
in /opt and at the top."""

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_FOLDER = re.compile(r"/torch-([^/]+)\.dist-info$", re.MULTILINE)


def installed_torch() -> TorchRelease | None:
    """The torch beside this program; None where there is none, or it does not say."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    version = _VERSION.search(text)
    return None if version is None else _release(version[1], where="the torch installed here")


def default_torch() -> TorchRelease:
    """The release that plans are for where none is said: the one installed here, at least the
    oldest that trains; without any the newest that was tested."""
    found = installed_torch()
    return NEWEST_TESTED if found is None else max(found, OLDEST)


def require_torch(what: str) -> None:
    """Raise LaunchError where this program's Python has no torch, which `what` needs."""
    if find_spec("torch") is None:
        raise LaunchError(without_torch(what))


def without_torch(what: str) -> str:
    """That `what` needs torch, which planning does without, and what to do."""
    return (
        f"{what} needs PyTorch, and {sys.executable} has none: pip install torch there (the CPU "
        "build does), or type this where it is installed; planning needs none"
    )


def torch_of_python(python: str) -> TorchRelease:
    """The torch of another Python. Raises ProbeError where it does not answer, SpecError where it
    has none."""
    if Path(python) == Path(sys.executable) and (here := installed_torch()) is not None:
        return here
    try:
        said = run_command([python, "-c", ASK]).strip()
    except ProbeError as error:
        why = str(error).partition(ASK)[2].lstrip(": ") or str(error)
        raise ProbeError(
            f"{python} does not say which torch it has ({why}): correct --python, or give the "
            "release by --torch 2.9"
        ) from error
    if said == "none":
        raise SpecError(
            f"{python} has no torch: name the Python that the job runs by --python, or give the "
            "release by --torch 2.9"
        )
    return _release(said, where=python)


def lacking_packages(python: str, names: Sequence[str]) -> list[str]:
    """Which packages a Python does not have; none of one that does not answer."""
    if Path(python) == Path(sys.executable):
        return [name for name in names if find_spec(name) is None]
    try:
        return run_command([python, "-c", ASK_PACKAGES, *names]).split()
    except ProbeError:
        return []


def torch_of_image(image: str) -> TorchRelease | None:
    """The torch of an image: read in a file that is here, known by the name of a public one, or
    None."""
    file = Path(image)
    if file.is_file() and file.suffix in (".sqsh", ".squashfs") and shutil.which("unsquashfs"):
        found = set(_FOLDER.findall(_said_by(["unsquashfs", "-l", image, *IMAGE_PLACES], image)))
        return _release(found.pop(), where=image) if len(found) == 1 else None
    if file.is_file() and file.suffix == ".sif" and shutil.which("apptainer"):
        said = _said_by(["apptainer", "exec", image, "python3", "-c", ASK], image).strip()
        return None if said == "none" else _release(said, where=image)
    return release_of_image(image)


def _said_by(command: list[str], image: str) -> str:
    try:
        return run_command(command, timeout_seconds=IMAGE_SECONDS)
    except ProbeError as error:
        raise ProbeError(
            f"{image} does not say which torch it has ({command[0]} failed): give the release by "
            "--torch 2.9"
        ) from error


def _release(version: str, *, where: str) -> TorchRelease:
    try:
        return torch_release(version)
    except SpecError as error:
        raise ProbeError(f"{where}: {error}; give the release by --torch 2.9") from error
