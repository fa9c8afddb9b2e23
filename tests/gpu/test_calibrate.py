"""Calibrating one GPU: its profile is plausible, and plans with it know more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.measurement import MeasuredMachine, MeasuredMatmul
from tests.gpu.program import fsdpplan, only_a_device_shows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

PROFILE, LOG = "measured.toml", "measured.jsonl"
ON_CUDA = torch.cuda.is_available()
START = () if ON_CUDA else ("--hardware", "cpu")
"""What the profile starts from: what is found here, or the CPU's."""
SECONDS = ("30",) if ON_CUDA else ("3", "20", "80")
"""What it is given, one after the other: a busy CPU may have no time for what is asked here."""


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the profile and the log of this GPU."""
    folder = tmp_path_factory.mktemp("calibrated")
    problem = json.loads(fsdpplan("detect", "--json", folder=folder))["profile_problem"]
    if problem is not None and ON_CUDA:
        pytest.skip(f"this machine has no profile to start from: {problem}")
    for seconds in SECONDS:
        words = ("--seconds", seconds, "--processes", "1", "--save", PROFILE)
        fsdpplan("calibrate", *START, *words, folder=folder, seconds=300)
        if matmul_dtypes(folder) >= {"bf16", "fp32"} and device_of(folder).evidence == "measured":
            break
    return folder


def device_of(folder: Path) -> Device:
    """The device as the profile has it."""
    return load_cluster(str(folder / PROFILE), gpus=1).cluster.device


def matmul_dtypes(folder: Path) -> set[str]:
    """The formats of the products that were measured."""
    rows = read_measurements(folder / LOG)
    return {row.dtype for row in rows if isinstance(row, MeasuredMatmul)}


@pytest.fixture(scope="module")
def measured(calibrated: Path) -> Device:
    return device_of(calibrated)


def test_the_profile_says_that_it_is_measured(measured: Device) -> None:
    assert measured.evidence == "measured"
    only_a_device_shows("how much memory it has")
    assert measured.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_kernels_reach_a_plausible_share_of_the_data_sheet(measured: Device) -> None:
    assert measured.fit.matmul_fraction > 0
    only_a_device_shows("shares of its data sheet")
    assert 0.4 <= measured.fit.matmul_fraction <= 1.0
    assert 0.5 <= measured.fit.memory_fraction <= 1.0


def test_the_log_speaks_of_this_device(calibrated: Path) -> None:
    rows = read_measurements(calibrated / LOG)
    (machine,) = (row for row in rows if isinstance(row, MeasuredMachine))
    assert {"bf16", "fp32"} <= matmul_dtypes(calibrated)
    assert (machine.device_kind == "cuda") == ON_CUDA
    only_a_device_shows("its name")
    assert machine.device_name == torch.cuda.get_device_name(0)


def test_its_predictions_have_a_narrower_band(calibrated: Path) -> None:
    def band(*hardware: str) -> float:
        words = ("estimate", *hardware, "--model", "gpt2", "--global-batch", "8", "--json")
        step = json.loads(fsdpplan(*words, folder=calibrated))["step_seconds"]
        return float(step["upper"] / step["lower"])

    assert band("--hardware", PROFILE, "--gpus", "1", "--precision", "fp32") > 1
    only_a_device_shows("a band that is narrower than that of its data sheet")
    assert band("--hardware", PROFILE) < band()
