from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.topology import FoundLevel, Island, Rail, Topology
from fsdpplan.topology.conclude.differences import differences
from fsdpplan.topology.conclude.findings import findings_of
from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.machine import machine_of
from fsdpplan.topology.conclude.network_facts import network_of
from fsdpplan.topology.read.recording import Recording
from tests.recordings.machines.build import MACHINES, recording_text
from tests.topology.found import findings, machine, topology, without_gpus
from tests.topology.recorded import FOLDER, NAMES, recorded

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads(
    (FOLDER / "expected.toml").read_text(encoding="utf-8")
)
HEALTHY = {"nic-slow": "dgx-h100", "gpu-missing": "dgx-h100"}
"""Machines with something slow -> the same without it."""


def numbers(indices: Sequence[int]) -> str:
    """`0-7`, or each by itself where there is one or a gap."""
    run = list(range(indices[0], indices[-1] + 1)) if indices else []
    return (
        f"{run[0]}-{run[-1]}"
        if len(run) > 1 and run == list(indices)
        else ",".join(str(index) for index in indices)
    )


def gigabytes(rate: float | None) -> str:
    return "?" if rate is None else f"{rate / 1e9:.3g}"


def island_words(island: Island) -> str:
    size = "?" if island.domain_gpus is None else island.domain_gpus
    rate = gigabytes(island.bandwidth_bytes_per_second)
    return f"{numbers(island.gpus)} {island.kind} {rate} of {size}"


def rail_words(rail: Rail) -> str:
    # two GPUs that share a port are listed one by one
    gpus = ",".join(map(str, rail.gpus)) if len(rail.gpus) < 3 else numbers(rail.gpus)
    return f"{rail.nic} {gpus} {rail.path} {gigabytes(rail.bandwidth_bytes_per_second)}"


def level_words(level: FoundLevel) -> str:
    size = "-" if level.domain_gpus is None else level.domain_gpus
    rate = gigabytes(level.port_bandwidth_bytes_per_second)
    return f"{level.kind} {size} {level.ports}x{rate}"


def test_every_recording_is_what_its_description_builds() -> None:
    assert set(NAMES) == set(MACHINES) == set(EXPECTED)
    for name in NAMES:
        assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == recording_text(name), (
            f"{name}.json is not what build.py makes: run python -m tests.recordings.machines.build"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_recording_says_what_it_is_built_from(name: str) -> None:
    assert len(recorded(name).about) > 40
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_gives_exactly_its_islands_rails_and_levels(name: str) -> None:
    found, expected = topology(name), EXPECTED[name]
    assert [island_words(island) for island in found.islands] == expected["islands"]
    assert [rail_words(rail) for rail in found.rails] == expected["rails"]
    assert [level_words(level) for level in found.levels] == expected["levels"]


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_gives_exactly_its_bandwidths(name: str) -> None:
    found, expected = topology(name), EXPECTED[name]
    for rate, stated in (
        (found.inside_bytes_per_second, expected.get("inside")),
        (found.across_bytes_per_second, expected.get("across")),
    ):
        assert (rate is None) == (stated is None)
        assert rate is None or rate / 1e9 == pytest.approx(stated, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_gives_exactly_its_findings(name: str) -> None:
    found = [f"{each.kind} {each.severity} {each.where}" for each in findings(machine(name))]
    assert found == EXPECTED[name]["findings"]


@pytest.mark.parametrize("name", NAMES)
def test_gpus_are_in_one_island_each_and_rails_serve_gpus_that_exist(name: str) -> None:
    found = topology(name)
    indices = [gpu.index for gpu in machine(name).gpus]
    assert sorted(index for island in found.islands for index in island.gpus) == indices
    assert {index for rail in found.rails for index in rail.gpus} <= set(indices)
    assert all(rail.gpus for rail in found.rails)


def everything(found: Topology, of: Recording) -> None:
    """Draws every conclusion, to see that none fails."""
    host = machine_of(of)
    findings_of(host, found)
    network_of(host, found, others=(machine("dgx-h100"),))
    differences((host, machine("dgx-h100")))


def at_most(rate: float | None, limit: float | None) -> bool:
    return rate is None or rate <= (limit or 0.0) * (1 + 1e-9)


@given(data=st.data())
def test_a_recording_that_lost_facts_never_states_more_bandwidth(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    whole = recorded(name)
    rng = Random(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from((0.02, 0.2, 0.7)))

    def thinned(facts: Mapping[str, str]) -> dict[str, str]:
        """Without some of the facts, and with some cut short."""
        kept = {key: value for key, value in facts.items() if rng.random() >= share}
        return {
            key: value if rng.random() >= share else value[: rng.randrange(len(value) + 1)]
            for key, value in kept.items()
        }

    left = replace(
        whole,
        files=thinned(whole.files),
        links=thinned(whole.links),
        commands=thinned(whole.commands),
        packages=thinned(whole.packages),
    )
    found, limit = topology_of(machine_of(left)), topology(HEALTHY.get(name, name))
    everything(found, left)
    assert at_most(found.inside_bytes_per_second, limit.inside_bytes_per_second)
    assert at_most(found.across_bytes_per_second, limit.across_bytes_per_second)


@given(data=st.data())
def test_a_machine_that_lost_gpus_has_no_faster_links(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in NAMES if machine(name).gpus]))
    whole, before = machine(name), topology(name)
    gone = data.draw(st.sets(st.sampled_from([gpu.index for gpu in whole.gpus])))
    left = without_gpus(whole, *gone)
    found = topology_of(left)
    findings_of(left, found)
    network_of(left, found, others=(whole,))
    best = max((each.bandwidth_bytes_per_second or 0.0 for each in before.islands), default=0.0)
    assert all(at_most(each.bandwidth_bytes_per_second, best) for each in found.islands)
    assert len(found.rails) <= len(before.rails)
    for level in found.levels:
        assert level.port_bandwidth_bytes_per_second <= level.healthy_bandwidth_bytes_per_second
