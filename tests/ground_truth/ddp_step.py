"""One optimizer step of a DDP rank under fake tensors, as far as they reach.

DistributedDataParallel's reducer is C++ that needs real data, so the trainer's model runs alone
under autocast, with gradients that exist all the time as DDP's buckets do. CPU autocast runs the
same operators in bf16 as CUDA's for this decoder; where CUDA's differs, in RMSNorm, it is emulated.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer import materialise
from fsdpplan.trainer.model import Decoder
from fsdpplan.trainer.parallelize import apply_autocast, apply_checkpointing, find_blocks
from fsdpplan.trainer.step import clip_gradients, forward_backward, make_optimizer
from tests.ground_truth.fake_cluster import LiveBytes, cuda_like_norms, fake_tensors
from tests.ground_truth.fsdp_step import RECIPE, plan_config, token_batches


def measured_ddp_peak_bytes(model: Model, training: Training, layout: Layout) -> int:
    """Peak of the second step, when all optimizer state exists."""
    plan = plan_config(model, training, layout)
    device = torch.device("cpu")
    with cuda_like_norms():
        with torch.device("meta"):
            decoder: nn.Module = Decoder(plan.model)
        apply_checkpointing(find_blocks(decoder), plan.layout)
        apply_autocast(decoder, plan, device)
        with fake_tensors():
            materialise(decoder, device)
            optimizer = make_optimizer(decoder, RECIPE, fused=True)
            batches = token_batches(plan)
            live = LiveBytes()
            for parameter in decoder.parameters():
                parameter.grad = torch.zeros_like(parameter)
                live.add("buckets", parameter.grad)
            live.add("parameters", *decoder.parameters())
            live.add("tokens", *(tensor for batch in batches for tensor in batch))
            with live:
                for _ in range(2):
                    live.start_phase("step")
                    forward_backward(decoder, batches, plan.layout)
                    clip_gradients(decoder, RECIPE.clip_norm)
                    optimizer.step()
    return live.peak
