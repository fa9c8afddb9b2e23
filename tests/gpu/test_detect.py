"""The real machine: NVML and torch speak of the same GPUs, and plans use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdpplan.files.plans import read_plan
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.topology.conclude.gpus import gpus_of
from fsdpplan.topology.probe import record_host
from fsdpplan.topology.read.recording import Recording, recording_from_json, recording_json
from tests.gpu.program import fsdpplan, only_a_device_shows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record_host()


def require_as_torch_has_them(recording: Recording) -> None:
    gpus = gpus_of(recording)
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        seen = torch.cuda.get_device_properties(index)
        assert gpu.name == seen.name
        assert gpu.memory_bytes == pytest.approx(seen.total_memory, rel=0.05)
        assert gpu.compute_capability in (None, f"{seen.major}.{seen.minor}")


def test_nvml_has_the_gpus_that_torch_has(recording: Recording) -> None:
    if not torch.cuda.is_available():
        assert gpus_of(recording) == ()
    only_a_device_shows("what NVML says of it")
    assert recording.nvml is not None, recording.nvml_error
    require_as_torch_has_them(recording)
    assert all(gpu.compute_capability for gpu in gpus_of(recording))


def test_the_recording_survives_being_written(recording: Recording) -> None:
    assert recording_from_json(recording_json(recording)) == recording


def test_detect_prints_the_machine(tmp_path: Path) -> None:
    found = json.loads(fsdpplan("detect", "--json", folder=tmp_path))
    (host,) = found["hosts"]
    names = [torch.cuda.get_device_name(0)] if torch.cuda.is_available() else []
    assert [gpu["name"] for gpu in host["machine"]["gpus"]] == names


def test_a_plan_without_hardware_is_for_what_is_here(tmp_path: Path) -> None:
    problem = json.loads(fsdpplan("detect", "--json", folder=tmp_path))["profile_problem"]
    if problem is not None:
        pytest.skip(f"this machine has no profile: {problem}")
    only_a_device_shows("what is planned with where no hardware is named")
    words = ("recommend", "--model", "gpt2", "--global-batch", "8", "--save", "plan.json")
    fsdpplan(*words, folder=tmp_path)
    plan = read_plan(tmp_path / "plan.json")
    assert torch.cuda.get_device_name(0) in load_device(plan.cluster.device.name).nvml_names
    assert dict(plan.sources)["cluster"].startswith("found on this machine")
    assert plan.cluster.gpus == 1
