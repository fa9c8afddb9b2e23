"""Which machines: named, found on this one, or the default profile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.options.question import ClusterOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.cli.resolve.cluster import resolve_cluster
from fsdpplan.errors import FsdpPlanError, ProbeError, SpecError
from fsdpplan.files.clusters import LoadedCluster, load_cluster
from fsdpplan.topology.conclude.gpus import gpus_of
from fsdpplan.topology.probe import VisibleGpu
from fsdpplan.topology.read.recording import Recording
from tests.cli.small import on_a_machine_without_gpus, words
from tests.refusals import check_one_line
from tests.topology.recorded import recorded


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def this_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this host a recorded one."""

    def become(recording: Recording) -> None:
        gpus = tuple(
            VisibleGpu(name=gpu.name, memory_bytes=gpu.memory_bytes or 0)
            for gpu in gpus_of(recording)
        )
        monkeypatch.setattr("fsdpplan.topology.probe.visible_gpus", lambda: gpus)
        monkeypatch.setattr("fsdpplan.run.detect.this_host", lambda: recording)

    return become


def found(**options: Any) -> Resolved[LoadedCluster]:
    return resolve_cluster(ClusterOptions(**options))


def renamed_gpus(of: Recording, name: str) -> Recording:
    """The recording with its GPUs of another name."""
    gpus = json.loads(json.dumps(dict(of.nvml or {})))
    for gpu in gpus["gpus"]:
        gpu["name"] = name
    return replace(of, nvml=gpus)


def test_a_machine_with_gpus_is_planned_for_as_found(this_is: Any) -> None:
    this_is(recorded("dgx-h100"))
    answer = found()
    there = load_cluster("dgx-h100", gpus=8).cluster
    assert (answer.value.cluster.gpus, answer.value.cluster.device) == (8, there.device)
    assert answer.value.cluster.levels == there.levels
    assert dict(answer.sources)["cluster"] == "found on this machine: 8 x NVIDIA H100 80GB HBM3"
    assert answer.assumptions == (
        "the hardware is what was found here: 8 x NVIDIA H100 80GB HBM3 (nvlink 1 x 450 GB/s) "
        "(--hardware)",
        "8 GPUs: those of this machine (--gpus)",
    )


def test_a_machine_that_was_never_measured_is_told_what_that_would_bring(
    this_is: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    this_is(recorded("dgx-h100"))
    asked = "recommend --model llama-3.2-1b --global-batch 64 --no-ledger --dp-shard 8 --pp 1"
    assert exit_code_of(words(asked)) == 0
    flat = " ".join(capsys.readouterr().out.split())
    told = re.search(
        r"never measured: `fsdpplan calibrate` \(60 s\) would narrow the band from ±([\d.]+) ?% to "
        r"±([\d.]+) ?%",
        flat,
    )
    assert told is not None
    assert float(told[2]) < float(told[1])


def test_more_gpus_than_are_here_are_more_nodes_of_the_same_kind(this_is: Any) -> None:
    this_is(recorded("roce"))
    answer = found(gpus=32)
    assert (answer.value.cluster.nodes, answer.value.cluster.levels[-1].name) == (4, "roce")
    assert "roce 8 x 50.0 GB/s" in answer.assumptions[0]
    assert len(answer.assumptions) == 1


def test_inside_an_allocation_the_gpus_are_those_of_all_its_nodes(this_is: Any) -> None:
    this_is(recorded("slurm-node"))
    answer = found()
    assert (answer.value.cluster.gpus, answer.value.cluster.nodes) == (16, 2)
    assert "16 GPUs: 8 on each of the 2 nodes of this allocation (--gpus)" in answer.assumptions


def test_what_is_weak_here_is_warned_of_where_it_is_met(this_is: Any) -> None:
    this_is(recorded("nic-slow"))
    assert found().warnings == ()
    assert found(gpus=16).warnings == ("dgx-01: mlx5_5 runs at 100 Gb/s, the other 7 at 400 Gb/s",)


def test_flags_are_laid_over_what_was_found(this_is: Any) -> None:
    this_is(recorded("dgx-h100"))
    cluster = found(gpus=8, gpus_per_node=4, inter_bw=1e9).value.cluster
    assert (cluster.nodes, cluster.levels[-1].port_bandwidth_bytes_per_second) == (2, 1e9)


def test_gpus_that_are_hidden_are_not_planned_for(this_is: Any) -> None:
    this_is(replace(recorded("mig"), environment={"CUDA_VISIBLE_DEVICES": "1,2"}))
    cluster = found().value.cluster
    assert (cluster.gpus, [level.name for level in cluster.levels]) == (2, ["nvlink"])


@pytest.mark.parametrize(
    ("recording", "said"),
    [
        (recorded("mig"), "GPU 0 of this machine is split by MIG"),
        (renamed_gpus(recorded("dgx-h100"), "NVIDIA GeForce 256"), "8 x NVIDIA GeForce 256"),
    ],
    ids=["mig", "unknown"],
)
def test_gpus_that_cannot_be_planned_for_are_refused_and_named_hardware_is_not(
    recording: Recording, said: str, this_is: Any
) -> None:
    this_is(recording)
    with pytest.raises(ProbeError) as refusal:
        found(gpus=16)
    check_one_line(refusal.value)
    assert said in str(refusal.value)
    assert "--hardware" in str(refusal.value)
    assert found(gpus=16, hardware="dgx-h100").value.cluster.name == "dgx-h100"


def test_without_gpus_the_hardware_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    answer = found(gpus=64)
    assert answer.value.cluster == load_cluster("dgx-h100", gpus=64).cluster
    assert answer.assumptions == ("hardware dgx-h100, as no GPU was found here (--hardware)",)
    with pytest.raises(SpecError, match="no GPU was found here: say how many"):
        found()


def test_gpus_of_another_maker_are_refused_or_said_not_to_be_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setattr("fsdpplan.topology.probe.may_have_other_accelerators", lambda: True)
    monkeypatch.setattr("fsdpplan.run.detect.other_accelerators_here", lambda: ("8 AMD GPUs",))
    with pytest.raises(ProbeError, match="this machine has 8 AMD GPUs") as refusal:
        found()
    check_one_line(refusal.value)
    assert "8 AMD GPUs here cannot be planned for as found" in found(gpus=8).assumptions[0]


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("h200-sxm-141g", "dgx-h200"),
        ("rtx-4090", "pcie-8xrtx4090"),
        ("rtx-3090", "dgx-h100 --gpu rtx-3090-24g"),
    ],
)
def test_a_device_alone_names_no_machine(gpu: str, machine: str) -> None:
    """What is offered has these GPUs, and can be typed."""
    with pytest.raises(SpecError, match=f"--gpu {gpu} changes the device of a profile") as refusal:
        found(gpu=gpu)
    offered = str(refusal.value).partition("--hardware ")[2]
    assert offered == machine
    hardware, _, other = offered.partition(" --gpu ")
    cluster = found(hardware=hardware, gpu=other or None, gpus=4).value.cluster
    assert cluster.device.name.startswith(gpu)


@pytest.mark.parametrize(
    ("error", "code"), [(ProbeError("nvidia-smi hangs"), 4), (SpecError("a name"), 2)]
)
def test_a_reading_that_fails_ends_the_program_with_its_code(
    error: FsdpPlanError,
    code: int,
    this_is: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> Recording:
        raise error

    this_is(recorded("dgx-h100"))
    monkeypatch.setattr("fsdpplan.run.detect.this_host", fails)
    assert exit_code_of(words("recommend --params 1e9")) == code
    assert capsys.readouterr().err == f"fsdpplan: {error}\n"


def test_recommend_says_on_its_screen_what_was_found(
    this_is: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    this_is(recorded("dgx-h100"))
    assert exit_code_of(words("recommend --params 1e9")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the hardware is what was found here: 8 x NVIDIA H100 80GB HBM3" in said
    assert "8 GPUs: those of this machine (--gpus)" in said


def test_how_much_of_each_nvlink_domain_is_used_is_said_unless_it_was_given() -> None:
    racks = {"hardware": "gb200-nvl72"}
    (said,) = found(**racks, gpus=512).assumptions
    assert said == (
        "64 of the 72 GPUs of each of 8 NVLink domains, 16 nodes of each (--domain-gpus)"
    )
    (whole,) = found(**racks, gpus=144).assumptions
    assert whole.startswith("all 72 GPUs of each of 2 NVLink domains, 18 nodes of each")
    (uneven,) = found(**racks, gpus=148).assumptions
    assert "148 do not fill them evenly" in uneven
    assert "--gpus 216 would" in uneven
    assert not found(**racks, gpus=64).assumptions
    assert not found(hardware="dgx-h100", gpus=512).assumptions
    given = found(**racks, gpus=512, domain_gpus=32)
    assert not given.assumptions
    assert given.value.cluster.levels[0].domain_gpus == 32
    assert dict(given.sources)["cluster.levels.nvlink.domain_gpus"] == "flag --domain-gpus"
