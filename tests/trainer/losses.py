"""What each rank of the loss tests runs: some steps in every layout, and what they communicated."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.trainer import load_plan, parallelize
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.balance import Balance, balance_experts
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.moe import mixtures
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.private_torch import group_of
from fsdpplan.trainer.rehearse.counting import OPERATORS
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, plans

STEPS = 3
RECIPE = Recipe(steps=STEPS, learning_rate=3e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)
BALANCE = Balance(bias_rate=0.001, auxiliary=0.1)
"""Of mixtures, in both ways."""
CPU = torch.device("cpu")
HSDP = {"dp_replicate": 2, "dp_shard": 2}
DDP = {"dp_replicate": 4, "sharding": "ddp"}
FSDP = {"dp_shard": 4}
TWICE = {"num_microbatches": 2}

FP32: dict[str, dict[str, Any]] = {
    "fsdp_always": FSDP,
    "fsdp_never": FSDP | {"reshard_after_forward": "never"},
    "fsdp_int2": FSDP | {"reshard_after_forward": 2},
    "hsdp": HSDP,
    "hsdp_never": HSDP | {"reshard_after_forward": "never"},
    "hsdp_1_shard": {"dp_replicate": 4},
    "ddp": DDP,
    "ddp_small_buckets": DDP | {"ddp_bucket_bytes": 20_000},
    "fsdp_accumulate_every": FSDP | TWICE,
    "fsdp_accumulate_last": FSDP | TWICE | {"gradient_sync": "last"},
    "fsdp_never_accumulate_every": FSDP | TWICE | {"reshard_after_forward": "never"},
    "fsdp_never_accumulate_last": FSDP
    | TWICE
    | {"reshard_after_forward": "never", "gradient_sync": "last"},
    "hsdp_accumulate_every": HSDP | TWICE,
    "hsdp_accumulate_reduce_scatter_only": HSDP | TWICE | {"gradient_sync": "reduce_scatter_only"},
    "hsdp_accumulate_last": HSDP | TWICE | {"gradient_sync": "last"},
    "ddp_accumulate_every": DDP | TWICE,
    "ddp_accumulate_last": DDP | TWICE | {"gradient_sync": "last"},
    "fsdp_checkpoint_full": FSDP | {"activation_checkpointing": "full"},
    "fsdp_checkpoint_op": FSDP | {"activation_checkpointing": "op"},
    "ddp_checkpoint_full": DDP | {"activation_checkpointing": "full"},
    "ddp_checkpoint_op": DDP | {"activation_checkpointing": "op"},
    "fsdp_checkpoint_full_first": FSDP
    | {"activation_checkpointing": "full", "checkpoint_blocks": 2, "wrap_blocks": 2},
    "hsdp_checkpoint_op_first": HSDP | {"activation_checkpointing": "op", "checkpoint_blocks": 1},
    "ddp_checkpoint_full_first": DDP | {"activation_checkpointing": "full", "checkpoint_blocks": 2},
    "fsdp_offload": FSDP | {"offload": "cpu"},
    "fsdp_wrap_2": FSDP | {"wrap_blocks": 2},
    "fsdp_wrap_3_checkpoint_full": FSDP | {"wrap_blocks": 3, "activation_checkpointing": "full"},
    "hsdp_wrap_2_never_checkpoint_op": HSDP
    | {"wrap_blocks": 2, "reshard_after_forward": "never", "activation_checkpointing": "op"},
}
"""Layouts that must lose like one process, in fp32."""

GPT2: dict[str, dict[str, Any]] = {
    "gpt2_fsdp": FSDP,
    "gpt2_hsdp_accumulate": HSDP | TWICE,
    "gpt2_ddp": DDP,
    "gpt2_ddp_checkpoint_op": DDP | {"activation_checkpointing": "op"},
}
"""The same for tied embeddings, learned positions, biases and GELU."""

BF16: dict[str, dict[str, Any]] = {
    "bf16_fsdp": FSDP,
    "bf16_ddp": DDP,
    "bf16_hsdp_reduce_bf16": HSDP,
    "bf16_ddp_reduce_bf16": DDP,
}
"""Layouts in bf16; the name says in what gradients are reduced."""


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives among several ranks by their names in torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = OPERATORS.get(func._schema.name) if func.namespace == "c10d" else None
        if operator is not None and group_of(args[operator.group_argument]).size() > 1:
            self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def reference(
    model: dict[str, Any],
    recipe: Recipe = RECIPE,
    *,
    dtype: torch.dtype = torch.float32,
    layout: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """The same steps in one process, without any of the trainer's distribution; its parameters and
    all that comes of them in `dtype`. A mixture's experts are pressed as those of `layout` are."""
    plan = parse_plan(plans.plan_text(model=model))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = make_optimizer(decoder, recipe)
    sequences = open_sequences(plan, None, seed=0)
    pressing = Pressing(decoder, layout or {})
    losses, norms, auxiliary = [], [], []
    for step in range(recipe.steps):
        rows = torch.stack([sequences(step * 8 + row) for row in range(8)])
        pressing.begin()
        optimizer.zero_grad()
        loss = 0.0
        for part in rows.chunk(pressing.micro_batches):
            with pressing.seen() as seen:
                mean = next_token_loss(decoder(part[:, :-1]), part[:, 1:])
                mean = mean / pressing.micro_batches
            (mean + pressing.loss(seen, tokens=rows[:, 1:].numel())).backward()
            loss += mean.item()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), RECIPE.clip_norm)
        optimizer.step()
        if plan.model.experts is not None:
            auxiliary.append(pressing.end())
            alone = Balance(bias_rate=BALANCE.bias_rate)
            balance_experts(decoder, None, plan.model, alone)
        losses.append(loss)
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "auxiliary": auxiliary}


def reference_name(model: str, layout: dict[str, Any]) -> str:
    """Under which `references` has the one process that a layout trains like."""
    times = layout.get("num_microbatches", 1)
    return model if times == 1 else f"{model}, {times} micro-batches"


def references(
    models: dict[str, dict[str, Any]], layouts: Iterable[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """One process for each of `models`, and for each way that `layouts` press one."""
    wanted = {reference_name(model, layout): (model, layout) for model, layout in layouts}
    wanted |= {model: (model, {}) for model in models}
    return {
        name: reference(models[model], layout=layout) for name, (model, layout) in wanted.items()
    }


class Pressing:
    """The auxiliary loss of a decoder's micro-batches, by autograd: what a layout presses by."""

    def __init__(self, decoder: Decoder, layout: dict[str, Any]) -> None:
        self.decoder = decoder
        self.micro_batches = layout.get("num_microbatches", 1)

    def begin(self) -> None:
        """A step."""
        self.all = Routed(self.decoder)
        self.told: list[tuple[int, torch.Tensor]] = []

    def seen(self) -> Routed:
        """What is said in a forward pass."""
        return Routed(self.decoder)

    def loss(self, seen: Routed, *, tokens: int) -> torch.Tensor | float:
        """Of a micro-batch, which is a part of a step of `tokens`."""
        if not seen.mixtures:
            return 0.0
        here = sum(map(len, seen.logits)) // len(seen.mixtures)
        self.all.logits += [logits.detach() for logits in seen.logits]
        done = sum(number for number, _ in self.told)
        so_far = self.all.shares()
        wrong = sum((number * (so_far - told) for number, told in self.told), so_far * 0)
        shares = so_far + wrong / (tokens - done)
        self.told.append((here, shares))
        return BALANCE.auxiliary * seen.auxiliary_loss(shares) * here / tokens

    def end(self) -> float:
        """The loss of all that was seen in a step."""
        return self.all.auxiliary_loss(self.all.shares()).item()


class Routed:
    """What the routers of a decoder say in some forward passes, and whom tokens choose by it."""

    def __init__(self, decoder: Decoder) -> None:
        self.mixtures = mixtures(decoder)
        self.logits: list[torch.Tensor] = []

    def __enter__(self) -> Routed:
        def keep(_: nn.Module, __: Any, logits: torch.Tensor) -> None:
            self.logits.append(logits)

        self.handles = [each.router.register_forward_hook(keep) for each in self.mixtures]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def shares(self) -> torch.Tensor:
        """The part of all tokens that each expert is chosen by, in the mean over all mixtures."""
        experts = self.mixtures[0].config.experts
        shares = []
        for number, mixture in enumerate(self.mixtures):
            logits = torch.cat(self.logits[number :: len(self.mixtures)])
            chosen = (logits.softmax(-1) + mixture.expert_bias).topk(mixture.config.active).indices
            shares.append(torch.bincount(chosen.flatten(), minlength=experts) / len(logits))
        return torch.stack(shares).mean(0)

    def auxiliary_loss(self, shares: torch.Tensor) -> torch.Tensor:
        """With what is known of the choices."""
        probable = torch.cat(self.logits).softmax(-1).mean(0)
        return len(shares) * (shares * probable).sum()


@jobs.refusable
def measure(text: str, *, packs: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Losses, gradient norms and the last step's collectives of the plan in `text`."""
    plan = parse_plan(text)
    assembled = assemble(plan, CPU, seed=0)
    model = assembled.model
    optimizer = make_optimizer(model, RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    losses, norms, auxiliary, counts = [], [], [], {}
    for step in range(steps):
        batches = micro_batches(
            sequences,
            plan,
            first=step * plan.training.global_batch,
            rank=dist.get_rank(),
            device=CPU,
            packs=packs,
        )
        is_last = step == steps - 1
        with Collectives() if is_last else nullcontext(Collectives()) as collectives:
            output = train_step(
                assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm, balance=BALANCE
            )
        if output.balanced is not None:
            assert output.balanced.auxiliary_loss is not None
            auxiliary.append(output.balanced.auxiliary_loss.item())
        loss = output.loss.clone()
        dist.all_reduce(loss)
        losses.append(loss.item() * plan.layout.pp / dist.get_world_size())
        norms.append(output.grad_norm.item())
        counts = dict(collectives.counts)
    gradients = sum(parameter.numel() for parameter in model.parameters())
    return {
        "losses": losses,
        "norms": norms,
        "auxiliary": auxiliary,
        "collectives": counts,
        "parameters": gradients,
    }


class Stack(nn.Module):
    """A user's own model, each rank's with other values at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


def replicas_of_a_user_model() -> list[list[float]]:
    """Sums of the whole parameters, as each rank sees them, after the two lines of a user."""
    plan = load_plan(plans.plan_text(**HSDP))
    model = parallelize(Stack(), plan)
    model(torch.ones(2, 8)).sum().backward()
    sums = torch.stack([p.full_tensor().sum() for p in model.parameters()])  # type: ignore[attr-defined]
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums.detach())
    return [entry.tolist() for entry in gathered]


def measure_all(out: Path) -> None:
    """Every layout above; rank 0 writes the results."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, layout in jobs.asked_of(FP32).items():
        results[name] = measure(plans.plan_text(**layout))
    for name, layout in jobs.asked_of(GPT2).items():
        results[name] = measure(plans.plan_text(model=plans.GPT2_STYLE, **layout))
    for name, layout in jobs.asked_of(BF16).items():
        reduce_dtype = "bf16" if "reduce_bf16" in name else "fp32"
        training = {"precision": "bf16", "reduce_dtype": reduce_dtype}
        results[name] = measure(plans.plan_text(training=training, **layout))
    results["user_model"] = {"parameter_sums": replicas_of_a_user_model()}
    if dist.get_rank() == 0:
        results["reference"] = reference({})
        results["gpt2_reference"] = reference(plans.GPT2_STYLE)
    jobs.leave_with(results, out)
