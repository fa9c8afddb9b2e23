"""What each rank of the float8 tests runs: emulated products, weights gathered in bf16 or fp8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdpplan.trainer.checkpoint.runs import Checkpoints, Progress
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel import assemble as assembly
from fsdpplan.trainer.parallel.mesh import build_meshes
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans

MODEL = {"hidden": 64, "ffn_hidden": 128, "head_dim": 16, "vocab": 64}
RECIPE = replace(losses.RECIPE, steps=2)

TRAININGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "tensorwise": {"precision": "fp8"},
    "rowwise": {"precision": "fp8", "fp8_recipe": "rowwise"},
    "gathered": {"precision": "fp8", "fp8_all_gather": True},
}


def plan_of(training: dict[str, Any], **layout: Any) -> PlanConfig:
    """A plan for GPUs, which is tried out on CPUs here."""
    document = plans.plan_document(model=MODEL, training=training, **layout)
    document["cluster"]["device"]["kind"] = "cuda"
    return parse_plan(json.dumps(document))


class Job:
    """A run of a plan on the ranks that are there."""

    def __init__(self, plan: PlanConfig) -> None:
        self.plan = plan
        meshes = build_meshes(plan.layout, "cpu")
        model, parts = assembly.build_parts(plan, meshes, losses.CPU)
        self.assembled = assembly.finish(plan, losses.CPU, meshes, model, parts, seed=0)
        self.optimizer = make_optimizer(model, RECIPE)
        self.sequences = open_sequences(plan, None, seed=0)

    def train(self, steps: range) -> list[float]:
        """The losses of these steps."""
        return [self.step(number) for number in steps]

    def step(self, number: int) -> float:
        first = number * self.plan.training.global_batch
        batches = micro_batches(
            self.sequences, self.plan, first=first, rank=dist.get_rank(), device=losses.CPU
        )
        output = train_step(
            self.assembled, self.optimizer, batches, self.plan, clip_norm=RECIPE.clip_norm
        )
        loss = output.loss.clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def checkpoints(self, folder: Path) -> Checkpoints:
        return Checkpoints(folder, self.plan, keep=1, background=False)


def resumed(folder: Path, training: dict[str, Any]) -> list[float]:
    """Losses of a run that goes on from the checkpoint in `folder`."""
    job = Job(plan_of(training, dp_shard=2))
    checkpoints = job.checkpoints(folder)
    found, _ = checkpoints.begin(job.assembled.model, job.optimizer, seed=0, resume="required")
    assert found is not None
    return job.train(range(2, 4))


def measure_all(out: Path) -> None:
    """Every training; rank 0 writes the losses."""
    dist.init_process_group("gloo")
    results = {
        name: Job(plan_of(training, dp_shard=2)).train(range(2))
        for name, training in TRAININGS.items()
    }
    tensor = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
    results["tensor_parallel"] = Job(plan_of(TRAININGS["tensorwise"], **tensor)).train(range(2))
    job, folder = Job(plan_of(TRAININGS["bf16"], dp_shard=2)), out.parent / "checkpoints"
    checkpoints = job.checkpoints(folder)
    checkpoints.begin(job.assembled.model, job.optimizer, seed=0, resume="never")
    job.train(range(2))
    progress = Progress(
        step=2, sequences=16, seed=0, seq_len=24, steps=4, learning_rate=1e-3, warmup_steps=0
    )
    checkpoints.save(job.assembled.model, job.optimizer, progress)
    for name in ("bf16", "tensorwise", "gathered"):
        results[f"{name}_resumed"] = resumed(folder, TRAININGS[name])
    jobs.leave_with(results, out)
