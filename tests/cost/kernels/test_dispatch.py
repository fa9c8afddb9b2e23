"""Dispatch: what the host does for a block."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.compute import (
    COMPILED_CALL_OPERATORS,
    host_seconds,
    operators,
    python_operators,
)
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.spec.model import Model
from tests.cost.problems import some_models
from tests.cost.works import work, works


@given(some_models())
def test_compiling_launches_less(model: Model) -> None:
    eager, compiled = (work(model, compiled=c) for c in (False, True))
    assert operators(compiled)[0] < operators(eager)[0]
    calls, gradients = COMPILED_CALL_OPERATORS, len(block_tensors(model))
    assert python_operators(compiled) == (calls, calls + gradients)


def test_kernels_fused_by_hand_are_fewer() -> None:
    eager, fused = (work(compiled=False, fused_kernels=f) for f in (False, True))
    assert operators(fused)[0] < operators(eager)[0]


def test_eager_tensor_parallelism_keeps_the_host_busy() -> None:
    alone = work(compiled=False)
    split = replace(alone, tp=8, sequence_parallel=True)
    plain = replace(alone, tp=8)
    seconds = [sum(host_seconds(w, kernel_launch_seconds=5e-6)) for w in (alone, plain, split)]
    assert seconds == sorted(seconds)
    assert seconds[2] > seconds[0] + 4e-4  # ten collectives of eight operators each


@given(works())
def test_the_host_does_not_care_for_tokens(block: BlockWork) -> None:
    more = replace(block, tokens=2 * block.tokens)
    assert host_seconds(block, kernel_launch_seconds=5e-6) == host_seconds(
        more, kernel_launch_seconds=5e-6
    )
