"""Layouts whose loss is made piece by piece, or of packed documents, on 4 processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.text.data import Sequences, open_sequences
from tests.trainer import jobs, losses, plans

SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
MODEL = {"vocab": 64}
TIED = {**plans.GPT2_STYLE, "vocab": 64}

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": losses.FSDP,
    "ddp_accumulated": losses.DDP | losses.TWICE | {"gradient_sync": "last"},
    "hsdp_accumulated": losses.HSDP | losses.TWICE | {"gradient_sync": "last"},
    "tp": SPLIT | {"dp_shard": 2},
    "cp": {"cp": 2, "dp_shard": 2},
    "pp": PIPED | {"dp_shard": 2},
    "zbv": PIPED | {"dp_shard": 2, "schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
    "tp_pp": SPLIT | PIPED,
}
CHUNKED = ("fsdp", "ddp_accumulated", "tp", "cp", "pp", "zbv", "tp_pp")
PACKED = ("fsdp", "ddp_accumulated", "hsdp_accumulated", "tp", "cp", "tp_pp")
TIED_LAYOUTS: dict[str, dict[str, Any]] = {
    "tied_fsdp": losses.FSDP,
    "tied_tp": SPLIT | {"dp_shard": 2},
    "tied_pp": PIPED | {"dp_shard": 2},
}
PADDED = {"vocab": 61, "hidden": 48}
MULTIPLE = {"vocab_multiple": 32}
PADDED_TIED = {**plans.GPT2_STYLE, "vocab": 61, "hidden": 48}
PADDED_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padded_tp_pp": (PADDED, SPLIT | PIPED),
    "padded_tp_pp_whole": (PADDED, SPLIT | PIPED | {"loss_chunks": 1}),
    "padded_tied_tp_pp": (PADDED_TIED, SPLIT | PIPED),
    "padded_tied_tp_pp_whole": (PADDED_TIED, SPLIT | PIPED | {"loss_chunks": 1}),
    "padded_tied_tp": (PADDED_TIED, SPLIT | {"dp_shard": 2}),
    "padded_fsdp": (PADDED | MULTIPLE, losses.FSDP),
    "padded_fsdp_whole": (PADDED | MULTIPLE, losses.FSDP | {"loss_chunks": 1}),
    "padded_ddp_whole": (PADDED | MULTIPLE, losses.DDP | {"loss_chunks": 1}),
    "padded_tied_pp_whole": (
        PADDED_TIED | MULTIPLE,
        PIPED | {"dp_shard": 2, "loss_chunks": 1},
    ),
    "padded_tied_fsdp": (PADDED_TIED | MULTIPLE, losses.FSDP),
    "padded_tp_multiple": (PADDED | MULTIPLE, SPLIT | {"dp_shard": 2, "loss_chunks": 1}),
    "padded_zbv": (
        PADDED,
        SPLIT
        | PIPED
        | {"schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4, "loss_chunks": 1},
    ),
}
"""Two tensor-parallel ranks pad the vocabulary to 64, and so does a multiple of 32."""
BF16: dict[str, dict[str, Any]] = {"bf16_fsdp": losses.FSDP, "bf16_ddp": losses.DDP}
CHUNKS = {"loss_chunks": 5}
"""Uneven pieces of 48 tokens and of 24."""


def documents_apart(model: dict[str, Any] = MODEL) -> dict[str, list[float]]:
    """Steps in one process in which every document is a batch of its own."""
    plan = parse_plan(plans.plan_text(model=model))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    optimizer = make_optimizer(decoder, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found: list[float] = []
    norms: list[float] = []
    for step in range(losses.STEPS):
        documents = [
            document
            for row in range(8)
            for document in split_documents(sequences, step * 8 + row)
            if len(document) > 1
        ]
        counted = sum(len(document) - 1 for document in documents)
        optimizer.zero_grad()
        whole = 0.0
        for document in documents:
            targets = document[None, 1:]
            loss = next_token_loss(decoder(document[None, :-1]), targets)
            part = loss * targets.numel() / counted
            part.backward()  # type: ignore[no-untyped-call]
            whole += part.item()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), losses.RECIPE.clip_norm)
        optimizer.step()
        found.append(whole)
        norms.append(norm.item())
    return {"losses": found, "norms": norms}


def split_documents(sequences: Sequences, number: int) -> list[Tensor]:
    """The documents of sequence `number`, the ends of it included."""
    tokens, starts = sequences(number), sequences.starts(number).nonzero().flatten().tolist()
    bounds = sorted({0, *starts, len(tokens)})
    return [tokens[start:stop] for start, stop in pairwise(bounds)]


def measure_all(out: Path) -> None:
    """Every layout above; rank 0 writes the results."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in filter(jobs.is_asked, CHUNKED):
        text = plans.plan_text(model=MODEL, **LAYOUTS[name], **CHUNKS)
        results[name] = losses.measure(text)
    for name in filter(jobs.is_asked, PACKED):
        text = plans.plan_text(model=MODEL, **LAYOUTS[name])
        results[f"packed_{name}"] = losses.measure(text, packs=True)
    results["packed_chunked"] = losses.measure(
        plans.plan_text(model=MODEL, **LAYOUTS["tp"], **CHUNKS), packs=True
    )
    for name, layout in jobs.asked_of(TIED_LAYOUTS).items():
        results[name] = losses.measure(plans.plan_text(model=TIED, **layout, **CHUNKS))
    for name, (model, layout) in jobs.asked_of(PADDED_LAYOUTS).items():
        results[name] = losses.measure(plans.plan_text(model=model, **CHUNKS | layout))
    for name, layout in jobs.asked_of(BF16).items():
        text = plans.plan_text(model=MODEL, training={"precision": "bf16"}, **layout, **CHUNKS)
        results[name] = losses.measure(text)
    if dist.get_rank() == 0:
        results["reference"] = losses.reference(MODEL)
        results["tied_reference"] = losses.reference(TIED)
        results["padded_reference"] = losses.reference(PADDED)
        results["padded_tied_reference"] = losses.reference(PADDED_TIED)
        results["apart"] = documents_apart()
    jobs.leave_with(results, out)
