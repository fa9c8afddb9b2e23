"""Context parallelism on real gloo: losses, norms and calls; and the ring that CUDA has."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.experimental import _attention as torch_ring
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpplan.trainer.attention import AttentionCore, AttentionKernel
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.context_parallel import own_positions
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.private_torch import share_of_pieces
from fsdpplan.trainer.support import require_runnable
from fsdpplan.trainer.ulysses import key_copies
from tests.trainer import plans
from tests.trainer.parallel_layouts import MODELS, SETS, TP2, cases, measured, predicted_rows
from tests.trainer.test_tensor_parallel import LOSS_TOLERANCE, NORM_TOLERANCE

FP32 = cases("context_4", "threes_3")


def expected(which: str, name: str) -> dict[str, list[float]]:
    """What one process loses."""
    found: dict[str, list[float]] = measured(which)[SETS[which][name][0]]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), FP32)
def test_a_layout_loses_as_one_process(which: str, name: str) -> None:
    found, alone = measured(which)[name], expected(which, name)
    assert found["losses"] == pytest.approx(alone["losses"][:2], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(alone["norms"][:2], abs=NORM_TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), cases("context_4", precision="bf16"))
def test_bf16_begins_as_fp32_does(which: str, name: str) -> None:
    found, alone = measured(which)[name], expected(which, name)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=0.01)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=0.03)
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), FP32)
def test_calls_and_bytes_are_those_predicted(which: str, name: str) -> None:
    assert measured(which)[name]["rows"] == predicted_rows(which, name)
