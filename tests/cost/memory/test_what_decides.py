"""What decides the memory of a rank: model, training, layout and kind of device, and no rate."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory import peak
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.spec.cluster import Cluster
from tests.cost.problems import Case
from tests.cost.wide import wide_cases


def at_other_rates(cluster: Cluster, factor: float) -> Cluster:
    """The same machine with other links, rates and amounts of memory."""
    device = cluster.device
    fp8 = device.peak_fp8_flops_per_second
    return replace(
        cluster,
        device=replace(
            device,
            memory_bytes=round(factor * device.memory_bytes),
            memory_bandwidth_bytes_per_second=factor * device.memory_bandwidth_bytes_per_second,
            peak_bf16_flops_per_second=factor * device.peak_bf16_flops_per_second,
            peak_fp16_flops_per_second=factor * device.peak_fp16_flops_per_second,
            peak_fp32_flops_per_second=factor * device.peak_fp32_flops_per_second,
            peak_fp8_flops_per_second=None if fp8 is None else factor * fp8,
            host_link_bytes_per_second=factor * device.host_link_bytes_per_second,
            multiprocessors=device.multiprocessors + 1,
        ),
        levels=tuple(
            replace(
                level,
                port_bandwidth_bytes_per_second=factor * level.port_bandwidth_bytes_per_second,
                latency_seconds=factor * level.latency_seconds,
            )
            for level in cluster.levels
        ),
    )


def computed(case: Case) -> list[object]:
    """Of each rank, computed anew."""
    peak._stage_memory.cache_clear()
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    flights = in_flight_blocks(model=case.model, layout=case.layout)
    return [
        peak.stage_memory(case, stage, in_flight_blocks=blocks)
        for stage, blocks in zip(stages, flights, strict=True)
    ]


@given(wide_cases(), st.sampled_from([0.25, 3.0]))
def test_machines_of_other_rates_hold_the_same(drawn: Case, factor: float) -> None:
    other = replace(drawn, cluster=at_other_rates(drawn.cluster, factor))
    assert computed(other) == computed(drawn)
