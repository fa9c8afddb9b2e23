"""Optimizer: bytes of a step by what the software does."""

from __future__ import annotations

import pytest

from fsdpplan.cost.kernels.optimizer import LISTS_SHARE, OptimizerRecipe, optimizer_seconds
from tests.cost.works import H100

MEMORY = H100.memory_bandwidth_bytes_per_second * H100.fit.memory_fraction


@pytest.mark.parametrize(
    ("recipe", "expected_bytes"),
    [
        (OptimizerRecipe(), 40),
        (OptimizerRecipe(half_parameters=True), 46),
        (OptimizerRecipe(half_parameters=True, half_gradients=True), 52),
        (OptimizerRecipe(fused=False), 92),
        (OptimizerRecipe(optimizer="adamw_8bit"), 28),
        (OptimizerRecipe(optimizer="muon"), 80),
        (OptimizerRecipe(scales_loss=True), 48),
    ],
)
def test_bytes_of_one_parameter(recipe: OptimizerRecipe, expected_bytes: int) -> None:
    assert recipe.bytes_per_parameter == expected_bytes
    seconds = optimizer_seconds(local_parameters=10**9, device=H100, tensors=1, recipe=recipe)
    assert seconds == pytest.approx(expected_bytes * 1e9 / (LISTS_SHARE * MEMORY))


def test_the_host_is_slower_than_the_device() -> None:
    there, here = (
        optimizer_seconds(
            local_parameters=10**9,
            device=H100,
            tensors=1,
            host_bytes_per_second=rate,
        )
        for rate in (MEMORY / 60, None)
    )
    assert there == pytest.approx(60 * LISTS_SHARE * here)


def test_many_small_tensors_cost_their_launches() -> None:
    seconds = optimizer_seconds(local_parameters=1, device=H100, tensors=300)
    assert seconds == pytest.approx(300 * H100.fit.kernel_launch_seconds)
