"""Reserve: each stream's pool keeps its own highest level."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory.peak import releasable_bytes, reserved_overhead_bytes
from fsdpplan.cost.play.heap import Phase

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
