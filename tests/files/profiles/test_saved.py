from __future__ import annotations

import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.files.profiles.catalogue import load_node
from fsdpplan.files.profiles.saved import node_text
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.weak import weak_nodes, without_nodes
from tests.files.found_nodes import cluster, profile_of, saved_and_read
from tests.files.profiles.test_detected import PLANNED
from tests.topology.found import machine, with_gpus, with_host, with_interfaces
from tests.topology.hosts import host, hosts, slow_port, weak_links


@st.composite
def allocations(draw: st.DrawFn) -> list[Machine]:
    """One to three hosts of one type, some with something wrong."""
    name = draw(st.sampled_from(PLANNED))
    machines = hosts(draw(st.integers(1, 3)), name)
    faults = draw(st.lists(st.sampled_from(["port", "links", "power", "none"]), max_size=3))
    for at, fault in enumerate(faults[: len(machines)]):
        match fault:
            case "port" if machines[at].nics:
                machines[at] = slow_port(machines[at], machines[at].nics[0].name, rate=3e9)
            case "links" if machines[at].gpus[0].nvlinks:
                machines[at] = weak_links(machines[at], down=3)
            case "power":
                machines[at] = with_gpus(
                    machines[at], 0, power_limit_watts=200.0, default_power_limit_watts=350.0
                )
            case _:
                pass
    return machines


@given(allocations(), st.integers(1, 3))
def test_what_is_saved_is_read_back_as_the_same_cluster(
    machines: list[Machine], nodes: int
) -> None:
    profile = profile_of(*machines)
    with tempfile.TemporaryDirectory() as folder:
        read = saved_and_read(profile, Path(folder), nodes=nodes)
    found = cluster(profile, nodes=nodes)
    assert read.cluster == found.cluster
    assert read.warnings == found.warnings
    sources = dict(found.sources)
    assert {name: text for name, text in read.sources if name in sources} == sources


@pytest.mark.parametrize("name", PLANNED)
def test_every_machine_is_read_back_as_the_same_profile(name: str, tmp_path: Path) -> None:
    profile = profile_of(machine(name))
    path = tmp_path / "found.toml"
    path.write_text(node_text(profile), encoding="utf-8")
    read = load_node(str(path))
    assert replace(read, sources=()) == replace(profile, sources=())
    assert set(profile.sources) <= set(read.sources)


def test_a_weak_host_comes_back_by_name_and_the_healthy_rate_with_its_absence(
    tmp_path: Path,
) -> None:
    profile = profile_of(host(1), slow_port(host(2), "mlx5_5"), host(3))
    read = saved_and_read(profile, tmp_path, nodes=3).cluster
    assert weak_nodes(read) == ("n02",)
    assert read.levels[-1].port_bandwidth_bytes_per_second == 12.5e9
    assert read.weak[0].text == "mlx5_5 runs at 100 Gb/s, the other 7 at 400 Gb/s"
    without = without_nodes(read, ["n02"])
    assert without.levels[-1].port_bandwidth_bytes_per_second == 50e9
    assert without.weak == ()


HOSTILE = ['a"\n[levels]\nx = 1', "\\", "]]", "'''", '"""', "\x1b[2J", "\u202ehost", "é", "a\x00b"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_out_of_its_quotes(name: str, tmp_path: Path) -> None:
    hostile = with_host(machine("nic-slow"), name=name)
    hostile = with_interfaces(hostile, "bond0", name=f"bond{name}")
    profile = profile_of(hostile, name=name)
    document = tomllib.loads(node_text(profile))
    assert document["name"] == "".join(c if c.isprintable() else " " for c in name)
    assert document["weak"][0]["nodes"] == [document["name"]]
    path = tmp_path / "found.toml"
    path.write_text(node_text(replace(profile, weak=())), encoding="utf-8")  # no name of a node
    assert load_node(str(path)).levels == profile.levels


def test_a_profile_of_a_thousand_hosts_can_be_read(tmp_path: Path) -> None:
    machines = [with_host(machine("dgx-h100"), name=f"{at * 7}x{at}y") for at in range(400)]
    assert saved_and_read(profile_of(*machines), tmp_path).cluster.gpus == 8
