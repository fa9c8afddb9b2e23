"""The probe: what the host says becomes a recording; no driver is an answer, a broken one an error
of `visible_gpus` and a note in a recording."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.errors import ProbeError
from fsdpplan.topology import probe
from fsdpplan.topology.conclude.gpus import gpus_of
from fsdpplan.topology.probe import VisibleGpu, record_host, run_command, visible_gpus
from fsdpplan.topology.read import reading
from fsdpplan.topology.read.recording import recording_from_json, recording_json
from tests.topology.fake_nvml import H100, FakeNvml, FakeNvmlError

SEEN = VisibleGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85_520_809_984)


class BrokenNvml(FakeNvml):
    """A driver that fails at `function`."""

    def __init__(self, function: str, value: int) -> None:
        super().__init__([H100])
        self.function, self.value = function, value

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == self.function:
            raise FakeNvmlError(self.value)
        return super()._answer(name, arguments)


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A host with this NVML and these commands; answers with the list of what was run."""

    def make(nvml: FakeNvml | None, outputs: dict[str, str] | None = None) -> list[str]:
        run: list[str] = []

        def answer(command: Sequence[str], **_: float) -> str:
            line = " ".join(command)
            run.append(line)
            if line not in (outputs or {}):
                raise ProbeError(f"{line}: not found")
            return (outputs or {})[line]

        use(monkeypatch, nvml)
        monkeypatch.setattr(probe, "run_command", answer)
        return run

    return make


def use(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    monkeypatch.setattr(probe, "_import_nvml", lambda: nvml)


@pytest.mark.parametrize("as_bytes", [False, True], ids=["text", "bytes"])
def test_gpus_are_listed_with_name_and_memory(
    monkeypatch: pytest.MonkeyPatch, as_bytes: bool
) -> None:
    nvml = FakeNvml([H100] * 8, as_bytes=as_bytes)
    use(monkeypatch, nvml)
    assert visible_gpus() == (SEEN,) * 8
    assert not nvml.is_open


@pytest.mark.parametrize(
    "nvml", [None, BrokenNvml("nvmlInit", 9), BrokenNvml("nvmlInit", 12), FakeNvml([])]
)
def test_no_binding_no_driver_and_no_gpu_are_all_no_gpus(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None
) -> None:
    use(monkeypatch, nvml)
    assert visible_gpus() == ()


@pytest.mark.parametrize(
    "nvml", [BrokenNvml("nvmlInit", 999), BrokenNvml("nvmlDeviceGetCount", 15)]
)
def test_a_driver_that_fails_is_an_error_that_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml
) -> None:
    use(monkeypatch, nvml)
    with pytest.raises(ProbeError, match=r"run nvidia-smi .* --hardware"):
        visible_gpus()
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1", 2), ("", 0), ("0,9,1", 1), ("GPU-2", 1), ("MIG-b", 1)]
)
def test_cuda_visible_devices_is_kept(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    mig_devices = ({"name": "MIG 1g.10gb", "uuid": "MIG-b", "memory": 10**10},)
    use(monkeypatch, FakeNvml([H100] * 3 + [H100 | {"mig": [1, 1], "mig_devices": mig_devices}]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(visible_gpus()) == count


def test_this_machine_answers() -> None:
    assert all(gpu.name and gpu.memory_bytes > 0 for gpu in visible_gpus())


def host(root: Path) -> Path:
    """A tree with a network card, a bridge above it, and an USB controller beside."""
    texts = {
        "proc/sys/kernel/hostname": "n01\n",
        "proc/meminfo": "MemTotal: 1 kB\n",
        "proc/driver/nvidia/version": "NVRM version: x\n" * 10_000,
        "etc/passwd": "root",
    }
    devices = {"0000:00:01.0": "0x060400", "0000:00:01.0/0000:01:00.0": "0x020700"}
    for path, kind in (devices | {"0000:00:02.0": "0x0c0330"}).items():
        texts[f"sys/devices/pci0000:00/{path}/class"] = f"{kind}\n"
        texts[f"sys/devices/pci0000:00/{path}/numa_node"] = "0\n"
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for path in (*devices, "0000:00:02.0"):
        link = root / "sys/bus/pci/devices" / path.rpartition("/")[2]
        link.symlink_to(f"../../../devices/pci0000:00/{path}")
    card = root / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/infiniband/mlx5_0"
    (card / "ports/1").mkdir(parents=True)
    (card / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (card / "ports/1/state").mkdir()
    (card / "device").symlink_to("../..")
    (root / "sys/class/infiniband").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").symlink_to(card)
    return root


def test_a_host_is_recorded_by_its_list_of_places(
    tmp_path: Path, silent: Callable[..., list[str]]
) -> None:
    silent(None)
    recording = record_host(root=host(tmp_path))
    card = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    assert recording.text("/proc/meminfo") == "MemTotal: 1 kB"
    assert recording.text("/sys/class/infiniband/mlx5_0/ports/1/rate") == "400 Gb/sec (4X NDR)"
    assert recording.link("/sys/class/infiniband/mlx5_0/device") == card
    assert recording.children("/sys/bus/pci/devices") == ("0000:01:00.0",)
    assert recording.link("/sys/bus/pci/devices/0000:01:00.0") == card
    assert recording.text("/sys/bus/pci/devices/0000:01:00.0/numa_node") == "0"
    assert recording.text("/etc/passwd") is None
    assert str(tmp_path) not in recording_json(recording)
    assert recording_from_json(recording_json(recording)) == recording


def test_of_a_long_file_the_first_lines_are_kept(
    tmp_path: Path, silent: Callable[..., list[str]]
) -> None:
    silent(None)
    text = record_host(root=host(tmp_path)).files["/proc/driver/nvidia/version"]
    assert reading.MAX_FILE_CHARACTERS - 20 < len(text) <= reading.MAX_FILE_CHARACTERS
    assert text.endswith("\nNVRM version: x\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [(13, "Permission denied"), (22, None), (61, None), (5, "Input/output error")],
)
def test_a_file_that_is_not_to_be_read_is_said_and_one_without_a_value_is_not(
    tmp_path: Path,
    silent: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    said: str | None,
) -> None:
    def refuse(path: Path) -> str:
        raise OSError(number, os.strerror(number))

    silent(None)
    monkeypatch.setattr(reading, "_file_text", refuse)
    recording = record_host(root=host(tmp_path))
    assert recording.files == {}
    assert recording.failed.get("/proc/meminfo") == said


def test_nvml_is_recorded_with_what_it_failed_at(
    tmp_path: Path, silent: Callable[..., list[str]]
) -> None:
    silent(FakeNvml([H100] * 2, lost={1}))
    recording = record_host(root=tmp_path)
    assert [gpu.index for gpu in gpus_of(recording)] == [0]
    assert recording.nvml_error == "GPU 1: GPU is lost"
    assert recording_from_json(recording_json(recording)) == recording


@pytest.mark.parametrize(
    ("nvml", "error"),
    [
        (None, "nvidia-ml-py is not installed"),
        (BrokenNvml("nvmlInit", 9), None),
        (BrokenNvml("nvmlInit", 999), "Not Supported"),
        (BrokenNvml("nvmlDeviceGetCount", 15), "GPU is lost"),
    ],
)
def test_without_nvml_there_is_no_gpu_and_why_is_said(
    tmp_path: Path, silent: Callable[..., list[str]], nvml: FakeNvml | None, error: str | None
) -> None:
    run = silent(nvml)
    recording = record_host(root=tmp_path)
    assert (recording.nvml, recording.nvml_error) == (None, error)
    assert gpus_of(recording) == ()
    assert not any("nvidia" in line for line in run)


def test_of_the_environment_only_the_listed_variables_are_recorded(
    tmp_path: Path, silent: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    recording = record_host(root=tmp_path)
    assert recording.environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert "hf_secret" not in recording_json(recording)


def test_this_host_is_recorded() -> None:
    text = recording_json(record_host())
    assert recording_json(recording_from_json(text)) == text
    assert json.loads(text)["packages"]["torch"]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_command_speaks_english_and_has_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    program = "import os, sys; print(os.environ['LC_ALL'], sys.stdin.read(), b'\\xff')"
    assert run_command(python(program)) == "C  b'\\xff'\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["fsdpplan-no-such-command", "-x"], "^fsdpplan-no-such-command -x: not found$"),
        (["/"], "^/: Permission denied$"),
        (python("import sys; sys.exit('no devices\\nwere found')"), "exit code 1: no devices$"),
        (python("import sys; print('no devices'); sys.exit(9)"), "exit code 9: no devices$"),
        (python("import sys; sys.exit(9)"), "exit code 9$"),
    ],
)
def test_a_command_that_does_not_succeed_says_why(command: list[str], why: str) -> None:
    with pytest.raises(ProbeError, match=why):
        run_command(command)


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 3000 & echo $! > {pid_file}; wait"]
    with pytest.raises(ProbeError, match="no answer within 5 seconds"):
        run_command(command, timeout_seconds=5)
    pid = int(pid_file.read_text())
    for _ in range(2400):
        if not alive(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} runs on")


def alive(pid: int) -> bool:
    """It runs, and is no zombie that nobody has fetched."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
