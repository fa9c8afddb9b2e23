"""Layouts that are fine-tuned on chats, on 4 processes; and a plain loop over the same chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.evaluation import HeldOut, evaluate
from fsdpplan.trainer.model.balance import Balance, balance_experts
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.chats import ChatSequences, open_chats
from fsdpplan.trainer.text.data import micro_batches
from tests.trainer import jobs, losses, plans
from tests.trainer.loss_layouts import PIPED, SPLIT

STEPS = 2
MODEL = {"vocab": 320, "max_positions": 96}
TRAINING = {"seq_len": 96}
ROWS = 8
"""Of chats, as many as a step takes: so each step trains on all of them."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": losses.FSDP,
    "hsdp_twice": losses.HSDP | losses.TWICE | {"gradient_sync": "last"},
    "ddp_pieces": losses.DDP | losses.TWICE | {"gradient_sync": "last", "loss_chunks": 5},
    "tp": SPLIT | {"dp_shard": 2},
    "cp": {"cp": 2, "dp_shard": 2},
    "pp": PIPED | {"dp_shard": 2},
    "tp_pp_pieces": SPLIT | PIPED | {"loss_chunks": 5},
}
MIXTURE = MODEL | {"experts": {"experts": 6, "active": 2, "hidden": 20, "shared_hidden": 16}}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixture ddp": losses.DDP,
    "mixture ep twice": losses.FSDP | losses.TWICE | {"ep": 2, "gradient_sync": "last"},
    "mixture tp ep": SPLIT | {"dp_shard": 2, "ep": 2, "activation_checkpointing": "op"},
    "mixture cp": {"cp": 2, "dp_shard": 2, "activation_checkpointing": "full"},
    "mixture pp": PIPED | {"dp_shard": 2},
}


def measure_all(out: Path) -> None:
    """Every layout above, chats one a sequence and packed; rank 0 writes the results."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, layout in jobs.asked_of(LAYOUTS).items():
        text = plans.plan_text(model=MODEL, training=TRAINING, **layout)
        for packs in (False, True):
            results[f"{name} {packs}"] = fine_tuned(text, out.parent, packs=packs)
    for name, layout in jobs.asked_of(MIXTURES).items():
        text = plans.plan_text(model=MIXTURE, training=TRAINING, **layout)
        for packs in (False, True):
            results[f"{name} {packs}"] = fine_tuned(text, out.parent, packs=packs)
    if dist.get_rank() == 0:
        for packs in (False, True):
            chats = json.loads((out.parent / f"{packs}.json").read_text(encoding="utf-8"))
            results[f"reference {packs}"] = plain_loop(chats, MODEL)
            text = plans.plan_text(model=MIXTURE, training=TRAINING)
            _, sequences = opened(text, out.parent, packs=packs)
            rows = [sequences(row)[sequences.real(row)].tolist() for row in range(ROWS)]
            for layout in jobs.asked_of(MIXTURES).values():
                name = losses.reference_name(f"mixture reference {packs}", layout)
                results[name] = plain_loop(chats, MIXTURE, layout, rows)
    jobs.leave_with(results, out)


def opened(text: str, folder: Path, *, packs: bool) -> tuple[PlanConfig, ChatSequences]:
    """A plan, and the chats that it is to learn."""
    plan = parse_plan(text)
    words = ["--sft", "--data", str(folder / f"{packs}.jsonl")]
    words += ["--tokenizer", str(folder / "tokenizer" / "tokenizer.json")]
    options = parse_options([*words, *(["--pack"] if packs else [])])
    assert options.data is not None
    chats = open_chats(plan, options, Path(options.data[0].path), seed=0)
    return plan, chats


@jobs.refusable
def fine_tuned(text: str, folder: Path, *, packs: bool) -> dict[str, Any]:
    """Losses and norms of the trainer's steps, and the loss on the same chats at the end."""
    plan, sequences = opened(text, folder, packs=packs)
    assert sequences.windows == ROWS
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "auxiliary": []}
    for step in range(STEPS):
        batches = micro_batches(
            sequences, plan, first=step * 8, rank=dist.get_rank(), device=losses.CPU, packs=packs
        )
        output = train_step(
            assembled,
            optimizer,
            batches,
            plan,
            clip_norm=losses.RECIPE.clip_norm,
            balance=losses.BALANCE,
        )
        if output.balanced is not None:
            assert output.balanced.auxiliary_loss is not None
            found["auxiliary"].append(output.balanced.auxiliary_loss.item())
        loss = output.loss.clone()
        dist.all_reduce(loss)
        found["losses"].append(loss.item() * plan.layout.pp / dist.get_world_size())
        found["norms"].append(output.grad_norm.item())
    held = HeldOut(sequences=sequences, most=ROWS)
    judged = evaluate(assembled, plan, held, device=losses.CPU, packs=packs)
    return found | {"held_out": judged.loss, "targets": judged.targets}


Chat = tuple[list[int], list[int]]
"""Tokens, and which of them count."""


def plain_loop(
    chats: Sequence[Chat],
    model: dict[str, Any],
    layout: dict[str, Any] | None = None,
    rows: Sequence[list[int]] = (),
) -> dict[str, Any]:
    """Each chat by itself, with its tokens and its mask: steps on the mean over all that counts.
    The experts of a mixture are pressed as those of `layout` are, whose micro-batches have so many
    of the `rows` each."""
    plan = parse_plan(plans.plan_text(model=model, training=TRAINING))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    optimizer = make_optimizer(decoder, losses.RECIPE)
    targets = sum(sum(mask[1:]) for _, mask in chats)
    pressing = losses.Pressing(decoder, layout or {})
    number = pressing.micro_batches
    parts = [chats] if number == 1 else _parts(chats, rows, number)
    tokens = sum(len(ids) for ids, _ in chats)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "auxiliary": []}
    for step in range(STEPS + 1):
        pressing.begin()
        optimizer.zero_grad()
        whole = 0.0
        for part in parts:
            with pressing.seen() as seen:
                mean = torch.stack([_sum_of_chat(decoder, *chat) for chat in part]).sum() / targets
            (mean + pressing.loss(seen, tokens=tokens)).backward()
            whole += mean.item()
        if step == STEPS:
            return found | {"held_out": whole, "targets": targets}
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), losses.RECIPE.clip_norm)
        optimizer.step()
        if plan.model.experts is not None:
            found["auxiliary"].append(pressing.end())
            alone = Balance(bias_rate=losses.BALANCE.bias_rate)
            balance_experts(decoder, None, plan.model, alone)
        found["losses"].append(whole)
        found["norms"].append(norm.item())
    raise AssertionError


def _parts(chats: Sequence[Chat], rows: Sequence[list[int]], number: int) -> list[list[Chat]]:
    """The chats of each of `number` micro-batches, by which row has their tokens."""
    words = [f" {' '.join(map(str, row))} " for row in rows]
    row_of = [
        next(n for n, row in enumerate(words) if f" {' '.join(map(str, ids))} " in row)
        for ids, _ in chats
    ]
    each = len(rows) // number
    return [
        [chat for chat, row in zip(chats, row_of, strict=True) if row // each == part]
        for part in range(number)
    ]


def _sum_of_chat(decoder: Decoder, ids: list[int], mask: list[int]) -> torch.Tensor:
    """The loss of a chat's targets. All its tokens are routed, the last one, too."""
    tokens, counts = torch.tensor(ids), torch.tensor(mask[1:], dtype=torch.bool)
    logits = decoder(tokens[None])[0, :-1]
    return F.cross_entropy(logits[counts], tokens[1:][counts], reduction="sum")
