"""What each rank does with models of Hugging Face, one layout after another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Imported once, before the ranks are forked.
from transformers import (  # noqa: F401
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from fsdpplan.trainer import (
    clip_grad_norm,
    gradient_sync,
    load_plan,
    load_safetensors,
    materialise,
    parallelize,
    sampler_arguments,
)
from tests.trainer import jobs, plans
from tests.trainer.user_layouts import BF16, FP8, LAYOUTS, LOADED, MODELS, WIDTHS

SEQUENCES, LENGTH, STEPS = plans.GLOBAL_BATCH, 12, 2
CLIP_NORM = 0.5
CPU = torch.device("cpu")
PARALLELIZE = sys.modules["fsdpplan.trainer.parallel.parallelize"]


def build(name: str) -> nn.Module:
    """A small model, always with the same weights."""
    config, fields = MODELS[name]
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**WIDTHS, **fields})
    )
    return made.train()


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (SEQUENCES, LENGTH), generator=generator)


def reference(name: str) -> dict[str, list[float]]:
    """The same steps in one process, without a line of ours."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = tokens_of(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def measure(name: str, layout: dict[str, Any], *, precision: str = "fp32") -> dict[str, Any]:
    """Losses and norms of a layout, and the parameters that got no gradient."""
    training = {"precision": precision}
    document = plans.plan_document(model={"vocab": 64}, training=training, **layout)
    if precision == "fp8":  # a plan for GPUs, which is tried out on CPUs here
        document["cluster"]["device"]["kind"] = "cuda"
    plan = load_plan(json.dumps(document))
    with mock.patch.object(PARALLELIZE, "start", return_value=CPU):  # the ranks have met
        model = parallelize(build(name), plan, numbers=False if precision == "fp8" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = sampler_arguments(plan)
    losses, norms, missing = [], [], []
    for step in range(STEPS):
        mine = tokens_of(step)[share["rank"] :: share["num_replicas"]]
        parts = mine.split(plan.layout.micro_batch)
        total = torch.zeros(())
        for index, part in enumerate(parts):
            with gradient_sync(model, plan.layout, is_last=index == len(parts) - 1):
                loss = model(input_ids=part, labels=part).loss / len(parts)
                loss.backward()
            total += float(loss.detach())
        norms.append(clip_grad_norm(model, CLIP_NORM).item())
        missing += [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    meshes = {str(p.device_mesh) for p in model.parameters() if isinstance(p, DTensor)}
    return {"losses": losses, "norms": norms, "missing": missing, "meshes": len(meshes)}


class NewMemory(TorchDispatchMode):
    """The largest tensor whose memory is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if type(each) is torch.Tensor}
        if type(result) is torch.Tensor and result.untyped_storage().data_ptr() not in given:
            self.largest_bytes = max(self.largest_bytes, result.untyped_storage().nbytes())
        return result


def load(folder: Path, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A model built on the meta device, sharded, and loaded: what it loses, and what it took."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = load_plan(plans.plan_text(model={"vocab": 64}, **layout))
    model = parallelize(model.train(), plan)
    materialise(model, CPU)
    with NewMemory() as memory:
        load_safetensors(model, folder)
    held = sum(local_of(parameter).nbytes for parameter in model.parameters())
    tokens = tokens_of(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    return {
        "loss": float(loss.detach()),
        "largest_bytes": memory.largest_bytes,
        "held_bytes": held,
        "whole_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def measure_all(out: Path) -> None:
    """Every layout, and its reference; rank 0 writes."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {
        name: measure(*layout) for name, layout in jobs.asked_of(LAYOUTS).items()
    }
    for name, layout in jobs.asked_of(BF16).items():
        results[name] = measure("llama", layout, precision="bf16")
    for name, layout in jobs.asked_of(FP8).items():
        results[name] = measure("wide llama", layout, precision="fp8")
    for name, (model, layout) in jobs.asked_of(LOADED).items():
        folder = out.parent / model
        if dist.get_rank() == 0 and not folder.exists():
            build(model).save_pretrained(folder, max_shard_size="20KB")
        dist.barrier()
        results[f"load {name}"] = load(folder, model, layout)
    if dist.get_rank() == 0:
        results |= {name: reference(name) for name in MODELS}
    jobs.leave_with(results, out)
