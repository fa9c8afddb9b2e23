"""The peak is the highest of every unit and moment: no unit that is not looked at is higher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory.fsdp_moments import fsdp_moments, fsdp_phases
from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.play.heap import Phase
from tests.cost.problems import Case, case, some_models

LEVELS: dict[str, Callable[[Phase], int]] = {
    "all": lambda phase: phase.total_bytes,
    "computed": lambda phase: phase.total_bytes - phase.gathers_bytes - phase.gradients_bytes,
    "gathered": lambda phase: phase.gathers_bytes,
    "reduced": lambda phase: phase.gradients_bytes,
}
"""What is looked for at its highest: the peak, and the pool of each stream."""


def sizes_of(wrapped: Case) -> RankSizes:
    """What the phases of the only pipeline rank add up."""
    layers = wrapped.model.layers
    return rank_sizes(wrapped, whole_model(wrapped.model), in_flight_blocks=layers)


def highest(phases: Sequence[Phase]) -> dict[str, int]:
    """Of each level."""
    return {name: max(map(level, phases)) for name, level in LEVELS.items()}


def of_every_unit(s: RankSizes) -> list[Phase]:
    """The phases of all units, whichever bound the others."""
    return [moment.phase for moment in fsdp_moments(s, range(s.units))]


def assert_no_unit_is_higher(wrapped: Case) -> None:
    s = sizes_of(wrapped)
    found = fsdp_phases(s)
    assert highest(found) == highest([*found, *of_every_unit(s)])


@given(some_models(), st.data())
def test_no_unit_is_higher_than_the_peak(model: object, data: st.DataObject) -> None:
    layers = model.layers  # type: ignore[attr-defined]
    mode = data.draw(st.sampled_from(["none", "attention", "op", "full"]))
    assert_no_unit_is_higher(
        case(
            model,  # type: ignore[arg-type]
            dp_replicate=data.draw(st.sampled_from([1, 2])),
            dp_shard=data.draw(st.sampled_from([1, 4, 64])),
            wrap_blocks=data.draw(st.integers(1, layers)),
            activation_checkpointing=mode,
            checkpoint_blocks="all"
            if mode == "none"
            else data.draw(st.sampled_from(["all", *range(1, layers)])),
            reshard_after_forward=data.draw(st.sampled_from(["always", "never"])),
            gradient_sync=data.draw(st.sampled_from(["every", "reduce_scatter_only", "last"])),
            num_microbatches=data.draw(st.integers(1, 2)),
            micro_batch=data.draw(st.sampled_from([1, 8])),
        )
    )


@pytest.mark.parametrize("mode", ["none", "op", "full"])
@pytest.mark.parametrize(
    ("name", "gpus"),
    [("llama-3.1-405b", 512), ("llama-2-13b", 512), ("mixtral-8x7b", 64), ("gpt2", 8)],
)
def test_no_unit_of_a_real_model_is_higher_whatever_the_wrap(
    name: str, gpus: int, mode: str
) -> None:
    layers = case(name, dp_shard=gpus).model.layers
    for wrap_blocks in range(1, layers + 1):
        assert_no_unit_is_higher(
            case(
                name,
                seq_len=1024,
                dp_shard=gpus,
                wrap_blocks=wrap_blocks,
                activation_checkpointing=mode,
            )
        )


def test_the_highest_unit_may_be_the_third_last() -> None:
    """126 blocks by fours: the last unit is of two, and what was gathered ahead of it is small."""
    s = sizes_of(case("llama-3.1-405b", dp_shard=512, wrap_blocks=4, activation_checkpointing="op"))
    peaks = [0] * s.units
    for part, index, phase in fsdp_moments(s, range(s.units)):
        if part == "backward":
            peaks[index] = max(peaks[index], phase.total_bytes)
    assert peaks.index(max(peaks)) == s.units - 3
    assert max(phase.total_bytes for phase in fsdp_phases(s)) == max(peaks)
