from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import Flags, cluster_of
from fsdpplan.run.detect import (
    allocated_nodes,
    found_cluster,
    found_node,
    hidden_gpus,
    recorded_hosts,
    survey_of_recordings,
    this_host,
)
from fsdpplan.search.advice.alternatives import RecommendedPlan, keeping_fraction
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.training import Training
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.topology.read.recording import Recording
from fsdpplan.topology.survey import Survey
from tests.refusals import check_one_line
from tests.topology.found import machine, without_gpus
from tests.topology.hosts import hosts, slow_port, surveyed
from tests.topology.recorded import FOLDER, NAMES
from tests.topology.recorded import recorded as recording

HEALTHY = {"nic-slow": "dgx-h100", "gpu-missing": "dgx-h100"}
"""Machines with something slow -> the same without it."""


def under(name: str, **environment: str) -> Recording:
    """The recorded machine with these variables set."""
    whole = recording(name)
    return replace(whole, environment={**whole.environment, **environment})


def seen(name: str, visible: str) -> Survey:
    return survey_of_recordings([under(name, CUDA_VISIBLE_DEVICES=visible)])


def test_this_host_is_read_without_failing() -> None:
    assert survey_of_recordings([this_host()]).machines[0].host.name


def test_a_recording_is_read_from_its_file(tmp_path: Path) -> None:
    assert recorded_hosts([FOLDER / "dgx-h100.json"]) == [recording("dgx-h100")]
    with pytest.raises(SpecError, match="does not exist"):
        recorded_hosts([tmp_path / "none.json"])


@pytest.mark.parametrize(
    ("visible", "gpus", "ports"),
    [("0,1,2,3", 4, 4), ("7", 1, 1), ("0,9,1", 1, 1), ("0,1,2,3,4,5,6,7", 8, 8)],
)
def test_programs_have_the_gpus_that_they_see_and_the_ports_of_those(
    visible: str, gpus: int, ports: int
) -> None:
    profile = found_node(seen("dgx-h100", visible))
    assert profile.gpus_per_node == gpus
    assert profile.levels[-1].level.ports == ports


def test_gpus_that_programs_do_not_see_are_counted_and_not_missed() -> None:
    part = under("dgx-h100", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6")
    assert hidden_gpus(part) == 1
    assert survey_of_recordings([part]).findings == ()
    assert hidden_gpus(recording("gpu-missing")) == 0
    assert len(survey_of_recordings([recording("gpu-missing")]).findings) == 1


def test_gpus_that_programs_do_not_see_do_not_stop_a_plan() -> None:
    assert found_node(seen("mig", "1,2,3")).device == "a100-sxm-40g"
    with pytest.raises(ProbeError, match="GPU 0 of this machine is split by MIG"):
        found_node(seen("mig", "0,1"))


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("nothing", "no GPU was found on vm-1"),
        ("amd-mi300x", "mi300-01 has 8 AMD GPUs (gfx942), which fsdpplan cannot plan for"),
        ("mig", "split by MIG"),
    ],
)
def test_a_machine_that_cannot_be_planned_for_is_refused(of: str, said: str) -> None:
    with pytest.raises(ProbeError) as refusal:
        found_node(surveyed(machine(of)))
    check_one_line(refusal.value)
    assert said in str(refusal.value)
    assert "--hardware" in str(refusal.value)


def test_a_driver_that_does_not_answer_is_not_an_absence_of_gpus() -> None:
    broken = replace(recording("dgx-h100"), nvml=None, nvml_error="Driver/library version mismatch")
    with pytest.raises(ProbeError, match="Driver/library version mismatch"):
        found_node(survey_of_recordings([broken]))


def test_gpus_whose_links_are_unknown_are_not_planned_for() -> None:
    whole = machine("rtx-4090")
    unknown = replace(
        whole, gpus=tuple(replace(gpu, pcie_width=None) for gpu in whole.gpus), pairs=()
    )
    with pytest.raises(
        ProbeError, match="what joins the 8 GPUs of ws-4090, or how fast it is, could not"
    ):
        found_node(surveyed(unknown))


def test_the_nodes_of_an_allocation_are_counted_and_there_is_one_outside() -> None:
    assert allocated_nodes(surveyed(machine("slurm-node"))) == 2
    assert allocated_nodes(surveyed(machine("dgx-h100"))) == 1


def test_a_profile_is_dated_by_the_reading() -> None:
    sources = dict(found_node(surveyed(machine("dgx-h100")), date="2025-01-31").sources)
    assert sources["cluster.gpus_per_node"] == "found on dgx-01 by fsdpplan detect, 2025-01-31"


def test_only_hosts_that_take_part_are_named_as_found() -> None:
    first, second, third = hosts(3)
    profile = found_node(surveyed(first, without_gpus(second, 5), third))
    assert "found on n[01,03] by" in dict(profile.sources)["cluster.gpus_per_node"]


def test_flags_are_laid_over_what_was_found() -> None:
    flags = Flags(gpus=32, inter_bandwidth_bytes_per_second=5e9)
    cluster = found_cluster(surveyed(machine("dgx-h100")), flags).cluster
    assert (cluster.gpus, cluster.nodes) == (32, 4)
    assert cluster.levels[-1].port_bandwidth_bytes_per_second == 5e9


def job(cluster: Cluster) -> RecommendedPlan:
    model = load_model("llama-3.1-8b")
    training = Training(seq_len=4096, global_batch=256)
    pins = Pins(dp_shard=cluster.gpus)
    (best, *_) = recommend(model=model, cluster=cluster, training=training, pins=pins).ranked
    return RecommendedPlan(model=model, cluster=cluster, training=training, best=best)


def test_keeping_a_weak_node_has_a_price_that_is_gone_without_it() -> None:
    first, second, *others = hosts(4)
    survey = surveyed(first, slow_port(second, "mlx5_5", rate=1.25e9), *others)
    cluster = found_cluster(survey, Flags(gpus=32)).cluster
    assert weak_nodes(cluster) == ("n02",)
    assert keeping_fraction(job(cluster), ["n02"]) > 0.05
    without = without_nodes(cluster, ["n02"])
    assert without.levels == found_cluster(surveyed(first, *others), Flags(gpus=32)).cluster.levels
    assert keeping_fraction(job(without), ["n02"]) == 0


def pace(cluster: Cluster) -> tuple[float, float]:
    """What one GPU gets inside its node and across nodes."""
    *inner, network = cluster.levels
    rates, below = [], 1
    for level in inner:
        rates.append(level.ports * level.port_bandwidth_bytes_per_second / below)
        below = level.domain_gpus
    return min(rates), network.ports * network.port_bandwidth_bytes_per_second / below


def paces(of: Recording) -> tuple[float, float] | None:
    """Of two such nodes; None where they are refused."""
    try:
        profile = found_node(survey_of_recordings([of]))
        gpus = 2 * (profile.gpus_per_node or 1)
        return pace(cluster_of(profile, None, Flags(gpus=gpus)).cluster)
    except (ProbeError, SpecError):
        return None


@cache
def planned() -> list[str]:
    """Recordings that a plan can be made for."""
    return [name for name in NAMES if paces(recording(name)) is not None]


@given(data=st.data())
def test_a_plan_for_a_machine_that_lost_facts_has_no_more_bandwidth(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(planned()))
    whole = recording(name)
    rng = Random(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from((0.01, 0.1, 0.4)))

    def thinned(facts: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in facts.items() if rng.random() >= share}

    def thinned_nvml(facts: Any) -> Any:
        if isinstance(facts, Mapping):
            kept = {
                key: thinned_nvml(value)
                for key, value in facts.items()
                if key in ("index", "name", "gpus") or rng.random() >= share / 10
            }
            return kept
        return [thinned_nvml(each) for each in facts] if isinstance(facts, list) else facts

    left = replace(
        whole,
        files=thinned(whole.files),
        links=thinned(whole.links),
        commands=thinned(whole.commands),
        nvml=thinned_nvml(whole.nvml),
    )
    found, limit = paces(left), paces(recording(HEALTHY.get(name, name)))
    assert limit is not None
    if found is not None:
        assert found[0] <= limit[0] * (1 + 1e-9)
        assert found[1] <= limit[1] * (1 + 1e-9)
