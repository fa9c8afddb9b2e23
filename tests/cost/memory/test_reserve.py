"""Reserve: each stream's pool keeps its own highest level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory.peak import (
    fragments_fraction,
    grows_segments,
    rank_memory,
    releasable_bytes,
    reserved_overhead_bytes,
)
from fsdpplan.cost.play.heap import Phase
from tests.cost.problems import case

FORWARD = Phase(
    name="forward", unsharded_parameters_bytes=50, gathers_bytes=20, activations_bytes=100
)
BACKWARD = Phase(name="backward", gradients_bytes=30, activations_bytes=40)


def overhead(*phases: Phase, recorded: int = 0, fragmentation: float = 0.0) -> int:
    """Beyond the peak of `phases`."""
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return reserved_overhead_bytes(
        allocated=peak.total_bytes,
        phases=phases,
        peak=peak,
        recorded_bytes=recorded,
        fragmentation_fraction=fragmentation,
    )


def test_one_phase_reserves_what_it_allocates() -> None:
    assert overhead(FORWARD) == 0
    assert overhead(FORWARD, fragmentation=0.1) == 15


def test_gradients_do_not_take_the_place_of_activations() -> None:
    assert overhead(FORWARD, BACKWARD) == 30


def test_what_nccl_still_uses_is_not_free() -> None:
    assert overhead(FORWARD, recorded=7) == 7


def test_pools_are_given_back_and_lasting_fragments_stay() -> None:
    pools = overhead(FORWARD, BACKWARD)
    assert releasable_bytes(allocated=150, overhead=pools, lasting_fraction=0.0) == pools
    with_fragments = overhead(FORWARD, BACKWARD, fragmentation=0.1)
    released = releasable_bytes(allocated=150, overhead=with_fragments, lasting_fraction=0.05)
    assert with_fragments - released == int(0.05 * 150)


some_phases = st.builds(
    Phase,
    name=st.just("backward"),
    gradients_bytes=st.integers(0, 100),
    unsharded_parameters_bytes=st.integers(50, 100),
    gathers_bytes=st.integers(0, 50),
    activations_bytes=st.integers(0, 100),
)


@given(st.lists(some_phases, min_size=1, max_size=5), some_phases)
def test_another_phase_never_frees_anything(phases: list[Phase], more: Phase) -> None:
    peak = max(phase.total_bytes for phase in phases)
    higher = max(peak, more.total_bytes)
    assert overhead(*phases) >= 0
    assert peak + overhead(*phases) <= higher + overhead(*phases, more)


def fractions(**fields: object) -> float:
    drawn = case(**fields)  # type: ignore[arg-type]
    return fragments_fraction(drawn)


def test_segments_that_grow_keep_less_and_nothing_on_one_stream() -> None:
    fit = case().cluster.device.fit
    assert fit.growing_fragmentation_fraction is not None
    assert fractions(sharding="ddp") == 0
    assert 0 < fractions(dp_shard=8) == fit.growing_fragmentation_fraction
    assert fractions(dp_shard=8) < fit.fragmentation_fraction


@pytest.mark.parametrize(
    "fields",
    [
        {"program": "accelerate"},
        {"runtime": "megatron"},
        {"runtime": "nanotron"},
        {"profile": "azure-nd-mi300x-v5"},
    ],
)
def test_segments_grow_only_where_a_launcher_says_so(fields: dict[str, str]) -> None:
    drawn = case(dp_shard=8, **fields)  # type: ignore[arg-type]
    assert not grows_segments(training=drawn.training, device=drawn.cluster.device)
    assert fragments_fraction(drawn) == drawn.cluster.device.fit.fragmentation_fraction


def test_a_run_on_one_gpu_reserves_what_it_allocates() -> None:
    """Measured: 30 steps of Qwen3-0.6B, 2 x 4096 eight times, on one H100: 26.61 GiB of both."""
    drawn = case(
        "qwen3-0.6b",
        seq_len=4096,
        runtime="fsdp2_wrapped",
        sharding="ddp",
        micro_batch=2,
        num_microbatches=8,
        gradient_sync="last",
    )
    memory = rank_memory(drawn)
    assert memory.peak_allocated_bytes == pytest.approx(26.61 * 2**30, rel=0.01)
    assert memory.peak_reserved_bytes == memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("measured_gib", "layout"),
    [
        (81.85, {"dp_shard": 8, "micro_batch": 2}),
        (43.45, {"dp_shard": 4, "tp": 8, "micro_batch": 16}),
        (70.79, {"dp_shard": 4, "tp": 8, "micro_batch": 32}),
        (63.27, {"dp_shard": 8, "tp": 8, "micro_batch": 32}),
    ],
)
def test_a_32b_job_reserves_as_torchtitan_reported(
    measured_gib: float, layout: dict[str, int]
) -> None:
    """Source: github.com/pytorch/torchtitan/pull/1690, Qwen3-32B; of tp the steps were eager."""
    split = layout.get("tp", 1) > 1
    drawn = case(
        "qwen3-32b",
        profile="grand-teton-h100-96g-500w",
        seq_len=4096,
        activation_checkpointing="full",
        compile=not split,
        sequence_parallel=split,
        loss_parallel=split,
        **layout,
    )
    assert rank_memory(drawn).peak_reserved_bytes == pytest.approx(measured_gib * 2**30, rel=0.03)
