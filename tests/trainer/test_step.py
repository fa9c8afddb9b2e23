"""The loss that a step takes."""

from __future__ import annotations

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.step import loss_function
from tests.trainer.plans import plan_text


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch._dynamo's own
def test_the_loss_is_compiled_where_the_blocks_are() -> None:
    """A device needs no driver to be named."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    compiled, eager = (parse_plan(plan_text(compile=compiled)) for compiled in (True, False))
    assert loss_function(compiled, gpu, None) is not next_token_loss
    assert loss_function(compiled, gpu, None) is loss_function(compiled, gpu, None)
    assert loss_function(compiled, cpu, None) is next_token_loss
    assert loss_function(eager, gpu, None) is next_token_loss
