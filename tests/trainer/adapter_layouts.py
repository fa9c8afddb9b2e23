"""Adapters (LoRA, QLoRA) in layouts on forked ranks, beside one process with adapters by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model import nf4
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise, named_parameters
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans

STEPS = 3
CPU = torch.device("cpu")

SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
DDP = {"sharding": "ddp"}
FULL = {"activation_checkpointing": "full"}
OP = {"activation_checkpointing": "op"}
TWICE = {"num_microbatches": 2}

ADAPTERS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "rslora": False,
    "targets": ["q", "k", "v", "o", "gate", "up", "down"],
    "dropout": 0.0,
    "dtype": "fp32",
    "base": "bf16",
}
RS: dict[str, Any] = ADAPTERS | {"rslora": True, "targets": ["q", "v", "down"]}
NF4 = ADAPTERS | {"base": "nf4"}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab": 64},
    "odd": {"hidden": 56, "ffn_hidden": 98, "head_dim": 7 * 2, "vocab": 66},
    "gpt2": {**plans.GPT2_STYLE, "vocab": 64},
    "threes": {"hidden": 72, "heads": 6, "kv_heads": 3, "vocab": 60, "ffn_hidden": 100},
}

LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: {
        "alone": ("llama", ADAPTERS, DDP),
        "alone, nf4": ("odd", NF4, DDP),
        "fsdp 1, nf4": ("odd", NF4, {}),
    },
    2: {
        "ddp": ("llama", ADAPTERS, DDP | {"dp_replicate": 2}),
        "ddp, nf4": ("odd", NF4, DDP | {"dp_replicate": 2}),
        "fsdp": ("llama", ADAPTERS, {"dp_shard": 2}),
        "fsdp, targets": ("llama", RS, {"dp_shard": 2}),
        "fsdp, full": ("llama", ADAPTERS, {"dp_shard": 2} | FULL),
        "fsdp, op, twice": ("llama", ADAPTERS, {"dp_shard": 2} | OP | TWICE),
        "fsdp, never": ("llama", ADAPTERS, {"dp_shard": 2, "reshard_after_forward": "never"}),
        "fsdp, offload": ("llama", ADAPTERS, {"dp_shard": 2, "offload": "cpu"}),
        "fsdp, chunks": ("llama", ADAPTERS, {"dp_shard": 2, "loss_chunks": 3}),
        "fsdp, wrapped": ("llama", ADAPTERS, {"dp_shard": 2, "wrap_blocks": 2}),
        "gpt-2 fsdp": ("gpt2", ADAPTERS, {"dp_shard": 2}),
        "gpt-2 tp": ("gpt2", ADAPTERS, SPLIT),
        "tp": ("llama", ADAPTERS, SPLIT),
        "tp, one replica, full": ("llama", ADAPTERS, SPLIT | DDP | FULL),
        "tp, op": ("llama", ADAPTERS, SPLIT | OP),
        "cp": ("llama", ADAPTERS, {"cp": 2}),
        "pp": ("llama", ADAPTERS, PIPED | DDP | {"reshard_after_forward": "always"}),
        "pp, fsdp": ("llama", ADAPTERS, PIPED),
        "pp, fsdp, nf4": ("odd", NF4, PIPED),
        "fsdp, nf4": ("odd", NF4, {"dp_shard": 2}),
        "fsdp, nf4, full": ("odd", NF4, {"dp_shard": 2} | FULL),
        "fsdp, nf4, op": ("odd", NF4, {"dp_shard": 2} | OP),
        "fsdp, nf4, twice, last": ("odd", NF4, {"dp_shard": 2, "gradient_sync": "last"} | TWICE),
        "gpt-2 fsdp, nf4": ("gpt2", NF4, {"dp_shard": 2}),
        "gpt-2 pp": ("gpt2", ADAPTERS, PIPED),
    },
    3: {
        "fsdp 3": ("threes", ADAPTERS, {"dp_shard": 3, "micro_batch": 1}),
        "fsdp 3, nf4": ("threes", NF4, {"dp_shard": 3, "micro_batch": 1}),
        "fsdp 3, nf4, never": (
            "threes",
            NF4,
            {"dp_shard": 3, "micro_batch": 1, "reshard_after_forward": "never"},
        ),
    },
    4: {
        "hsdp": ("llama", ADAPTERS, {"dp_replicate": 2, "dp_shard": 2}),
        "hsdp, nf4": ("odd", NF4, {"dp_replicate": 2, "dp_shard": 2}),
        "fsdp to 2": ("llama", ADAPTERS, {"dp_shard": 4, "reshard_after_forward": 2}),
        "fsdp to 2, nf4": ("odd", NF4, {"dp_shard": 4, "reshard_after_forward": 2}),
        "tp, fsdp": ("llama", ADAPTERS, SPLIT | {"dp_shard": 2}),
        "tp, ddp": ("llama", ADAPTERS, SPLIT | DDP | {"dp_replicate": 2}),
        "tp, cp": ("llama", ADAPTERS, SPLIT | {"cp": 2}),
        "tp, pp": ("llama", ADAPTERS, SPLIT | PIPED | DDP | {"reshard_after_forward": "always"}),
        "pp, ddp": (
            "llama",
            ADAPTERS,
            PIPED | DDP | {"dp_replicate": 2, "reshard_after_forward": "always"},
        ),
    },
}
"""World -> name -> (model, adapters, layout)."""


def plan_text(case: tuple[str, dict[str, Any], dict[str, Any]], **training: Any) -> str:
    """The plan of a case."""
    model, adapters, layout = case
    return plans.plan_text(
        model=MODELS[model], training={"adapters": adapters, **training}, **layout
    )


def seen(parameters: Any) -> dict[str, list[float]]:
    """Sum, and sum of squares, of each gradient, and some of its elements."""
    found = {}
    for name, parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            if isinstance(parameter, DTensor):
                if gradient.placements != parameter.placements:
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = gradient.full_tensor()
            found[name] = gradient.flatten().tolist()
    return found


@jobs.refusable
def measure(text: str) -> dict[str, Any]:
    """Losses, norms and gradients of each step."""
    plan = parse_plan(text)
    assembled = assemble(plan, CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    gradients: list[dict[str, list[float]]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(seen(named_parameters(assembled.model)))
    )
    before = frozen(assembled.model)
    means, norms = [], []
    for step in range(STEPS):
        first = step * plan.training.global_batch
        batches = micro_batches(sequences, plan, first=first, rank=dist.get_rank(), device=CPU)
        output = train_step(assembled, optimizer, batches, plan, clip_norm=math.inf)
        loss = output.loss.clone()
        dist.all_reduce(loss)
        means.append(loss.item() * plan.layout.pp / dist.get_world_size())
        norms.append(output.grad_norm.item())
    after = frozen(assembled.model)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradients)
    whole = [
        {name: each for rank in gathered for name, each in rank[step].items()}
        for step in range(STEPS)
    ]
    return {
        "losses": means,
        "norms": norms,
        "gradients": whole,
        "states": sorted({type(state).__name__ for state in optimizer.state.values()}),
        "trained": sum(len(group["params"]) for group in optimizer.param_groups),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "frozen": len(before),
    }


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of all that is not trained."""
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
        if not each.requires_grad
    }


class ByHand(nn.Module):
    """PEFT's formula (`peft.tuners.lora.Linear.forward`), around a frozen layer."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scale
        return out


LAYERS = {
    "q": ("attention", "wq"),
    "k": ("attention", "wk"),
    "v": ("attention", "wv"),
    "o": ("attention", "wo"),
    "gate": ("feed_forward", "w1"),
    "up": ("feed_forward", "w3"),
    "down": ("feed_forward", "w2"),
}


def by_hand(plan: PlanConfig) -> tuple[Decoder, dict[str, nn.Parameter]]:
    """The whole decoder of one process, without any of the trainer's adapters; in NF4 with the
    weights that this stands for, and all that is trained."""
    adapters = plan.training.adapters
    assert adapters is not None
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers, vocab=plan.model.vocab)
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    root = math.sqrt(adapters.rank) if adapters.rslora else adapters.rank
    trained = {}
    names = dict(LAYERS)
    if plan.model.mlp == "gelu":
        del names["gate"]
        names["up"] = ("feed_forward", "w1")
    for number, block in decoder.layers.items():
        for target, (part, name) in names.items():
            parent = block.get_submodule(part)
            base = parent.get_submodule(name)
            assert isinstance(base, nn.Linear)
            if adapters.base == "nf4":
                stored = nf4.quantise(base.weight)
                base.weight.data = nf4.dequantise(stored, base.weight.shape, torch.float32)
            if target in adapters.targets:
                path = f"layers.{number}.{part}.{name}"
                down = drawn(f"{path}.lora_A", (adapters.rank, base.in_features))
                up = torch.zeros(base.out_features, adapters.rank)
                hand = ByHand(base, down, up, adapters.alpha / root)
                setattr(parent, name, hand)
                trained |= {f"{path}.lora_A": hand.lora_A, f"{path}.lora_B": hand.lora_B}
    return decoder, trained


def drawn(name: str, shape: tuple[int, int]) -> Tensor:
    """A, as the trainer draws it: `nn.init.kaiming_uniform_(a=sqrt(5))` by a seed of its name."""
    import zlib

    down = torch.empty(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"0:{name}".encode()))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
    return down


def reference(text: str) -> dict[str, Any]:
    """The same steps in one process, by hand."""
    plan = parse_plan(text)
    decoder, trained = by_hand(plan)
    recipe = losses.RECIPE
    optimizer = torch.optim.AdamW(
        trained.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay,
        betas=recipe.betas, eps=recipe.eps,
    )  # fmt: skip
    sequences = open_sequences(plan, None, seed=0)
    batch = plan.training.global_batch
    means, norms, gradients = [], [], []
    for step in range(STEPS):
        rows = torch.stack([sequences(step * batch + row) for row in range(batch)])
        loss = next_token_loss(decoder(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        means.append(loss.item())
        norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in trained.values())))
        gradients.append(seen(trained.items()))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": means, "norms": norms, "gradients": gradients}


def measure_all(out: Path) -> None:
    """Every layout of this world, each beside one process; rank 0 writes the results."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, case in jobs.asked_of(LAYOUTS[dist.get_world_size()]).items():
        text = plan_text(case)
        results[name] = measure(text)
        if dist.get_rank() == 0:
            results[name]["by hand"] = reference(text)
    jobs.leave_with(results, out)
