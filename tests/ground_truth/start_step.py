"""The trainer before its first step and while it writes a checkpoint, under fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer import materialise, parallelize
from fsdpplan.trainer.model import Decoder
from fsdpplan.trainer.step import make_optimizer, train_step
from fsdpplan.trainer.weights import initialise
from tests.ground_truth.fake_cluster import LiveBytes, cuda_like_norms, fake_tensors, fake_world
from tests.ground_truth.fsdp_step import RECIPE, plan_config, token_batches


def measured_start_bytes(model: Model, training: Training, layout: Layout) -> tuple[int, int]:
    """(peak before the first step, peak while the state of a checkpoint is collected)."""
    plan = plan_config(model, training, layout)
    with fake_world(layout.world), cuda_like_norms():
        with torch.device("meta"):
            decoder: nn.Module = Decoder(plan.model)
        decoder = parallelize(decoder, plan)
        with fake_tensors():
            live = LiveBytes()
            with live, _fake_generators():
                materialise(decoder, torch.device("cpu"))
                initialise(decoder, seed=0, layers=model.layers)
                start = live.peak
                optimizer = make_optimizer(decoder, RECIPE, fused=True)
                batches = token_batches(plan)
                train_step(decoder, optimizer, batches, plan.layout, clip_norm=RECIPE.clip_norm)
                del batches
                live.start_phase("checkpoint")
                state = get_state_dict(decoder, optimizer)
                checkpoint = live.peak
                del state
    return start, checkpoint


@contextmanager
def _fake_generators() -> Iterator[None]:
    """Fake tensors have no numbers to draw."""
    original = torch.Tensor.normal_

    def normal_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.zero_()

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.normal_ = original  # type: ignore[method-assign]
