"""nvidia-smi's texts: the same host as NVML's, less where a text is cut, never something else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.machine import Gpu
from fsdpplan.topology.gpus import gpus_of, nvidia_facts, pairs_of
from fsdpplan.topology.nvidia_smi import (
    LINKS,
    LIST,
    MATRIX,
    PCI_MATRIX,
    QUERY,
    REMOTES,
    SMI_COMMANDS,
    kept_smi_text,
    nvidia_smi_facts,
)
from fsdpplan.topology.recording import Recording
from tests.topology.recorded import recorded
from tests.topology.smi_outputs import smi_outputs
from tests.topology.test_gpus import is_part

WITH_GPUS = ("dgx-a100", "dgx-h100", "gb200-tray", "mig", "pcie-two-sockets", "rtx-4090")
OUTPUTS = {name: smi_outputs(recorded(name).nvml) for name in WITH_GPUS}


def told(name: str, **changes: str | None) -> Recording:
    """The host as nvidia-smi tells it, with some texts changed."""
    texts = {line: changes.get(line, text) for line, text in OUTPUTS[name].items()}
    return Recording(commands={line: text for line, text in texts.items() if text is not None})


def in_whole_mebibytes(gpu: Gpu) -> Gpu:
    """nvidia-smi prints MiB, and no version of a link."""
    return replace(
        gpu,
        memory_bytes=None if gpu.memory_bytes is None else gpu.memory_bytes // 2**20 * 2**20,
        mig_devices=tuple(
            replace(mig, memory_bytes=(mig.memory_bytes or 0) // 2**20 * 2**20)
            for mig in gpu.mig_devices
        ),
        nvlinks=tuple(replace(link, version=None) for link in gpu.nvlinks),
    )


@pytest.mark.parametrize("name", WITH_GPUS)
def test_nvidia_smi_tells_what_nvml_tells(name: str) -> None:
    by_nvml = gpus_of(Recording(nvml=recorded(name).nvml))
    assert gpus_of(told(name)) == tuple(in_whole_mebibytes(gpu) for gpu in by_nvml)
    assert pairs_of(told(name)) == pairs_of(Recording(nvml=recorded(name).nvml))
    for version in ("driver", "cuda"):
        assert nvidia_facts(told(name))[version] == (recorded(name).nvml or {})[version]


@pytest.mark.parametrize(
    ("name", "remote"), [("dgx-h100", "switch"), ("pcie-two-sockets", "gpu"), ("mig", None)]
)
def test_the_matrix_alone_tells_switches_from_bridges_where_it_can(
    name: str, remote: str | None
) -> None:
    """In `mig` each GPU has links to several others, and which leads where only `-R` says."""
    for gpu in gpus_of(told(name, **{REMOTES: None})):
        assert {link.remote for link in gpu.nvlinks if link.active} == {remote}


def test_two_gpus_that_see_all_links_may_be_bridged_or_switched() -> None:
    nvml: Any = recorded("dgx-h100").nvml
    two = {
        "gpus": nvml["gpus"][:2],
        "pairs": [pair for pair in nvml["pairs"] if pair["first"] + pair["second"] == 1],
        "driver": "570",
        "cuda": "12.8",
    }
    texts = smi_outputs(two)
    [gpu, _] = gpus_of(Recording(commands=texts | {REMOTES: ""}))
    assert {link.remote for link in gpu.nvlinks} == {None}
    far = "GPU 0: NVIDIA H100 (UUID: GPU-a)\n" + "".join(
        f"\t Link {link}: Remote Device 00000000:86:00.0: Link {link}\n" for link in range(18)
    )
    [gpu, _] = gpus_of(Recording(commands=texts | {REMOTES: far}))
    assert {link.remote for link in gpu.nvlinks} == {"switch"}


def test_nvlink_hides_the_way_over_pcie_from_the_one_matrix_and_not_from_the_other() -> None:
    both, one = told("dgx-h100"), told("dgx-h100", **{PCI_MATRIX: None})
    assert {pair.ancestor for pair in pairs_of(both)} == {"node", "system"}
    assert {pair.ancestor for pair in pairs_of(one)} == {None}


def test_a_list_of_names_is_enough_for_gpus_without_properties() -> None:
    gpus = gpus_of(Recording(commands={LIST: OUTPUTS["mig"][LIST]}))
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert [mig.name for mig in gpus[0].mig_devices] == ["MIG 3g.20gb"] * 2
    assert {gpu.memory_bytes for gpu in gpus} == {None}


@pytest.mark.parametrize(
    ("group", "name", "limit", "watts"),
    [
        ("gpu_power_readings", "current_power_limit", "250.00 W", 250.0),
        ("power_readings", "power_limit", "250.00 W", 250.0),
        ("gpu_power_readings", "current_power_limit", "N/A", None),
        ("gpu_power_readings", "current_power_limit", "9 kW", None),
    ],
)
def test_older_drivers_name_the_power_limit_otherwise(
    group: str, name: str, limit: str, watts: float | None
) -> None:
    power = f"<{group}><{name}>{limit}</{name}></{group}>"
    text = f"<nvidia_smi_log><gpu><product_name>X</product_name>{power}</gpu></nvidia_smi_log>"
    [gpu] = gpus_of(Recording(commands={QUERY: text}))
    assert gpu.power_limit_watts == watts


@pytest.mark.parametrize("unknown", ["N/A", "[Unknown Error]", "ERR!", "", "Unknown Error"])
def test_a_gpu_without_a_name_is_not_listed(unknown: str) -> None:
    text = f"<nvidia_smi_log><gpu><product_name>{unknown}</product_name></gpu></nvidia_smi_log>"
    assert gpus_of(Recording(commands={QUERY: text})) == ()


def test_an_unknown_state_of_a_link_is_no_link() -> None:
    texts = told("dgx-h100", **{LINKS: "GPU 0: X (UUID: GPU-a)\n\t Link 0: sleeping\n"})
    assert {gpu.nvlinks for gpu in gpus_of(texts)} == {()}


def test_serial_numbers_and_names_of_processes_are_not_kept() -> None:
    kept = kept_smi_text(QUERY, OUTPUTS["dgx-h100"][QUERY])
    assert "1650522003820" not in kept
    assert "secret.py" not in kept
    texts = OUTPUTS["dgx-h100"] | {QUERY: kept}
    assert gpus_of(Recording(commands=texts)) == gpus_of(told("dgx-h100"))
    assert kept_smi_text(MATRIX, "<serial>1</serial>") == "<serial>1</serial>"


def test_nothing_said_is_nothing_known() -> None:
    assert nvidia_smi_facts({}) == {"gpus": [], "pairs": []}


@given(
    name=st.sampled_from(WITH_GPUS),
    line=st.sampled_from(SMI_COMMANDS),
    at=st.floats(0, 1, exclude_max=True),
    one_line=st.booleans(),
)
def test_a_text_that_is_cut_or_lacks_a_line_says_less_and_nothing_else(
    name: str, line: str, at: float, one_line: bool
) -> None:
    text = OUTPUTS[name][line]
    lines = text.splitlines(keepends=True)
    del lines[int(at * len(lines))]
    less = "".join(lines) if one_line else text[: int(at * len(text))]
    whole = {gpu.index: gpu for gpu in gpus_of(told(name))}
    pairs = {(pair.first, pair.second): pair for pair in pairs_of(told(name))}
    for gpu in gpus_of(told(name, **{line: less})):
        assert says_no_more(gpu, whole[gpu.index])
    for pair in pairs_of(told(name, **{line: less})):
        assert is_part(pair, pairs[pair.first, pair.second])


def says_no_more(gpu: Gpu, whole: Gpu) -> bool:
    parts = ("nvlinks", "mig_devices")
    return all(
        getattr(gpu, each.name) in (None, getattr(whole, each.name))
        for each in fields(Gpu)
        if each.name not in parts
    ) and all(
        any(is_part(one, other) for other in getattr(whole, part))
        for part in parts
        for one in getattr(gpu, part)
    )


@given(
    name=st.sampled_from(WITH_GPUS),
    line=st.sampled_from(SMI_COMMANDS),
    start=st.floats(0, 1),
    length=st.integers(0, 50),
    junk=st.text(max_size=20),
)
def test_junk_in_a_text_is_no_reason_to_fail(
    name: str, line: str, start: float, length: int, junk: str
) -> None:
    text = OUTPUTS[name][line]
    at = int(start * len(text))
    recording = told(name, **{line: text[:at] + junk + text[at + length :]})
    gpus_of(recording)
    pairs_of(recording)
