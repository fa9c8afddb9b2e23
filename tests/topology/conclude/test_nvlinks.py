"""NVLinks: what one carries, of which generation it is, and what is at its far end."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpplan.spec.machine import NvLink
from fsdpplan.topology.conclude.gpus import nvlinks_of


def one_link(capability: str | None = "9.0", **facts: Any) -> NvLink:
    gpu = {"nvlinks": [{"link": 0, "state": 1} | facts]}
    [link] = nvlinks_of(gpu, compute_capability=capability, gpu_bus_ids={"0000:41:00.0"})
    return link


@pytest.mark.parametrize(
    ("capability", "links", "said", "duplex_gigabytes_per_second"),
    [
        ("7.0", 6, 25_781, 300),
        ("8.0", 12, 25_000, 600),
        ("8.6", 4, 14_062, 112.5),
        ("9.0", 18, 26_562, 900),
        ("10.0", 18, 53_125, 1800),
    ],
    ids=["V100", "A100", "A6000", "H100", "B200"],
)
def test_the_links_of_a_gpu_add_up_to_its_datasheet(
    capability: str, links: int, said: int, duplex_gigabytes_per_second: float
) -> None:
    link = one_link(capability, speed_megabytes_per_second=said)
    assert link.bandwidth_bytes_per_second is not None
    duplex = 2 * links * link.bandwidth_bytes_per_second
    assert duplex == pytest.approx(duplex_gigabytes_per_second * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("capability", "code", "generation", "bandwidth_bytes_per_second"),
    [
        ("7.0", 2, 2, 25e9),
        ("7.5", 4, 2, 25e9),
        ("8.0", 5, 3, 25e9),
        ("8.6", 5, 3, 14.0625e9),
        ("9.0", 6, 4, 25e9),
        ("9.0", 7, 4, 25e9),
        ("10.0", 7, 5, 50e9),
        ("10.3", 8, 5, 50e9),
        ("12.0", 7, None, None),
        (None, 2, 2, 25e9),
        (None, 5, 3, None),
        (None, 7, None, None),
        ("9.0", None, None, None),
    ],
)
def test_the_architecture_tells_the_generation_that_codes_leave_open(
    capability: str | None,
    code: int | None,
    generation: int | None,
    bandwidth_bytes_per_second: float | None,
) -> None:
    link = one_link(capability, version=code)
    assert link.version == generation
    assert link.bandwidth_bytes_per_second == bandwidth_bytes_per_second


def test_a_link_that_trained_slower_says_so() -> None:
    slow = one_link(version=6, speed_megabytes_per_second=13_281)
    assert slow.bandwidth_bytes_per_second == 13.281e9


def test_a_link_that_is_down_carries_nothing_that_is_known() -> None:
    link = one_link(state=0, version=6, speed_megabytes_per_second=26_562)
    assert (link.active, link.bandwidth_bytes_per_second) == (False, None)


@pytest.mark.parametrize(
    ("remote_type", "address", "remote", "remote_bus_id"),
    [
        (0, "00000000:41:00.0", "gpu", "0000:41:00.0"),
        (0, None, "gpu", None),
        (1, "00000000:04:00.0", "cpu", None),
        (2, "00000000:86:00.0", "switch", None),
        (255, "00000000:86:00.0", None, None),
        (None, "00000000:41:00.0", "gpu", "0000:41:00.0"),
        (None, "00000000:42:00.0", None, None),
    ],
)
def test_the_far_end_is_a_gpu_a_switch_or_a_processor(
    remote_type: int | None, address: str | None, remote: str | None, remote_bus_id: str | None
) -> None:
    link = one_link(remote_type=remote_type, remote_bus_id=address)
    assert (link.remote, link.remote_bus_id) == (remote, remote_bus_id)


def test_links_stand_in_their_order_and_once() -> None:
    gpu = {"nvlinks": [{"link": 2, "state": 1}, {"link": 0, "state": 0}, {"link": 2, "state": 0}]}
    links = nvlinks_of(gpu, compute_capability=None, gpu_bus_ids=())
    assert [(link.link, link.active) for link in links] == [(0, False), (2, True)]


@pytest.mark.parametrize("junk", [None, 7, [7], [{}], [{"link": 0}], [{"link": -1, "state": 1}]])
def test_what_has_no_number_and_state_is_no_link(junk: Any) -> None:
    assert nvlinks_of({"nvlinks": junk}, compute_capability=None, gpu_bus_ids=()) == ()
