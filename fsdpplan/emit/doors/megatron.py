"""Megatron-LM: a bash script that starts `pretrain_gpt.py` with the plan as its arguments.

Source: NVIDIA/Megatron-LM d98e8a64 megatron/training/arguments.py, core/transformer/
pipeline_parallel_layer_layout.py (letters of a layout); what it cannot run is in
spec/programs/megatron.py.
"""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import (
    environment_lines,
    rendezvous_port,
    torchrun_words,
)
from fsdpplan.emit.doors.megatron_model import model_arguments
from fsdpplan.emit.doors.trainer_words import Recipe, own_program, recipe_of, stage_ranges
from fsdpplan.emit.doors.words import require_sayable
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.safe_text import shell_word, shell_words
from fsdpplan.emit.segments import by_hand_lines
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs.megatron import MEGATRON

_JOB = frozenset({"program", "env", "env_setup", "python", "port", "nccl_debug"})
_TRAINER = frozenset(
    {
        "steps",
        "learning_rate",
        "lr_schedule",
        "min_lr",
        "warmup_steps",
        "decay_steps",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "weight_decay",
        "clip_norm",
        "expert_bias_rate",
        "router_aux_loss_coef",
        "seed",
        "checkpoint_dir",
        "checkpoint_every",
    }
)

LEAST_SEED = 1
"""Megatron-LM refuses 0."""

DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}
"""Its names of the schedules. Its warm-up is one step behind: the first step has a rate of 0.
Source: core/optimizer_param_scheduler.py."""

Arguments = list[tuple[str, ...]]
"""Each an option with its values."""


def render(order: Order) -> str:
    """The script. Raises SpecError for what Megatron-LM has no word for."""
    refuse_others(order, target="megatron", job=_JOB, pods=frozenset())
    program = own_program(order, target="megatron", known=_TRAINER)
    if program.seed == 0:
        raise SpecError("--seed 0 is refused by Megatron-LM: use --seed 1, or another target")
    require_sayable(order, target="megatron", vocabulary=MEGATRON)
    _require_balance(order.plan.model, program)
    sections = [
        [
            "#!/bin/bash",
            *header_lines(plan=order.plan, plan_json=order.plan_json, version=order.version),
            *_usage(order),
        ],
        [
            "# Strings from options are literal (SC2016, SC2088, SC1003, SC1112).",
            "# shellcheck disable=SC1003,SC1090,SC1091,SC1112,SC2016,SC2088",
            "set -euo pipefail",
            *environment_lines(order),
            *_connections(order.plan),
        ],
        ["arguments=(", *(f"  {shell_words(words)}" for words in arguments(order, program)), ")"],
        _start(order),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _require_balance(model: Model, program: Trainer) -> None:
    """Raise SpecError for biases that it keeps beside sigmoids alone."""
    if program.expert_bias_rate and model.experts and model.experts.router.scores == "softmax":
        raise SpecError(
            "--expert-bias-rate is of routers with sigmoids in Megatron-LM, and "
            f"{model.name}'s have a softmax: leave it out, and see --router-aux-loss-coef"
        )


def arguments(order: Order, program: Trainer) -> Arguments:
    """The command line after `pretrain_gpt.py`."""
    plan, recipe = order.plan, recipe_of(order, program)
    return [
        *model_arguments(plan, program),
        *_parallel(plan),
        *_data_parallel(plan),
        *_numbers(plan),
        *_recomputation(plan),
        ("--seq-length", str(plan.training.seq_len)),
        ("--micro-batch-size", str(plan.layout.micro_batch)),
        ("--global-batch-size", str(plan.training.global_batch)),
        ("--train-iters", str(recipe.steps)),
        *_optimizer(recipe),
        *_run(program),
    ]


def _parallel(plan: Plan) -> Arguments:
    layout = plan.layout
    found: Arguments = [
        ("--tensor-model-parallel-size", str(layout.tp)),
        ("--context-parallel-size", str(layout.cp)),
        ("--pipeline-model-parallel-size", str(layout.pp)),
    ]
    if layout.pp > 1:
        found.append(("--pipeline-model-parallel-layout", _stages(plan)))
    if layout.expert_ranks > 1:
        found.append(("--expert-model-parallel-size", str(layout.expert_ranks)))
    if layout.experts_over_tp:
        found.append(("--expert-tensor-parallel-size", "1"))
    found += [("--sequence-parallel",)] if layout.sequence_parallel else []
    found += [("--tp-comm-overlap",)] if layout.async_tp else []
    return found


def _stages(plan: Plan) -> str:
    """A letter a layer: E embedding, t transformer layer, L loss; | between stages."""
    stages = ["t" * len(blocks) for blocks in stage_ranges(plan.layout)]
    return "E" + "|".join(stages) + "L"


def _data_parallel(plan: Plan) -> Arguments:
    layout = plan.layout
    if layout.sharding == "fsdp":
        never = layout.reshard_after_forward == "never"
        return [
            ("--use-torch-fsdp2",),
            *([("--torch-fsdp2-no-reshard-after-forward",)] if never else []),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "torch_dist"),
        ]
    overlaps = plan.training.runtime != "megatron_lm"
    found: Arguments = [("--overlap-grad-reduce",)] if overlaps else []
    if layout.sharding == "zero1":
        found.append(("--use-distributed-optimizer",))
        found += [("--overlap-param-gather",)] if overlaps else []
        if layout.dp_replicate > 1:
            found.append(("--num-distributed-optimizer-instances", str(layout.dp_replicate)))
    return found


def _numbers(plan: Plan) -> Arguments:
    training = plan.training
    formats: dict[str, Arguments] = {
        "fp32": [],
        "fp16": [("--fp16",)],
        "bf16": [("--bf16",)],
        "fp8": [
            ("--bf16",),
            ("--fp8-format", "hybrid"),
            ("--fp8-recipe", training.fp8_recipe),
        ],
    }
    wide = training.reduce_dtype == "fp32"
    reduce = "--accumulate-allreduce-grads-in-fp32" if wide else "--grad-reduce-in-bf16"
    return [*formats[training.precision], (reduce,)]


def _recomputation(plan: Plan) -> Arguments:
    match plan.layout.activation_checkpointing:
        case "full":
            blocks = plan.layout.checkpoint_blocks
            # uniform: units of one layer, all of them; block: the first layers of each stage
            method, number = ("uniform", 1) if blocks == "all" else ("block", blocks)
            return [
                ("--recompute-granularity", "full"),
                ("--recompute-method", method),
                ("--recompute-num-layers", str(number)),
            ]
        case "attention":
            return [
                ("--recompute-granularity", "selective"),
                ("--recompute-modules", "core_attn"),
            ]
    return []


def _optimizer(recipe: Recipe) -> Arguments:
    if recipe.warmup_steps >= recipe.steps:
        raise SpecError(
            f"--warmup-steps {recipe.warmup_steps} of {recipe.steps} steps is refused by "
            "Megatron-LM, which wants fewer than all: lower it, or train more --steps"
        )
    found: Arguments = [
        ("--optimizer", "adam"),
        ("--lr", str(recipe.learning_rate)),
        ("--lr-decay-style", DECAY_STYLES[recipe.lr_schedule]),
        ("--lr-warmup-iters", str(recipe.warmup_steps)),
        ("--adam-beta1", str(recipe.betas[0])),
        ("--adam-beta2", str(recipe.betas[1])),
        ("--adam-eps", str(recipe.eps)),
        ("--weight-decay", str(recipe.weight_decay)),
        ("--clip-grad", str(recipe.clip_norm)),
    ]
    if recipe.lr_schedule != "constant":
        found.append(("--min-lr", str(recipe.min_lr)))
    if recipe.lr_schedule == "wsd":
        found.append(("--lr-wsd-decay-style", "minus_sqrt"))
        found.append(("--lr-wsd-decay-iters", str(recipe.decay_steps)))
    return found


def _run(program: Trainer) -> Arguments:
    seed = LEAST_SEED if program.seed is None else program.seed
    found: Arguments = [
        ("--seed", str(seed)),
        ("--tokenizer-type", "NullTokenizer"),
        ("--mock-data",),
        ("--eval-iters", "0"),
        ("--log-interval", "1"),
    ]
    if program.checkpoint_dir is not None:
        found += [(f"--save={program.checkpoint_dir}",), (f"--load={program.checkpoint_dir}",)]
    if program.checkpoint_every is not None:
        found.append(("--save-interval", str(program.checkpoint_every)))
    return found


def _usage(order: Order) -> list[str]:
    plan = order.plan
    each = "each node" if plan.cluster.nodes > 1 else "the node"
    lines = [
        "#",
        "# For Megatron-LM of August 2026 (commit d98e8a64), whose arguments it names.",
        f"# In its folder, on {each}: bash THIS_FILE [MORE ARGUMENTS]",
        "# Without --data-path and a tokenizer among them it trains on made-up tokens.",
    ]
    if plan.cluster.nodes > 1:
        lines.append("# The nodes want HEAD_NODE, the first one's address, and NODE_RANK, 0 on it.")
    lines += by_hand_lines(plan)
    if plan.training.runtime == "fsdp2":
        lines += [
            "# WARNING: the prediction is for runtime fsdp2; fsdpplan recommend --program",
            "# megatron prices what this program does.",
        ]
    return lines


def _connections(plan: Plan) -> list[str]:
    """Megatron-LM refuses to start without it before Blackwell, and FSDP refuses it."""
    if plan.layout.sharding == "fsdp" or (plan.layout.tp == 1 and plan.layout.cp == 1):
        return []
    return [
        "# Kernels then start in the order in which they were launched: tensor and context",
        "# parallelism count on it.",
        'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"',
    ]


def _start(order: Order) -> list[str]:
    plan = order.plan
    needs = [
        'HEAD_NODE="${HEAD_NODE:?the address of the first node}"',
        'NODE_RANK="${NODE_RANK:?0 on the first node, 1 on the next ...}"',
        f'PORT="${{PORT:-{rendezvous_port(order)}}}"',
    ]
    return [
        *(needs if plan.cluster.nodes > 1 else []),
        f"exec {shell_word(order.job.python)} -m torch.distributed.run {torchrun_words(plan)} \\",
        '  pretrain_gpt.py "${arguments[@]}" "$@"',
    ]
