"""Machine: all parsers on whole hosts, and on hosts that were torn apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.spec.machine import Machine, Nic
from fsdpplan.topology.conclude.machine import machine_of
from fsdpplan.topology.read.recording import Recording, kept_text
from tests.topology.recorded import NAMES, recorded

ADDRESS = re.compile(r"\b[0-9]{1,3}(\.[0-9]{1,3}){3}\b(?!/)|\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b")
"""An IPv4 address that is no network, or a MAC."""
INFERRED = ("gpudirect", "iommu", "acs_bridges")
"""Facts of a host that follow from what is absent, too."""


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_machine_is_read_whole(name: str) -> None:
    machine = machine_of(recorded(name))
    assert machine.unread == ()
    assert machine.host.cores
    assert machine.host.memory_bytes
    devices = {gpu.bus_id for gpu in machine.gpus} | {nic.bus_id for nic in machine.nics}
    assert {bus_id for bus_id, _ in machine.pci_paths} == devices - {None}


@pytest.mark.parametrize("name", NAMES)
def test_no_address_is_in_a_machine(name: str) -> None:
    assert not ADDRESS.search(repr(machine_of(recorded(name))))


def test_what_failed_is_said_unless_there_was_nothing_to_read() -> None:
    failed = {
        "scontrol version": "not found",
        "lspci -D -vvv -d ::0604": "no answer within 10 s",
        "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/9": "Invalid argument",
        "/sys/class/net/eth1/speed": "Invalid argument",
        "/proc/driver/nvidia/version": "Permission denied",
    }
    assert machine_of(Recording(failed=failed)).unread == (
        "/proc/driver/nvidia/version: Permission denied",
        "lspci -D -vvv -d ::0604: no answer within 10 s",
    )


def test_slurm_is_missed_only_inside_of_a_job() -> None:
    outside = Recording(failed={"scontrol version": "exit code 1: no configuration"})
    inside = replace(outside, environment={"SLURM_JOB_ID": "7"})
    assert machine_of(outside).unread == ()
    assert machine_of(inside).unread == ("scontrol version: exit code 1: no configuration",)


def test_a_silent_nvml_is_said_only_where_there_is_a_gpu() -> None:
    silent = Recording(nvml_error="Driver/library version mismatch")
    gpu = {"/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n"}
    assert machine_of(silent).unread == ()
    assert machine_of(replace(silent, files=gpu)).unread == (
        "NVML: Driver/library version mismatch",
    )


@st.composite
def torn(draw: st.DrawFn, tear: Callable[[str, float], str | None]) -> tuple[str, Recording]:
    """A recorded machine, some of whose texts went through `tear`, which drops them by None."""
    name = draw(st.sampled_from(NAMES))
    whole = recorded(name)
    random = draw(st.randoms(use_true_random=False))
    share = draw(st.floats(0, 1))

    def some(texts: dict[str, str]) -> dict[str, str]:
        kept = {
            key: tear(text, random.random()) if random.random() < share else text
            for key, text in texts.items()
        }
        return {key: text for key, text in kept.items() if text is not None}

    return name, replace(
        whole,
        files=some(dict(whole.files)),
        links=some(dict(whole.links)),
        commands=some(dict(whole.commands)),
        environment=some(dict(whole.environment)),
        packages=some(dict(whole.packages)),
    )


def dropped(text: str, where: float) -> None:
    return None


def cut(text: str, where: float) -> str:
    return text[: int(len(text) * where)]


def garbled(text: str, where: float) -> str:
    middle = int(len(text) * where)
    return text[:middle] + "\x00\ufffd9[-:/" + text[middle + 1 :]


@given(torn(dropped))
def test_a_machine_with_holes_says_less_and_nothing_else(case: tuple[str, Recording]) -> None:
    name, recording = case
    whole, rest = machine_of(recorded(name)), machine_of(recording)
    known = {(nic.name, nic.port): nic for nic in whole.nics}
    assert {(nic.name, nic.port) for nic in rest.nics} <= known.keys()
    for nic in rest.nics:
        assert_no_more(nic, known[nic.name, nic.port])
    assert {each.name for each in rest.interfaces} <= {each.name for each in whole.interfaces}
    for interface in rest.interfaces:
        (before,) = (each for each in whole.interfaces if each.name == interface.name)
        assert set(interface.networks) <= set(before.networks)
        assert interface.speed_bytes_per_second in (None, before.speed_bytes_per_second)
    assert set(rest.pci_paths) <= set(whole.pci_paths)
    for field, value in asdict(rest.host).items():
        if field not in INFERRED:
            assert value in (None, "localhost", getattr(whole.host, field)), field
    assert rest.cloud in (None, whole.cloud) or rest.cloud.instance_type is None


def assert_no_more(rest: Nic, whole: Nic) -> None:
    assert set(rest.gids) <= {
        replace(gid, interface=interface)
        for gid in whole.gids
        for interface in (None, gid.interface)
    }
    below = {gid.interface for gid in whole.gids}
    for field in rest.__slots__:
        if field in ("gids", "link_layer", "interface"):
            continue
        assert getattr(rest, field) in (None, getattr(whole, field)), field
    assert rest.link_layer in (None, whole.link_layer, "unspecified")
    assert rest.interface in {None, whole.interface} | below


@given(torn(cut) | torn(garbled))
def test_a_damaged_machine_is_still_a_machine(case: tuple[str, Recording]) -> None:
    _, recording = case
    machine = machine_of(recording)
    assert isinstance(machine, Machine)
    assert all(
        nic.rate_bytes_per_second is None or nic.rate_bytes_per_second > 0 for nic in machine.nics
    )
    assert machine == machine_of(recording)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=8), st.text(max_size=40), max_size=5),
    st.dictionaries(
        st.sampled_from(["lscpu", "scontrol version", "scontrol show node n", "lspci"]),
        st.text(max_size=60),
    ),
)
def test_noise_is_an_empty_machine(texts: dict[str, str], commands: dict[str, str]) -> None:
    files = {f"/sys/class/{path}": text for path, text in texts.items()}
    machine = machine_of(Recording(files=files, links=files, commands=commands))
    assert (machine.gpus, machine.nics, machine.cloud) == ((), (), None)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recording_keeps_says_all_that_the_host_says(name: str) -> None:
    whole = recorded(name)
    kept = replace(
        whole,
        files={path: kept_text(path, text) for path, text in whole.files.items()},
        commands={line: kept_text(line, text) for line, text in whole.commands.items()},
    )
    assert machine_of(kept) == machine_of(whole)
