"""NVML of a host that is not here: the part of pynvml that is asked, over plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = 3
INVALID_ARGUMENT = 2

H100: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory": 85_520_809_984,
    "capability": (9, 0),
    "power": 650_000,
    "default_power": 700_000,
    "clocks": {1: 1980, 2: 2619},
    "ecc": [1, 1],
    "mig": [0, 0],
    "pcie": {"generation": 4, "width": 8, "max_generation": 5, "max_width": 16},
    "cores": [0xFF, 0, 0xFF],
    "nodes": [0b10, 0],
    "links": {0: 1, 1: 1, 2: 0},
    "link_version": 7,
    "link_speed": 26_562,
    "remote": (2, "00000000:86:00.0"),
    "fabric": None,
    "mig_devices": (),
}


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({9: "Driver Not Loaded", 15: "GPU is lost"}.get(value, "Not Supported"))
        self.value = value


class FakeNvml:
    """Answers for `gpus`. `unsupported` functions fail; `absent` ones a binding does not have."""

    NVMLError = FakeNvmlError
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(
        self,
        gpus: list[dict[str, Any]],
        *,
        unsupported: Collection[str] = (),
        absent: Collection[str] = (),
        lost: Collection[int] = (),
        as_bytes: bool = False,
    ) -> None:
        self.gpus, self.unsupported, self.absent, self.lost = gpus, unsupported, absent, lost
        self.as_bytes = as_bytes
        self.asked: set[str] = set()
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        if name in ("c_nvmlGpuFabricInfoV_t", "c_nvmlGpuFabricInfo_t"):
            return getattr(pynvml, name)
        if not name.startswith("nvml"):
            raise AttributeError(name)
        self.asked.add(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name in self.unsupported:
            raise FakeNvmlError(NOT_SUPPORTED)
        answer: Callable[..., Any] = getattr(FakeNvml, f"_{name}")
        return answer(self, *arguments)

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text

    def _nvmlInit(self) -> None:
        self.is_open = True

    def _nvmlShutdown(self) -> None:
        self.is_open = False

    def _nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._text("570.86.15")

    def _nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if index in self.lost:
            raise FakeNvmlError(15)
        return self.gpus[index] | {"index": index}

    def _nvmlDeviceGetName(self, gpu: dict[str, Any]) -> str | bytes:
        return self._text(gpu["name"])

    def _nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> str | bytes:
        return self._text(gpu.get("uuid", f"GPU-{gpu.get('index')}000-aaaa"))

    def _nvmlDeviceGetPciInfo(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x1B + gpu['index']:02X}:00.0".encode())

    def _nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(total=gpu["memory"])

    def _nvmlDeviceGetCudaComputeCapability(self, gpu: dict[str, Any]) -> tuple[int, int]:
        capability: tuple[int, int] = gpu["capability"]
        return capability

    def _nvmlDeviceGetPowerManagementLimit(self, gpu: dict[str, Any]) -> Any:
        return gpu["power"]

    def _nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: dict[str, Any]) -> Any:
        return gpu["default_power"]

    def _nvmlDeviceGetMaxClockInfo(self, gpu: dict[str, Any], clock: int) -> Any:
        return gpu["clocks"][clock]

    def _nvmlDeviceGetEccMode(self, gpu: dict[str, Any]) -> Any:
        return gpu["ecc"]

    def _nvmlDeviceGetMigMode(self, gpu: dict[str, Any]) -> Any:
        return gpu["mig"]

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu: dict[str, Any]) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict[str, Any], index: int) -> Any:
        if index >= len(gpu["mig_devices"]):
            raise FakeNvmlError(6)
        return gpu["mig_devices"][index]

    def _nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: dict[str, Any]) -> Any:
        return gpu["pcie"]["generation"]

    def _nvmlDeviceGetCurrPcieLinkWidth(self, gpu: dict[str, Any]) -> Any:
        return gpu["pcie"]["width"]

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: dict[str, Any]) -> Any:
        return gpu["pcie"]["max_generation"]

    def _nvmlDeviceGetMaxPcieLinkWidth(self, gpu: dict[str, Any]) -> Any:
        return gpu["pcie"]["max_width"]

    def _nvmlDeviceGetMemoryAffinity(self, gpu: dict[str, Any], words: int, scope: int) -> Any:
        return gpu["nodes"]

    def _nvmlDeviceGetCpuAffinity(self, gpu: dict[str, Any], words: int) -> Any:
        return gpu["cores"]

    def _nvmlDeviceGetNvLinkState(self, gpu: dict[str, Any], link: int) -> Any:
        if link not in gpu["links"]:
            raise FakeNvmlError(INVALID_ARGUMENT)
        return gpu["links"][link]

    def _of_active_link(self, gpu: dict[str, Any], link: int, value: Any) -> Any:
        if not gpu["links"][link]:
            raise FakeNvmlError(NOT_SUPPORTED)
        return value

    def _nvmlDeviceGetNvLinkVersion(self, gpu: dict[str, Any], link: int) -> Any:
        return self._of_active_link(gpu, link, gpu["link_version"])

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: dict[str, Any], link: int) -> Any:
        return self._of_active_link(gpu, link, gpu["remote"][0])

    def _nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: dict[str, Any], link: int) -> Any:
        remote = SimpleNamespace(busId=gpu["remote"][1].encode())
        return self._of_active_link(gpu, link, remote)

    def _nvmlDeviceGetFieldValues(self, gpu: dict[str, Any], ids: list[tuple[int, int]]) -> Any:
        return [self._field(gpu, field, scope) for field, scope in ids]

    def _field(self, gpu: dict[str, Any], field: int, scope: int) -> Any:
        known = field == gpu.get("speed_field", 164) and (field == 90 or gpu["links"].get(scope))
        value = SimpleNamespace(uiVal=gpu["link_speed"])
        return SimpleNamespace(nvmlReturn=0 if known else 3, valueType=1, value=value)

    def _fabric_into(self, gpu: dict[str, Any], reference: Any) -> int:
        if gpu["fabric"] is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        info = reference._obj
        info.clusterUuid[:] = bytes.fromhex(gpu["fabric"])
        info.cliqueId, info.state, info.status = 7, 3 | 0xAB00, 0  # a byte, and what lay beside it
        return 0

    _nvmlDeviceGetGpuFabricInfoV = _fabric_into
    _nvmlDeviceGetGpuFabricInfo = _fabric_into

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, kind: int) -> int:
        assert kind == 0
        return 0 if abs(one["index"] - other["index"]) == 1 else 3

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any) -> int:
        return 50
