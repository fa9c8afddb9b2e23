"""One rank of a large plan, and the kernels of a step: what `single_gpu` leaves out.

    python tests/benchmarks/on_device.py rank kernels --device cuda --out device.jsonl

`rank`: the plan's own first rank, whose collectives are those of a group that is not there: real
memory, real kernels, no network; predicted before. `kernels`: one step under torch's profiler,
milliseconds and counts of each kernel, and the host's side. A benchmark, not a test: nothing here
asserts. With `--device cpu` tiny shapes go the same way.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from single_gpu_cases import plan_of  # noqa: E402

from fsdpplan.files.catalogue import load_model  # noqa: E402
from fsdpplan.files.clusters import load_cluster  # noqa: E402
from fsdpplan.files.huggingface.config import read_hf_config  # noqa: E402
from fsdpplan.files.plans import plan_json  # noqa: E402
from fsdpplan.spec.layout import Layout  # noqa: E402
from fsdpplan.spec.model import Model  # noqa: E402
from fsdpplan.spec.plan import Case, Plan  # noqa: E402
from fsdpplan.spec.training import Training  # noqa: E402
from fsdpplan.trainer.config import PlanConfig, parse_plan  # noqa: E402
from fsdpplan.trainer.optimizer import Recipe, make_optimizer  # noqa: E402
from fsdpplan.trainer.parallel.assemble import assemble  # noqa: E402
from fsdpplan.trainer.private_torch import join_fake_group  # noqa: E402
from fsdpplan.trainer.step import train_step  # noqa: E402
from fsdpplan.trainer.text.data import micro_batches, open_sequences  # noqa: E402

TINY = ROOT / "tests" / "gpu" / "tiny" / "config.json"
RECIPE = Recipe(steps=8, learning_rate=3e-4, warmup_steps=0, weight_decay=0.1, clip_norm=1.0)
MOST_KERNELS = 40
"""Kernels that are named, the longest first; the others are one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A plan of which one rank is run, and how many steps."""

    name: str
    plan: Plan
    steps: int


def works(parts: Sequence[str], device: torch.device) -> list[Work]:
    """What was asked for, at the size that the device takes."""
    is_cuda = device.type == "cuda"
    tiny = read_hf_config(TINY).model
    recomputed = Layout(
        dp_shard=64,
        micro_batch=4 if is_cuda else 1,
        num_microbatches=2,
        activation_checkpointing="full",
        compile=is_cuda,
    )
    alone = Layout(sharding="fsdp", micro_batch=2, compile=is_cuda)
    asked = {
        "rank": (load_model("llama-3.1-70b") if is_cuda else tiny, recomputed, 2),
        "kernels": (load_model("llama-3.2-1b") if is_cuda else tiny, alone, 4),
    }
    return [
        Work(name=part, plan=planned(*asked[part][:2], device), steps=asked[part][2])
        for part in parts
    ]


def planned(model: Model, layout: Layout, device: torch.device) -> Plan:
    """The plan as the reference profile predicts it."""
    cluster = load_cluster("dgx-h100", gpus=layout.world).cluster
    training = Training(
        seq_len=4096 if device.type == "cuda" else 64,
        global_batch=layout.global_batch,
        precision="bf16",
        torch=".".join(torch.__version__.split(".")[:2]),
    )
    return plan_of(Case(model=model, cluster=cluster, training=training, layout=layout))


def config_of(plan: Plan, device: torch.device) -> PlanConfig:
    """It as the trainer reads it, on this device."""
    document = json.loads(plan_json(plan))
    document["cluster"]["device"]["kind"] = device.type
    return parse_plan(json.dumps(document))


def measured(work: Work, device: torch.device) -> dict[str, Any]:
    """Seconds and peaks of the steps of rank 0, the last of them under the profiler for kernels."""
    plan = config_of(work.plan, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    assembled = assemble(plan, device, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found: dict[str, Any] = {"built_seconds": round(time.perf_counter() - began, 3)}

    def step() -> float:
        batches = micro_batches(sequences, plan, first=0, rank=0, device=device)
        start = time.perf_counter()
        train_step(assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return round(time.perf_counter() - start, 5)

    found["step_seconds"] = [step() for _ in range(work.steps)]
    if device.type == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    if work.name == "kernels":
        found |= profiled(step, device)
    return found


def profiled(step: Any, device: torch.device) -> dict[str, Any]:
    """Kernels of one more step and operators of its host: name, count, milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        seconds = step()
    rows = profiler.key_averages()

    def named(field: str) -> list[list[Any]]:
        told = sorted(
            ((getattr(row, field) / 1000, row.count, row.key) for row in rows), reverse=True
        )
        told = [one for one in told if one[0] > 0]
        rest = (
            sum(one[0] for one in told[MOST_KERNELS:]),
            sum(one[1] for one in told[MOST_KERNELS:]),
        )
        listed = [[key[:120], count, round(ms, 3)] for ms, count, key in told[:MOST_KERNELS]]
        return [*listed, ["all others", rest[1], round(rest[0], 3)]]

    found: dict[str, Any] = {"profiled_seconds": seconds, "host": named("self_cpu_time_total")}
    if device.type == "cuda":
        found["device"] = named("self_device_time_total")
    return found


def main() -> int:
    """Run what was asked for, and append a line of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("rank", "kernels"))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    for work in works(options.parts, device):
        estimate = work.plan.estimate
        row: dict[str, Any] = {
            "part": work.name,
            "model": work.plan.model.name,
            "predicted": {
                "step_seconds": estimate.step_seconds.expected,
                "allocated_bytes": estimate.memory.peak_allocated_bytes,
                "reserved_bytes": estimate.memory.peak_reserved_bytes,
            },
        }
        join_fake_group(rank=0, world=work.plan.layout.world)
        try:
            row["measured"] = measured(work, device)
        finally:
            dist.destroy_process_group()
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"on_device: {work.name}: {row['measured']['step_seconds']} s a step", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
