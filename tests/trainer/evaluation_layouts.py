"""Layouts that evaluate between their steps, on 4 processes, and the same steps without."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.evaluation import HeldOut, evaluate
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import Windows, micro_batches, open_sequences
from fsdpplan.trainer.text.token_file import sidecar_of
from tests.trainer import jobs, losses, plans
from tests.trainer.expert_layouts import MODELS
from tests.trainer.loss_layouts import PIPED, SPLIT, split_documents

STEPS = 2
SEQUENCES = 11
"""A whole global batch and a part of one."""
SEQ_LEN = 24
NEVER = {"reshard_after_forward": "never"}
PLAIN = {"vocab": 64}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (PLAIN, losses.FSDP),
    "fsdp_never": (PLAIN, losses.FSDP | NEVER | losses.TWICE),
    "fsdp_offload": (PLAIN, losses.FSDP | {"offload": "cpu", "activation_checkpointing": "full"}),
    "hsdp_pieces": (PLAIN, losses.HSDP | {"loss_chunks": 5}),
    "ddp": (PLAIN, losses.DDP | losses.TWICE),
    "ddp_tp_pieces": (
        PLAIN,
        SPLIT | {"dp_replicate": 2, "sharding": "ddp", "loss_chunks": 5},
    ),
    "tp": (PLAIN, SPLIT | {"dp_shard": 2}),
    "cp": (PLAIN, {"cp": 2, "dp_shard": 2} | NEVER),
    "1f1b": (PLAIN, PIPED | {"dp_shard": 2}),
    "interleaved": (
        PLAIN,
        PIPED | {"dp_shard": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    ),
    "zbv": (
        PLAIN,
        PIPED | {"dp_shard": 2, "schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
    ),
    "tp_pp_pieces": (PLAIN, SPLIT | PIPED | {"loss_chunks": 5}),
    "pp4_ddp": (
        PLAIN,
        PIPED
        | {"pp": 4, "sharding": "ddp", "reshard_after_forward": "always", "num_microbatches": 4},
    ),
    "experts": (MODELS["mixtral"], {"dp_shard": 4, "ep": 2}),
}


def held_out(folder: Path) -> HeldOut:
    """Sequences of random tokens, one token more than they need."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(61, (SEQUENCES * SEQ_LEN + 2,), generator=generator).tolist()
    path = folder / f"held-{dist.get_rank()}.tokens"
    path.write_bytes(array("H", tokens).tobytes())
    header = {"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": 61, "end_of_document": 3}
    sidecar_of(path).write_text(json.dumps(header | {"tokens": len(tokens)}))
    plan = parse_plan(plans.plan_text())
    windows = open_sequences(plan, path, seed=0)
    assert isinstance(windows, Windows)
    assert windows.windows == SEQUENCES
    return HeldOut(sequences=windows, most=SEQUENCES)


@jobs.refusable
def trained(text: str, held: HeldOut | None, *, packs: bool = False) -> dict[str, Any]:
    """Losses and norms of some steps, the last one's collectives, and the loss on `held` before
    each and after all."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found: dict[str, Any] = {"losses": [], "norms": [], "held_out": [], "drawn": []}
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        if held is not None:
            judged = evaluate(assembled, plan, held, device=losses.CPU, packs=packs)
            found["held_out"].append((judged.loss, judged.targets))
        batches = micro_batches(
            sequences, plan, first=step * 8, rank=dist.get_rank(), device=losses.CPU, packs=packs
        )
        with losses.Collectives() as collectives:
            output = train_step(
                assembled, optimizer, batches, plan, clip_norm=losses.RECIPE.clip_norm
            )
        loss = output.loss.clone()
        dist.all_reduce(loss)
        found["losses"].append(loss.item())
        found["norms"].append(output.grad_norm.item())
        found["drawn"].append(torch.rand(()).item())
        found["collectives"] = dict(collectives.counts)
    if held is not None:
        judged = evaluate(assembled, plan, held, device=losses.CPU, packs=packs)
        found["held_out"].append((judged.loss, judged.targets))
    return found


def reference(model: dict[str, Any], held: HeldOut) -> list[float]:
    """The loss on `held` in one process, before each step and after all."""
    plan = parse_plan(plans.plan_text(model=model))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    optimizer = make_optimizer(decoder, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found = [whole_loss(decoder, held)]
    for step in range(STEPS):
        (batch,) = micro_batches(sequences, plan, first=step * 8, rank=0, device=losses.CPU)
        optimizer.zero_grad()
        next_token_loss(decoder(batch.tokens), batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), losses.RECIPE.clip_norm)
        optimizer.step()
        found.append(whole_loss(decoder, held))
    return found


@torch.no_grad()
def whole_loss(decoder: Decoder, held: HeldOut) -> float:
    """All sequences in one batch."""
    rows = torch.stack([held.sequences(number) for number in range(SEQUENCES)])
    return next_token_loss(decoder(rows[:, :-1]), rows[:, 1:]).item()


@torch.no_grad()
def loss_of_documents(plan: PlanConfig, held: HeldOut) -> tuple[float, int]:
    """The loss of untrained weights on every document alone, and how many targets they have."""
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    total, targets = 0.0, 0
    for number in range(SEQUENCES):
        for document in split_documents(held.sequences, number):
            if len(document) > 1:
                loss = next_token_loss(decoder(document[None, :-1]), document[None, 1:])
                total += loss.item() * (len(document) - 1)
                targets += len(document) - 1
    return total / targets, targets


def measure_all(out: Path) -> None:
    """Every layout above; rank 0 writes the results."""
    dist.init_process_group("gloo")
    held = held_out(out.parent)
    results: dict[str, Any] = {}
    for name, (model, layout) in jobs.asked_of(LAYOUTS).items():
        text = plans.plan_text(model=model, **layout)
        results[name] = {"judged": trained(text, held), "alone": trained(text, None)}
    packed = plans.plan_text(model=PLAIN, **SPLIT, **PIPED)
    results["packed"] = trained(packed, held, packs=True)
    if dist.get_rank() == 0:
        results["reference"] = reference(PLAIN, held)
        results["reference of experts"] = reference(MODELS["mixtral"], held)
        results["documents"] = loss_of_documents(parse_plan(plans.plan_text(model=PLAIN)), held)
    jobs.leave_with(results, out)
