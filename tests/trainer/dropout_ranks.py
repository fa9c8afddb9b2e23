"""What each rank of the tests of dropout runs: real layouts whose masks are looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpplan.trainer import train
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.dropout import Dropout
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.rng import seed_generators
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans

EVERYWHERE = {"attention": 0.1, "residual": 0.1, "embedding": 0.1}
PARALLEL = {"sequence_parallel": True, "loss_parallel": True}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, **PARALLEL},
    "cp": {"cp": 2, "cp_attention": "ulysses"},
    "fsdp": {"dp_shard": 2},
    "ddp": {"dp_replicate": 2, "sharding": "ddp"},
    "pp": {"pp": 2, "schedule": "1f1b", "num_microbatches": 2, "reshard_after_forward": "never"}
    | {"gradient_sync": "last"},
    "zero bubble": {
        **{"pp": 2, "schedule": "interleaved_zero_bubble", "virtual_stages": 2},
        **{"num_microbatches": 2, "reshard_after_forward": "never", "gradient_sync": "last"},
    },
}
MODES = ("none", "full", "op", "attention")


def gradients_of(text: str, *, step: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(loss, norm of the gradients, masks of this rank's first branch) of one step."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    batches = micro_batches(sequences, plan, first=0, rank=dist.get_rank(), device=losses.CPU)
    masks: list[Tensor] = []
    dropouts = [each for each in assembled.model.modules() if isinstance(each, Dropout)]
    dropouts[0].register_forward_hook(lambda _, __, out: masks.append(out.detach() != 0))
    seed_generators(seed=0, step=step, rank=dist.get_rank())
    output = train_step(assembled, optimizer, batches, plan, clip_norm=1e9)
    loss = output.loss.clone()
    dist.all_reduce(loss)
    return loss, output.grad_norm, masks


def measure_masks(out: Path) -> None:
    """Of each layout: what recomputation changes, and whether two ranks drop the same."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, layout in jobs.asked_of(LAYOUTS).items():
        found: dict[str, Any] = {}
        for mode in MODES if name != "zero bubble" else ("none", "full"):
            text = plans.plan_text(
                training={"dropout": EVERYWHERE, "seq_len": 32},
                model={"qk_norm": False},
                **layout,
                activation_checkpointing=mode,
            )
            loss, norm, masks = gradients_of(text)
            found[mode] = {"loss": loss.item(), "norm": norm.item()}
        sizes = [torch.zeros_like(masks[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, masks[0].contiguous())
        found["kept"] = masks[0].float().mean().item()
        found["elements"] = masks[0].numel()
        found["equal"] = (sizes[0] == sizes[1]).float().mean().item()
        results[name] = found
    jobs.leave_with(results, out)


STEPS, AT = 8, 4
RUN: dict[str, Any] = {
    "model": {"layers": 1, "qk_norm": False},
    "training": {"dropout": EVERYWHERE},
}


def trained(folder: Path, *options: str, rank: int, draws: int = 0, **layout: Any) -> list[float]:
    """Losses of a run whose files are in `folder`; `draws`: another generator's numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, metrics = folder / f"plan-{rank}.json", folder / "metrics.jsonl"
    plan.write_text(plans.plan_text(**RUN, **layout), encoding="utf-8")
    words = ["--plan", str(plan), "--metrics", str(metrics), "--learning-rate", "1e-2"]

    def seeded(*, seed: int, step: int, rank: int) -> None:
        seed_generators(seed=seed + 1000 * draws, step=step, rank=rank)

    with mock.patch.object(train, "seed_generators", seeded):
        train.run_training(parse_options([*words, "--no-numbers", "--steps", str(STEPS), *options]))
    if dist.get_world_size() > 1:
        dist.barrier()
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [one["loss"] for one in events if one["event"] == "step"]


def measure_runs(out: Path) -> None:
    """An unbroken run, and two that go on from its middle."""
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), out.parent / "saved"
    words = ["--checkpoint-dir", str(saved), "--checkpoint-every", str(AT)]
    words += ["--checkpoint-keep", "9"]
    results = {"whole": trained(out.parent / "whole", *words, rank=rank, **LAYOUTS["fsdp"])}
    for name in ("fsdp", "tp"):
        if rank == 0:
            (saved / "latest").write_text(f"step-{AT:08}\n")
        dist.barrier()
        again = [*words, "--resume", "required"]
        results[name] = trained(out.parent / name, *again, rank=rank, **LAYOUTS[name])
    jobs.leave_with(results, out)
