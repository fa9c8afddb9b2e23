"""What each rank does with models of one's own and of Hugging Face, by `forward_backward`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdpplan.trainer import (
    clip_grad_norm,
    forward_backward,
    load_checkpoint,
    load_plan,
    load_safetensors,
    materialise,
    parallelize,
    sampler_arguments,
    save_checkpoint,
)
from fsdpplan.trainer.config import PlanConfig
from tests.trainer import jobs, plans, user_ranks
from tests.trainer.own_layouts import BF16, LAYOUTS, LOADED, MOVES
from tests.trainer.own_models import FLAT_PLAN, HEADS, LAYERS, LENGTH, TP_PLAN, VOCAB, Own
from tests.trainer.user_layouts import MODELS, WIDTHS
from tests.trainer.user_ranks import CLIP_NORM, CPU, PARALLELIZE, STEPS

HF = frozenset(MODELS)
Trained = tuple[nn.Module, torch.optim.Optimizer, PlanConfig]


def build(name: str) -> nn.Module:
    """A small model, always with the same weights."""
    if name in HF:
        return user_ranks.build(name)
    torch.manual_seed(0)
    return Own(name)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of all sequences of a step, and what comes behind each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (plans.GLOBAL_BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def reference(name: str) -> dict[str, list[float]]:
    """The same steps in one process, without a line of ours."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        if name in HF:
            loss = model(input_ids=tokens, labels=tokens).loss
        else:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def plan_of(name: str, layout: dict[str, Any], precision: str = "fp32") -> PlanConfig:
    layers = WIDTHS["num_hidden_layers"] if name in HF else LAYERS
    training = {"seq_len": LENGTH, "precision": precision}
    model = {"vocab": VOCAB, "layers": layers, "kv_heads": 2 if name in HF else HEADS}
    return load_plan(json.dumps(plans.plan_document(model=model, training=training, **layout)))


def start(name: str, layout: dict[str, Any], precision: str = "fp32") -> Trained:
    plan = plan_of(name, layout, precision)
    given: dict[str, Any] = {}
    if plan.layout.tp > 1 and name not in HF:
        given["tp_plan"] = FLAT_PLAN if name == "flat" else TP_PLAN
    with mock.patch.object(PARALLELIZE, "start", return_value=CPU):  # the ranks have met
        model = parallelize(build(name), plan, numbers=False, **given)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), plan


def loss_of(name: str, model: nn.Module, plan: PlanConfig, step: int) -> Tensor:
    """This rank's loss of a step, with its gradients."""
    share = sampler_arguments(plan)
    tokens, targets = (each[share["rank"] :: share["num_replicas"]] for each in batch_of(step))
    if name in HF:
        return forward_backward(model, plan, {"input_ids": tokens, "labels": tokens})
    return forward_backward(model, plan, tokens, targets)


def step_of(name: str, trained: Trained, step: int) -> dict[str, Any]:
    model, optimizer, plan = trained
    loss = loss_of(name, model, plan, step)
    norm = clip_grad_norm(model, CLIP_NORM).item()
    missing = [name for name, each in model.named_parameters() if each.grad is None]
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return {"loss": loss.item() / dist.get_world_size(), "norm": norm, "missing": missing}


def measure(name: str, layout: dict[str, Any], precision: str = "fp32") -> dict[str, Any]:
    """Losses and norms of a layout, and the parameters that got no gradient."""
    trained = start(name, layout, precision)
    steps = [step_of(name, trained, step) for step in range(STEPS)]
    return {
        "losses": [each["loss"] for each in steps],
        "norms": [each["norm"] for each in steps],
        "missing": [name for each in steps for name in each["missing"]],
    }


def state_of(trained: Trained) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained[:2])
    return {"model": model, "optimizer": optimizer}


def move(folder: Path, name: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One step in one layout, a checkpoint, the next step in another."""
    first = start(name, before)
    losses = [step_of(name, first, 0)["loss"]]
    by_torch = name != "tied"  # whose optimizer's state torch finds by one name of two
    if by_torch:
        dcp.save(state_of(first), checkpoint_id=folder)
    else:
        save_checkpoint(*first[:2], folder)
    second = start(name, after)
    if by_torch:
        state = state_of(second)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            *second[:2],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        load_checkpoint(*second[:2], folder)
    losses.append(step_of(name, second, 1)["loss"])
    return {"losses": losses}


def load(folder: Path, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A pipeline of a model that was built on the meta device: what it loses first."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = plan_of(name, layout)
    with mock.patch.object(PARALLELIZE, "start", return_value=CPU):
        model = parallelize(model.train(), plan, numbers=False)
    materialise(model, CPU)
    load_safetensors(model, folder)
    held = sum(user_ranks.local_of(parameter).nbytes for parameter in model.parameters())
    loss = loss_of(name, model, plan, 0)
    dist.all_reduce(loss)
    return {"loss": loss.item() / dist.get_world_size(), "held_bytes": held}


def measure_all(out: Path) -> None:
    """Every layout, and its reference; rank 0 writes."""
    dist.init_process_group("gloo")
    asked = jobs.asked_of(LAYOUTS)
    results: dict[str, Any] = {name: measure(*layout) for name, layout in asked.items()}
    models = {model for model, _ in asked.values()}
    for name, (model, layout) in jobs.asked_of(BF16).items():
        models.add(model)
        results[name] = measure(model, layout, "bf16")
    for name, (model, before, after) in jobs.asked_of(MOVES).items():
        models.add(model)
        results[name] = move(out.parent / name.replace(" ", "-"), model, before, after)
    for name, (model, layout) in jobs.asked_of(LOADED).items():
        models.add(model)
        folder = out.parent / model
        if dist.get_rank() == 0 and not folder.exists():
            build(model).save_pretrained(folder, max_shard_size="20KB")
        dist.barrier()
        results[f"load {name}"] = load(folder, model, layout)
    if dist.get_rank() == 0:
        results |= {name: reference(name) for name in sorted(models)}
    jobs.leave_with(results, out)
