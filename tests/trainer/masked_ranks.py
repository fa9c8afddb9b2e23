"""What each rank does with masked labels: gradients, next to those of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpplan.trainer import (
    TrainerError,
    forward_backward,
    gradient_sync,
    sampler_arguments,
    targets_per_micro_batch,
    token_loss,
)
from fsdpplan.trainer.config import PlanConfig
from tests.trainer import jobs, plans
from tests.trainer.masked_layouts import LAYOUTS, REFUSED
from tests.trainer.own_models import LENGTH, VOCAB
from tests.trainer.own_ranks import HF, build, start

MASKS: dict[str, list[int]] = {
    "ragged": [12, 1, 9, 2, 11, 3, 5, 1],
    "empty micro-batches": [0, 0, 0, 5, 0, 11, 3, 1],
}
"""How many labels each row of a step has."""
PACKED = [[5, 12], [2, 4, 12], [12], [1, 6, 7, 12], [11, 12], [3, 12], [1, 2, 3, 12], [8, 12]]
"""Where the documents of each row end, whose first tokens nothing predicts."""
LEAST_SHARE = 1e-3
"""Share of all gradients' norm below which a tensor's own is rounding, such as that of a bias of
keys, and is not divided by."""

Batch = dict[str, Tensor]


def batch_of(name: str, kind: str, plan: PlanConfig | None = None) -> Batch:
    """All rows of a step: tokens, labels, targets (the labels of the next token), and positions
    where documents are packed and the model is told of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (plans.GLOBAL_BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    if kind != "packed":
        for row, known in zip(labels, MASKS[kind], strict=True):
            row[known:] = -100
        return {
            "tokens": tokens,
            "labels": labels,
            "targets": F.pad(labels[:, 1:], (0, 1), value=-100),
        }
    positions = torch.arange(LENGTH).repeat(len(tokens), 1)
    for row, place, ends in zip(labels, positions, PACKED, strict=True):
        for first in [0, *ends[:-1]]:
            row[first] = -100
            place[first:] = torch.arange(LENGTH - first)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "targets": F.pad(labels[:, 1:], (0, 1), value=-100),
    }
    # ranks that share a sequence refuse documents, and a mask of their ends alone is right there
    told = name in HF and (plan is None or plan.layout.cp == 1)
    return batch | ({"positions": positions} if told else {})


def inputs_of(name: str, batch: Batch) -> Any:
    """What `forward_backward` is given: a Hugging Face model's own loss, or logits for ours."""
    if name not in HF:
        return batch["tokens"]
    given = {"input_ids": batch["tokens"], "labels": batch["labels"]}
    return given | ({"position_ids": batch["positions"]} if "positions" in batch else {})


@cache
def reference(name: str, kind: str, is_told: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process over all rows, without a line of ours."""
    model, batch = build(name), batch_of(name, kind)
    if not is_told:
        batch.pop("positions", None)
    if name in HF:
        # behind a cache, which is for generation, Transformers sees no documents
        loss = model(**inputs_of(name, batch), use_cache=False).loss
    else:
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return loss.item(), {name: each for name, each in gradients.items() if each is not None}


def own_loop(name: str, model: nn.Module, plan: PlanConfig, batch: Batch, count: bool) -> Tensor:
    """The loop that the guides show."""
    layout = plan.layout
    parts = [
        dict(zip(batch, each, strict=True))
        for each in zip(*(v.split(layout.micro_batch) for v in batch.values()), strict=True)
    ]
    given = [part["labels"][:, 1:] if name in HF else part["targets"] for part in parts]
    counted = targets_per_micro_batch(plan, given) if count else None
    total = torch.zeros(())
    for index, part in enumerate(parts):
        with gradient_sync(model, layout, is_last=index == len(parts) - 1):
            if name in HF:
                named = {"num_items_in_batch": counted} if count else {}
                loss = model(**inputs_of(name, part), **named).loss
            else:
                loss = token_loss(model(part["tokens"]), part["targets"], counted)
            loss = loss.to_local() if isinstance(loss, DTensor) else loss
            (loss / len(parts)).backward()
        total += loss.detach() / len(parts)
    return total


def errors_of(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """The largest distance of a gradient from the expected, over its norm; of all ranks."""
    whole = torch.stack([each.norm() for each in expected.values()]).norm()
    worst = 0.0
    inner = getattr(model, "module", model)
    for name, parameter in inner.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        name = name if name in expected else {"lm_head.weight": "table.weight"}[name]
        norm = torch.maximum(expected[name].norm(), LEAST_SHARE * whole)
        worst = max(worst, float((gradient - expected[name]).norm() / norm))
    found = torch.tensor(worst)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def measure(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each kind of rows and each loop: the error of the gradients and of the loss."""
    model, optimizer, plan = start(name, layout)
    share, found = sampler_arguments(plan), {}
    loops = ["forward_backward"] + ["a loop of one's own"] * (plan.layout.pp == 1)
    for kind in (*MASKS, "packed"):
        batch = batch_of(name, kind, plan)
        mine = {n: each[share["rank"] :: share["num_replicas"]] for n, each in batch.items()}
        expected, gradients = reference(name, kind, "positions" in batch)
        for loop in loops:
            if loop == "forward_backward":
                targets = None if name in HF else mine["targets"]
                loss = forward_backward(model, plan, inputs_of(name, mine), targets)
            else:
                loss = own_loop(name, model, plan, mine, True)
            error = errors_of(model, gradients)
            dist.all_reduce(loss)
            loss_error = abs(loss.item() / dist.get_world_size() - expected)
            found[f"{kind}, {loop}"] = {"gradients": error, "loss": loss_error}
            optimizer.zero_grad()
    return found


def refuse(name: str, layout: dict[str, Any]) -> dict[str, str]:
    """What is said where nothing was counted, of rows with and without equal numbers of targets;
    an empty sentence: nothing."""
    model, optimizer, plan = start(name, layout)
    share, said = sampler_arguments(plan), {}
    for kind in ("equal", "ragged", "equal again"):
        batch = batch_of(name, "ragged" if kind == "ragged" else "packed")
        if kind != "ragged":
            batch = {"tokens": batch["tokens"], "labels": batch["tokens"]}
            batch["targets"] = batch["tokens"]
        mine = {n: each[share["rank"] :: share["num_replicas"]] for n, each in batch.items()}
        mine.pop("positions", None)
        own_loop(name, model, plan, mine, False)
        try:
            optimizer.step()
            said[kind] = ""
        except TrainerError as error:
            said[kind] = str(error)
        optimizer.zero_grad()
    return said


def measure_all(out: Path) -> None:
    """Every layout; rank 0 writes."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {
        name: measure(*layout) for name, layout in jobs.asked_of(LAYOUTS).items()
    }
    for name, layout in jobs.asked_of(REFUSED).items():
        results[f"refused: {name}"] = refuse(*layout)
    jobs.leave_with(results, out)
