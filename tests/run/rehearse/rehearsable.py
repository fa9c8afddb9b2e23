"""Every choice that a plan and the trainer's command line offer, each as a plan of 8 GPUs at most.

Each is a tiny decoder; a choice that needs another one beside it (float8 gathers, a schedule) has
that too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

from fsdpplan.run.plans import with_stages
from fsdpplan.spec.adapters import Adapters
from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CpAttention,
    GradientSync,
    Schedule,
)
from fsdpplan.spec.model import Experts
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import (
    Dropout,
    Optimizer,
    ParamDtype,
    Precision,
    ReduceDtype,
)
from tests.emit.plans import make_plan

DDP = {"sharding": "ddp", "dp_shard": 1, "dp_replicate": 2}
STAGES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of one option, and what it needs beside it."""

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Words of the trainer's command line."""

    @property
    def plan(self) -> Plan:
        """A plan with this choice, on GPUs."""
        degrees = {"dp_shard": 2, "num_microbatches": 2, **self.layout}
        names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
        world = 1
        for name in names:
            world *= degrees.get(name, 1)
        made = make_plan("cuda", per_node=world, **degrees)
        training = {"precision": "bf16", **self.training}
        return with_stages(
            replace(
                made,
                model=replace(made.model, layers=4, **self.model),
                training=replace(made.training, **training),
            )
        )


def _each(name: str, values: tuple[Any, ...], **beside: dict[str, Any]) -> list[Choice]:
    return [
        Choice(
            name=f"{name} {value}",
            training={**beside.get("training", {}), name: value},
            layout=beside.get("layout", {}),
        )
        for value in values
    ]


def _layouts(name: str, values: tuple[Any, ...], **beside: Any) -> list[Choice]:
    return [Choice(name=f"{name} {value}", layout={**beside, name: value}) for value in values]


PIPE = {
    "pp": 2,
    "dp_shard": 1,
    "num_microbatches": 4,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
SPLIT = {"tp": 2, "dp_shard": 2, "sequence_parallel": True, "loss_parallel": True}
EXPERTS = {"experts": Experts(experts=4, active=2, hidden=64)}

CHOICES: tuple[Choice, ...] = (
    *_each("precision", get_args(Precision)),
    *_each("optimizer", get_args(Optimizer)),
    *_each("param_dtype", get_args(ParamDtype)),
    *_each("reduce_dtype", get_args(ReduceDtype)),
    Choice(name="fp8_recipe rowwise", training={"precision": "fp8", "fp8_recipe": "rowwise"}),
    Choice(name="fp8_all_gather", training={"precision": "fp8", "fp8_all_gather": True}),
    *_each("precision_switch", ("fp8@0.8",)),
    Choice(
        name="precision_switch bf16@0.1",
        training={"precision": "fp8", "precision_switch": "bf16@0.1"},
    ),
    Choice(
        name="optimizer adamw_8bit with param_dtype bf16",
        training={"optimizer": "adamw_8bit", "param_dtype": "bf16"},
    ),
    Choice(name="optimizer adamw_8bit under ddp", training={"optimizer": "adamw_8bit"}, layout=DDP),
    Choice(name="optimizer muon under ddp", training={"optimizer": "muon"}, layout=DDP),
    Choice(name="precision fp8 under ddp", training={"precision": "fp8"}, layout=DDP),
    Choice(name="param_dtype bf16 under ddp", training={"param_dtype": "bf16"}, layout=DDP),
    Choice(
        name="gradient_compression bf16",
        training={"gradient_compression": "bf16", "reduce_dtype": "bf16"},
        layout=DDP,
    ),
    Choice(
        name="gradient_compression powersgd:1:10",
        training={"gradient_compression": "powersgd:1:10"},
        layout={**DDP, "gradient_sync": "last"},
    ),
    Choice(name="dropout 0.1", training={"dropout": Dropout(residual=0.1, attention=0.1)}),
    Choice(name="packed", training={"packed": True}),
    Choice(name="adapters", training={"adapters": Adapters(rank=4, alpha=8.0)}),
    Choice(
        name="adapters over a 4-bit base",
        training={"adapters": Adapters(rank=4, alpha=8.0, base="nf4")},
    ),
    Choice(
        name="adapters under ddp", training={"adapters": Adapters(rank=4, alpha=8.0)}, layout=DDP
    ),
    Choice(name="sharding fsdp"),
    Choice(name="sharding ddp", layout=DDP),
    Choice(name="dp_replicate 2", layout=HSDP),
    *_layouts("gradient_sync", get_args(GradientSync), **HSDP),
    *_layouts("reshard_after_forward", ("always", "never", 2), dp_shard=4),
    *_layouts("wrap_blocks", (2,)),
    *_layouts("activation_checkpointing", get_args(ActivationCheckpointing)),
    *_layouts("checkpoint_blocks", (2,), activation_checkpointing="full"),
    *_layouts("offload", ("cpu",)),
    *_layouts("compile", (True,)),
    *_layouts("loss_chunks", (4,)),
    *_layouts("ddp_bucket_bytes", (20_000,), **DDP),
    Choice(name="tp 2 with sequence_parallel and loss_parallel", layout=SPLIT),
    *_layouts("async_tp", (True,), **{**SPLIT, "compile": True}),
    *_layouts("cp_attention", get_args(CpAttention), cp=2),
    Choice(name="ep 2", layout={"ep": 2}, model=EXPERTS),
    *(
        Choice(
            name=f"schedule {schedule}",
            layout={**PIPE, "schedule": schedule, "virtual_stages": STAGES[schedule]},
        )
        for schedule in get_args(Schedule)
        if schedule != "none"
    ),
    Choice(name="schedule 1f1b under ddp", layout={**PIPE, "sharding": "ddp", "schedule": "1f1b"}),
)

TRAINER_OPTIONS: tuple[Choice, ...] = (
    *(Choice(name=f"--adamw {each}", options=("--adamw", each)) for each in ("foreach", "loop")),
    Choice(name="--clip-norm inf", options=("--clip-norm", "inf")),
    Choice(name="--weight-decay 0", options=("--weight-decay", "0")),
    Choice(name="--on-spike skip", options=("--on-spike", "skip")),
    Choice(
        name="--on-spike rollback",
        options=("--on-spike", "rollback", "--checkpoint-dir", "saved", "--checkpoint-every", "1"),
    ),
    Choice(
        name="--on-spike skip with muon",
        training={"optimizer": "muon"},
        options=("--on-spike", "skip"),
    ),
    Choice(
        name="--on-spike skip with adamw_8bit and fp16",
        training={"optimizer": "adamw_8bit", "precision": "fp16"},
        options=("--on-spike", "skip"),
    ),
    Choice(
        name="--muon-ns-steps 3",
        training={"optimizer": "muon"},
        options=("--muon-ns-steps", "3", "--muon-learning-rate", "0.01", "--no-muon-nesterov"),
    ),
    Choice(name="--param-group", options=("--param-group", "*norm*:lr=0.5,weight_decay=0")),
    *(
        Choice(name=" ".join(words), layout={"ep": 2}, model=EXPERTS, options=words)
        for words in (
            ("--expert-bias-rate", "0"),
            ("--expert-bias-rate", "0.001"),
            ("--router-aux-loss-coef", "0"),
            ("--router-aux-loss-coef", "0.02"),
        )
    ),
    Choice(name="--pack", options=("--pack",)),
)
