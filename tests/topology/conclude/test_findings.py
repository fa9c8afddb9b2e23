from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.spec.machine import UNLIMITED_BYTES, Bridge, Machine, Slurm
from fsdpplan.spec.topology import FindingKind, Severity
from fsdpplan.topology.conclude.rails import fabric_of
from tests.topology.found import (
    findings,
    links_down,
    machine,
    only,
    with_gpus,
    with_host,
    with_nics,
    without_gpus,
)


def kinds(of: Machine) -> list[FindingKind]:
    return [finding.kind for finding in findings(of)]


def test_a_slow_port_is_told_with_its_consequence_in_numbers() -> None:
    found = only(machine("nic-slow"))
    assert found.text == "mlx5_5 runs at 100 Gb/s, the other 7 at 400 Gb/s"
    assert found.consequence == (
        "the slowest link sets the ring: all-gather over the network 4.0x slower"
    )
    assert found.slowdown == pytest.approx(4.0)
    assert "--exclude dgx-01" in (found.remedy or "")


def test_a_port_that_is_down_is_told_with_what_is_left() -> None:
    down = with_nics(machine("dgx-h100"), "mlx5_5", state="down", rate_bytes_per_second=None)
    found = only(down)
    assert found.kind == "nic_down"
    assert "mlx5_5 is down; 7 of 8 ports" in found.text
    assert found.slowdown == pytest.approx(8 / 7)


def test_an_adapter_that_has_gone_is_told_by_the_gpu_that_lacks_it() -> None:
    whole = machine("dgx-h100")
    found = only(replace(whole, nics=tuple(nic for nic in whole.nics if nic.name != "mlx5_9")))
    assert (found.kind, found.severity, found.where) == ("nic_down", "degraded", "GPU 5")
    assert found.text == (
        "7 of 8 ports of the fabric are there: GPU 5 lacks what every other GPU has beside it"
    )
    assert found.slowdown == pytest.approx(8 / 7)


def test_a_port_without_a_subnet_manager_is_told_so() -> None:
    waiting = with_nics(machine("dgx-h100"), "mlx5_5", state="init")
    assert "no subnet manager" in only(waiting).text


def test_adapters_that_are_all_down_break_the_network() -> None:
    dark = with_nics(machine("dgx-h100"), state="down", rate_bytes_per_second=None)
    found = only(dark)
    assert (found.kind, found.severity) == ("nic_down", "broken")
    assert "sockets" in found.consequence


def test_a_compute_fabric_that_is_all_down_is_told_although_storage_is_up() -> None:
    whole = machine("dgx-h100")
    compute = [nic.name for nic in fabric_of(whole).ports]
    found = only(with_nics(whole, *compute, state="down", rate_bytes_per_second=None))
    assert (found.severity, found.where) == ("broken", ", ".join(compute))


def test_a_second_port_that_nobody_has_cabled_is_no_finding() -> None:
    uncabled = with_nics(
        machine("dgx-a100"), "mlx5_5", "mlx5_11", state="down", rate_bytes_per_second=None
    )
    assert findings(uncabled) == ()


def test_a_degraded_slot_of_an_adapter_counts_only_below_its_port() -> None:
    whole = machine("dgx-h100")
    assert kinds(with_nics(whole, "mlx5_0", pcie_generation=4)) == ["pcie_slow"]
    found = only(with_nics(whole, "mlx5_0", pcie_generation=4))
    assert found.slowdown == pytest.approx(50 / 31.5, rel=1e-3)
    slower_port = with_nics(whole, rate_bytes_per_second=25e9)
    assert findings(with_nics(slower_port, "mlx5_0", pcie_generation=4)) == ()


def test_lost_lanes_slow_the_node_that_has_only_pcie() -> None:
    found = only(machine("pcie-half-width"))
    assert found.text == "GPU 2 has 8 of 16 PCIe lanes: 15.8 GB/s of 31.5 GB/s"
    assert "all-gather inside the node 2.0x slower" in found.consequence
    assert found.slowdown == pytest.approx(2.0)


def test_lost_lanes_beside_nvlink_slow_copies_only() -> None:
    found = only(with_gpus(machine("dgx-h100"), 5, pcie_width=8))
    assert "copies between host and GPU 2.0x slower" in found.consequence
    assert found.slowdown is None


def test_a_generation_that_all_gpus_lowered_is_idleness_and_one_alone_is_a_note() -> None:
    whole = machine("dgx-h100")
    assert findings(with_gpus(whole, pcie_generation=1)) == ()
    found = only(with_gpus(whole, 3, pcie_generation=1))
    assert (found.kind, found.severity, found.where) == ("pcie_slow", "note", "GPU 3")


@pytest.mark.parametrize(
    ("down", "severity", "slowdown"), [(1, "degraded", 18 / 17), (18, "broken", None)]
)
def test_nvlinks_that_are_down_are_told(
    down: int, severity: Severity, slowdown: float | None
) -> None:
    whole = machine("dgx-h100")
    weak = replace(whole, gpus=(links_down(whole.gpus[0], down=down), *whole.gpus[1:]))
    found = next(each for each in findings(weak) if each.kind == "nvlink_down")
    assert found.severity == severity
    assert f"{18 - down} of 18" in found.text
    assert found.slowdown == (None if slowdown is None else pytest.approx(slowdown))


def test_a_card_whose_bridge_is_not_fitted_is_told_only_beside_cards_with_one() -> None:
    whole = machine("pcie-two-sockets")
    bare = tuple(links_down(gpu, down=12) for gpu in whole.gpus)
    assert kinds(replace(whole, gpus=bare)) == []
    half = replace(whole, gpus=(*bare[:2], *whole.gpus[2:]))
    assert [each.where for each in findings(half)] == ["GPU 0", "GPU 1"]


def test_a_board_shows_that_a_gpu_is_missing() -> None:
    found = only(machine("gpu-missing"))
    assert found.text == "the driver sees 7 GPUs, its board has 8"
    assert found.severity == "broken"


@pytest.mark.parametrize("left", [1, 2, 4])
def test_a_part_of_a_board_as_clouds_sell_it_is_whole(left: int) -> None:
    part = without_gpus(machine("dgx-h100"), *range(left, 8))
    assert "gpu_missing" not in kinds(part)


def test_gpus_that_are_hidden_are_not_missing() -> None:
    whole = machine("dgx-h100")
    hidden = replace(whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.index != 2))
    assert "gpu_missing" not in kinds(hidden)


@pytest.mark.parametrize(
    ("gres", "job", "left", "missing"),
    [
        ("gpu:h100:8", None, 7, True),
        ("gpu:h100:8(S:0-1)", "17", 7, True),
        ("gpu:h100:8", "17", 4, False),
        ("gpu:h100:8", None, 4, True),
        ("gpu:a100:4,gpu:h100:4", None, 7, True),
        ("gpu:8,nvme:1", None, 7, True),
        ("gpu:h100:8", None, 8, False),
        ("gpu:h100:7", None, 7, False),
        (None, None, 7, True),
    ],
)
def test_slurm_shows_that_a_gpu_is_missing(
    gres: str | None, job: str | None, left: int, missing: bool
) -> None:
    slurm = Slurm(
        version="24.05.4", job_id=job, nodes=(), gres=gres, given_gpus=None, partition=None
    )
    node = replace(without_gpus(machine("dgx-h100"), *range(left, 8)), slurm=slurm)
    assert ("gpu_missing" in kinds(node)) == missing


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H800 PCIe", "NVIDIA H100 PCIe"])
def test_cards_are_on_no_board(name: str) -> None:
    cards = with_gpus(without_gpus(machine("dgx-h100"), 7), name=name)
    assert "gpu_missing" not in kinds(cards)


@pytest.mark.parametrize(
    ("given", "left", "missing"), [(8, 7, True), (8, 4, True), (6, 6, False), (2, 8, False)]
)
def test_a_job_misses_what_it_was_given_and_no_more(given: int, left: int, missing: bool) -> None:
    slurm = Slurm(
        version=None, job_id="17", nodes=(), gres="gpu:8", given_gpus=given, partition=None
    )
    node = replace(without_gpus(machine("dgx-h100"), *range(left, 8)), slurm=slurm)
    assert ("gpu_missing" in kinds(node)) == missing


def test_a_pod_with_a_part_of_a_board_misses_nothing() -> None:
    pod = replace(without_gpus(machine("dgx-h100"), 6, 7), kubernetes=True)
    assert "gpu_missing" not in kinds(pod)


def test_a_lowered_power_cap_is_told_once_for_all_gpus_that_have_it() -> None:
    found = only(with_gpus(machine("dgx-h100"), power_limit_watts=500.0))
    assert found.where == "GPUs 0-7"
    assert found.text == "GPUs 0-7 may draw 500 W of 700 W"
    assert findings(with_gpus(machine("dgx-h100"), power_limit_watts=None)) == ()


def test_missing_peer_access_is_a_fault_but_for_consumer_gpus() -> None:
    assert only(machine("rtx-4090")).severity == "note"
    whole = machine("pcie-half-width")
    cut = replace(whole, pairs=tuple(replace(pair, p2p="chipset") for pair in whole.pairs))
    found = {each.kind: each for each in findings(cut)}
    assert found["no_p2p"].severity == "degraded"
    assert "the chipset does not support it" in found["no_p2p"].text


def test_unknown_peer_access_is_no_finding() -> None:
    whole = machine("dgx-h100")
    vague = replace(whole, pairs=tuple(replace(pair, p2p=None) for pair in whole.pairs))
    assert findings(vague) == ()


def test_adapters_that_cannot_read_device_memory_are_told_and_unknown_ones_are_not() -> None:
    whole = machine("dgx-h100")
    assert kinds(with_host(whole, gpudirect="none")) == ["no_gpudirect"]
    assert kinds(with_host(whole, gpudirect=None)) == []
    assert kinds(with_host(machine("rtx-4090"), gpudirect="none")) == ["no_p2p"]


def test_access_control_on_bridges_is_told_where_traffic_passes_them() -> None:
    bridges = (Bridge(bus_id="0000:17:00.0"), Bridge(bus_id="0000:17:01.0"))
    found = only(with_host(machine("dgx-h100"), acs_bridges=bridges))
    assert found.kind == "acs"
    assert "setpci -s 0000:17:00.0" in (found.remedy or "")
    assert findings(with_host(machine("dgx-h100"), acs_bridges=())) == ()
    assert findings(with_host(machine("gb200-tray"), acs_bridges=bridges)) == ()


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (64 * 2**10, ["broken"]),
        (8 * 2**30, ["note"]),
        (UNLIMITED_BYTES, []),
        (None, []),
    ],
)
def test_a_small_limit_on_locked_memory_breaks_rdma(limit: int | None, found: list[str]) -> None:
    limited = with_host(machine("dgx-h100"), locked_memory_bytes=limit)
    assert [each.severity for each in findings(limited)] == found
    without = with_host(machine("nothing"), locked_memory_bytes=limit)
    assert findings(without) == ()


def test_a_containers_small_shared_memory_is_told() -> None:
    small = with_host(machine("dgx-h100"), shared_memory_bytes=64 * 2**20)
    found = only(small)
    assert (found.kind, found.text) == ("shared_memory", "/dev/shm holds 64.0 MiB")
    assert findings(with_host(machine("nothing"), shared_memory_bytes=2**20)) == ()


def test_ecc_that_is_off_is_a_note_for_data_centre_gpus() -> None:
    assert kinds(with_gpus(machine("dgx-h100"), ecc_enabled=False)) == ["ecc"]
    assert kinds(machine("rtx-4090")) == ["no_p2p"]


def test_what_could_not_be_read_is_told() -> None:
    found = only(replace(machine("dgx-h100"), unread=("lspci -vvv: permission denied",)))
    assert (found.kind, found.severity) == ("unread", "note")
    assert "permission denied" in found.text


def test_the_worst_comes_first() -> None:
    bad = with_host(
        with_gpus(machine("nic-slow"), ecc_enabled=False), shared_memory_bytes=64 * 2**20
    )
    assert [each.severity for each in findings(bad)] == ["broken", "degraded", "note"]


def test_every_finding_says_what_follows() -> None:
    for name in ("nic-slow", "gpu-missing", "mig", "rtx-4090", "amd-mi300x"):
        for finding in findings(machine(name)):
            assert finding.consequence
            assert finding.host == machine(name).host.name
            assert "\n" not in finding.text + finding.consequence + (finding.remedy or "")
