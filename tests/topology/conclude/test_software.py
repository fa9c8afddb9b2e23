"""Software: versions that something says, and plugins that lie where their providers put them."""

from __future__ import annotations

import pytest

from fsdpplan.topology.conclude.machine import software_of
from fsdpplan.topology.read.recording import Recording
from tests.topology.recorded import recorded


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Re", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65  Rel", "580.65"),
        ("NVRM version: something else", None),
        ("", None),
    ],
)
def test_the_driver_is_in_its_own_file(line: str, driver: str | None) -> None:
    recording = Recording(files={"/proc/driver/nvidia/version": f"{line}\nGCC version: 12.3.0\n"})
    assert software_of(recording).driver == driver


@pytest.mark.parametrize(
    ("packages", "nccl"),
    [
        ({"torch": "2.9.1", "nvidia-nccl-cu12": "2.27.5"}, "2.27.5"),
        (
            {"torch": "2.9.1+cu130", "nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.27.7"},
            "2.27.7",
        ),
        ({"torch": "2.9.1", "nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.27.7"}, None),
        ({"torch": "2.9.1", "nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.27.5"}, "2.27.5"),
        ({"torch": "2.9.1+cpu"}, None),
        ({"nvidia-nccl-cu12": "latest"}, None),
    ],
)
def test_nccl_is_the_wheel_of_torchs_cuda(packages: dict[str, str], nccl: str | None) -> None:
    assert software_of(Recording(packages=packages)).nccl == nccl


def test_nvml_says_driver_and_cuda() -> None:
    software = software_of(recorded("dgx-h100"))
    assert (software.driver, software.cuda, software.torch) == ("570.86.15", "12.8", "2.9.1")
    assert (software.net_plugins, software.env_profiles) == ((), ())


@pytest.mark.parametrize("said", [12, None, ["12.8"], "", "12", "x\ny"])
def test_what_is_no_version_is_unknown(said: object) -> None:
    assert software_of(Recording(nvml={"driver": said, "cuda": said})).driver is None


@pytest.mark.parametrize(
    "path",
    [
        "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so",
        "/opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so",
        "/usr/local/gib/lib64/libnccl-net_internal.so",
        "/var/lib/tcpx/lib64/libnccl-net.so",
        "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
        "/opt/hpcx-v2.18/nccl_spectrum-x_plugin/lib/libnccl-net.so",
    ],
)
def test_a_plugin_is_found_where_its_provider_puts_it(path: str) -> None:
    assert software_of(Recording(links={path: path})).net_plugins == (path,)


def test_a_file_elsewhere_is_no_plugin() -> None:
    paths = ("/opt/hpcx/a/b/lib/libnccl-net.so", "/home/me/libnccl-net.so", "/opt/x")
    assert software_of(Recording(links=dict.fromkeys(paths, "/x"))).net_plugins == ()


def test_the_cloud_scripts_are_named_and_their_text_is_not_read() -> None:
    path = "/usr/local/gib/scripts/set_nccl_env.sh"
    assert software_of(Recording(links={path: path})).env_profiles == (path,)


@pytest.mark.parametrize(("name", "plugins"), [("p5-efa", 1), ("a3-tcpx", 1), ("roce", 0)])
def test_recorded_clouds_have_their_plugin(name: str, plugins: int) -> None:
    assert len(software_of(recorded(name)).net_plugins) == plugins
