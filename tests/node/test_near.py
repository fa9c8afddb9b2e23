from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdpplan.node import near

TWO_SOCKETS = {"0000:1b:00.0": "0", "0000:43:00.0": "0", "0000:9b:00.0": "1", "0000:c3:00.0": "1"}
CORES = {"0": "0-3,8-11", "1": "4-7,12-15"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two sockets with two GPUs each, all whose cores the job may use."""
    monkeypatch.setattr(near, "GPUS", str(tmp_path / "gpus"))
    monkeypatch.setattr(near, "SYSTEM", str(tmp_path / "sys"))
    monkeypatch.setattr(near, "TOOL", ["true"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for gpu, node in TWO_SOCKETS.items():
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
        say(tmp_path, gpu, node)
    for node, cores in CORES.items():
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", cores)
    return tmp_path


def say(host: Path, gpu: str, node: str) -> None:
    """What the kernel says of where a GPU is."""
    write(host / f"sys/bus/pci/devices/{gpu}/numa_node", node)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_gpus_at_two_sockets_whose_cores_are_the_jobs(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert near.main() == 0
    assert capsys.readouterr() == ("", "")


def test_a_gpu_of_which_the_kernel_says_nothing_decides_for_all(host: Path) -> None:
    say(host, "0000:c3:00.0", "-1")
    assert near.nodes_of_gpus() == set()
    assert near.main() == 1


def test_gpus_that_are_all_at_one_node_are_left_alone(host: Path) -> None:
    for gpu in TWO_SOCKETS:
        say(host, gpu, "0")
    assert near.main() == 1


def test_cores_that_belong_to_others_are_not_bound_to(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(15)))
    assert near.main() == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("tool", [["no-such-numactl"], ["false"]])
def test_a_host_without_numactl_is_told_of_it_and_runs_on(
    host: Path,
    tool: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(near, "TOOL", tool)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert near.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("fsdpplan: n1: numactl does not run here")
    assert len(said.splitlines()) == 1


def test_a_torch_without_the_option_is_left_alone(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "has_option", lambda: False)
    assert near.main() == 1


def test_a_host_without_gpus_has_nothing_to_bind_to(host: Path) -> None:
    for gpu in TWO_SOCKETS:
        (host / "gpus" / gpu).rmdir()
    assert near.main() == 1


def test_ranges_are_those_of_the_kernel() -> None:
    assert near.numbers("0-2,7") == {0, 1, 2, 7}
    assert near.numbers("") == set()


def test_it_knows_what_the_option_of_torchrun_needs() -> None:
    from torch.distributed.run import get_args_parser
    from torch.torch_version import TorchVersion, __version__

    options = get_args_parser().format_help()
    assert near.has_option() == ("--numa-binding" in options)
    assert near.has_option() == (TorchVersion(__version__) >= "2.9")
