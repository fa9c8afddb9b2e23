"""Models of Hugging Face under `parallelize`, for ranks that train them one layout after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.trainer import (
    clip_grad_norm,
    gradient_sync,
    load_plan,
    load_safetensors,
    materialise,
    parallelize,
    sampler_arguments,
)
from fsdpplan.trainer.distributed import leave
from tests.trainer import plans

WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "pad_token_id": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TP2 = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
SHARD4 = {"dp_shard": 4}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
DDP = {"dp_replicate": 4, "sharding": "ddp"}
TWICE = {"num_microbatches": 2}
FULL = {"activation_checkpointing": "full"}
OP = {"activation_checkpointing": "op"}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama fsdp": ("llama", SHARD4),
    "llama hsdp": ("llama", HSDP),
    "llama ddp": ("llama", DDP),
    "llama tp2": ("llama", TP2 | {"dp_shard": 2}),
    "llama tp2, logits gathered": ("llama", TP2 | {"dp_shard": 2, "loss_parallel": False}),
    "llama tp2 hsdp, full": ("llama", TP2 | FULL | {"dp_replicate": 2}),
    "llama tp2, op, twice": ("llama", TP2 | OP | TWICE | {"dp_shard": 2}),
    "llama fsdp, full, twice": ("llama", SHARD4 | FULL | TWICE | {"gradient_sync": "last"}),
    "qwen2 hsdp, op": ("qwen2", HSDP | OP),
    "qwen2 tp2": ("qwen2", TP2 | {"dp_shard": 2}),
    "qwen3 fsdp, never": ("qwen3", SHARD4 | {"reshard_after_forward": "never"}),
    "qwen3 tp2": ("qwen3", TP2 | {"dp_shard": 2, "wrap_blocks": 2}),
    "gemma3 tp2": ("gemma3", TP2 | {"dp_shard": 2}),
    "mixtral fsdp": ("mixtral", SHARD4),
    "mixtral hsdp, full": ("mixtral", HSDP | FULL),
}
"""Layouts of four ranks that must lose like one process."""

SEQUENCES, LENGTH, STEPS = plans.GLOBAL_BATCH, 12, 2
CLIP_NORM = 0.5
TIMEOUT_SECONDS = 280
CPU = torch.device("cpu")


def build(name: str) -> nn.Module:
    """A small model, always with the same weights."""
    import transformers

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


def measure(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of a layout, and the parameters that got no gradient."""
    plan = load_plan(plans.plan_text(model={"vocab": 64}, **layout))
    model = parallelize(build(name), plan)
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
    return {"losses": losses, "norms": norms, "missing": missing}


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
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = load_plan(plans.plan_text(model={"vocab": 64}, **layout))
    model = parallelize(model.train(), plan)
    materialise(model, CPU)
    with NewMemory() as memory:
        load_safetensors(model, folder)
    held = sum(local.numel() * 4 for local in map(local_of, model.parameters()))
    tokens = tokens_of(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    wrong = [key for key, p in model.named_parameters() if p.dtype != torch.float32]
    return {
        "loss": float(loss.detach()),
        "largest_bytes": memory.largest_bytes,
        "held_bytes": held,
        "wrong": wrong,
    }


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama fsdp": ("llama", SHARD4),
    "llama tp2": ("llama", TP2 | {"dp_shard": 2}),
    "qwen2 tp2 hsdp": ("qwen2", TP2 | {"dp_replicate": 2}),
    "gemma3 hsdp": ("gemma3", HSDP),
}


def measure_all(out: Path) -> None:
    """Every layout, and its reference; rank 0 writes."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {name: measure(*layout) for name, layout in LAYOUTS.items()}
    for name, (model, layout) in LOADED.items():
        folder = out.parent / model
        if dist.get_rank() == 0 and not folder.exists():
            build(model).save_pretrained(folder, max_shard_size="20KB")
        dist.barrier()
        results[f"load {name}"] = load(folder, model, layout)
    if dist.get_rank() == 0:
        results |= {name: reference(name) for name in MODELS}
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(results), encoding="utf-8")
        os.replace(partial, out)
    leave(0)


@cache
def measured() -> dict[str, Any]:
    """What four ranks measure; once a test process."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "user.json"
        finished = subprocess.run(
            [
                sys.executable,
                str(Path(__file__).parent / "ranks.py"),
                "4",
                "tests.trainer.user_layouts:measure_all",
                str(out),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
