"""The probe: what NVML says becomes a value; no driver is an answer, a broken one an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdpplan.errors import ProbeError
from fsdpplan.topology import probe
from fsdpplan.topology.probe import VisibleGpu, visible_gpus

H100 = VisibleGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2**20)
"""As nvidia-smi lists an H100 SXM5: 81559 MiB."""


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({9: "Driver Not Loaded", 12: "Library Not Found"}.get(value, "Unknown"))
        self.value = value


class FakeNvml:
    """The part of pynvml that is used, for GPUs that are not here."""

    NVMLError = FakeNvmlError
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(self, gpus: int = 2, *, init: int = 0, count: int = 0, old: bool = False) -> None:
        self.gpus, self.init, self.count, self.old = gpus, init, count, old
        self.open = False

    def nvmlInit(self) -> None:
        if self.init:
            raise FakeNvmlError(self.init)
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        if self.count:
            raise FakeNvmlError(self.count)
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return H100.name.encode() if self.old else H100.name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}000-aaaa"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=H100.memory_bytes)


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def use(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    monkeypatch.setattr(probe, "_import_nvml", lambda: nvml)


@pytest.mark.parametrize("old", [False, True], ids=["text", "bytes"])
def test_gpus_are_listed_with_name_and_memory(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    nvml = FakeNvml(8, old=old)
    use(monkeypatch, nvml)
    assert visible_gpus() == (H100,) * 8
    assert not nvml.open


@pytest.mark.parametrize("nvml", [None, FakeNvml(init=9), FakeNvml(init=12), FakeNvml(0)])
def test_no_binding_no_driver_and_no_gpu_are_all_no_gpus(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None
) -> None:
    use(monkeypatch, nvml)
    assert visible_gpus() == ()


@pytest.mark.parametrize("nvml", [FakeNvml(init=999), FakeNvml(count=15)])
def test_a_driver_that_fails_is_an_error_that_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml
) -> None:
    use(monkeypatch, nvml)
    with pytest.raises(ProbeError, match=r"run nvidia-smi .* --hardware"):
        visible_gpus()
    assert not nvml.open


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1", 2), ("", 0), ("-1", 0), ("3", 1), ("0,9,1", 1), ("GPU-2", 1), ("GPU-2,GPU-9,0", 2)],
)
def test_cuda_visible_devices_is_kept(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    use(monkeypatch, FakeNvml(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(visible_gpus()) == count


def test_this_machine_answers() -> None:
    assert all(gpu.name and gpu.memory_bytes > 0 for gpu in visible_gpus())
