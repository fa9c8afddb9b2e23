"""Command line of the trainer."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import PLAN_VARIABLE, PlanConfig
from .errors import TrainerError
from .groups import ParameterGroup, parse_group, require_all_used
from .huggingface.load import read_coefficient
from .model.balance import (
    AUXILIARY_COEFFICIENT,
    BALANCE_SPEED,
    default_bias_rate,
    has_softmax_router,
)
from .model.decoder import parameter_names
from .muon import MOMENTUM, NEWTON_SCHULZ_STEPS
from .optimizer import BETAS, EPSILON, Recipe
from .schedule import SCHEDULES, contradiction, default_decay_steps, default_warmup_steps
from .text.mixture import Share, require_shares, share_of

PREFLIGHT_SECONDS = 30.0
"""NCCL connects thousands of ranks in less, and people wait for no more."""

GC_EVERY = 50
"""Steps; as often as torchtitan does."""

NUMBERS_VARIABLE = "FSDPPLAN_NUMBERS"
"""Environment variable that, where it is 0, leaves the tiny step out, in `parallelize`, too."""


STEPS = 20
LEARNING_RATE = 3e-4
FINE_TUNING_LEARNING_RATE = 2e-5
"""Of runs that begin with a published model, or learn chats. Source: alignment-handbook
recipes/zephyr-7b-beta/sft/config_full.yaml, torchtune recipes/configs/llama3_1/8B_full.yaml and
axolotl examples/llama-3/fft-8b.yaml have it; the first and the last with a cosine, too."""
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
"""What a run takes that is not told otherwise; the planner's side has them too, and a test compares
both."""

OF_MUON = (
    "muon_learning_rate",
    "muon_weight_decay",
    "muon_momentum",
    "muon_nesterov",
    "muon_ns_steps",
)
"""Options that mean nothing where nothing is updated by Muon."""


OF_THE_STEPS = ("warmup_steps", "decay_steps", "eval_every")
"""Options whose defaults follow from how many steps there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    plan: str | None
    steps: int
    """All of them; with `epochs` those of a trial, until the data has been counted."""
    epochs: float | None
    """Passes over the data, which say how many steps; None: the steps were said."""
    data: tuple[Share, ...]
    """Where the tokens come from; empty: they are made up."""
    tokenizer: Path | None
    sft: bool
    """Fine-tune on chats: what the assistant says counts."""
    chat_template: Path | None
    """In place of the tokenizer's own."""
    data_workers: int | None
    """Processes of a rank that tokenise text; None: as its share of the processors says."""
    prefetch: int | None
    """Steps whose data is made ahead, at most; None: as the workers need it."""
    pack: bool
    eval_data: Path | None
    """What the run is judged by."""
    eval_every: int
    """Steps between evaluations; 0: only at the end."""
    eval_tokens: int | None
    """Most tokens to take of it."""
    init_from: Path | None
    """Folder of a published model to begin with."""
    export_hf: Path | None
    """Folder for the trained model, as published ones are."""
    learning_rate: float
    lr_schedule: str
    min_lr: float | None
    """Where the rate ends; None: a tenth of the peak."""
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    clip_norm: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    adamw: str
    muon_learning_rate: float | None
    muon_weight_decay: float | None
    muon_momentum: float
    muon_nesterov: bool
    muon_ns_steps: int
    param_group: tuple[ParameterGroup, ...]
    expert_bias_rate: float | None
    """None: as experts of the plan's model are balanced."""
    router_aux_loss_coef: float | None
    """None: as the model's config says."""
    given: frozenset[str]
    """Names of the options above that were typed, of those that need something of the plan or the
    data."""
    seed: int
    checkpoint_dir: Path | None
    checkpoint_every: int
    checkpoint_keep: int
    checkpoint_async: bool
    resume: str
    allow_changes: bool
    """Go on with a checkpoint though the learning rate jumps."""
    metrics: Path | None
    log_every: int
    """Steps between those whose numbers are read off the device."""
    gc_every: int
    """Steps between collections of garbage; 0: when Python wants to."""
    on_spike: str
    """none, skip or rollback."""
    prometheus: Path | None
    tensorboard: Path | None
    wandb: str | None
    """Project of Weights & Biases."""
    mlflow: str | None
    """Experiment of MLflow."""
    memory_snapshot: tuple[int, int] | None
    """First step and number of steps whose allocations are recorded."""
    profile: tuple[int, int] | None
    """First step and number of steps to profile."""
    profile_stacks: bool
    """Whether the profile has the lines of Python that asked for each operator."""
    profile_ranks: tuple[int, ...]
    hang_seconds: float | None
    """How long a step may take; 0: for ever, None: as the steps before it say."""
    preflight: bool
    """Try nodes, ranks and links first."""
    numbers: bool
    """First step a tiny model and compare it with one process."""
    preflight_seconds: float
    """Most that ranks wait for each other meanwhile."""
    run_folder: Path | None
    """Shared folder for what is found, and for what was saved."""
    rehearse: tuple[int, ...]
    """Ranks to rehearse instead of training."""
    report: Path | None
    """Where the rehearsal's report goes."""
    build: str | None
    """`FILE.py:FUNCTION` that makes the model to rehearse."""

    @property
    def is_fine_tuning(self) -> bool:
        """Whether a model that is there learns more, or chats are learned."""
        return self.sft or self.init_from is not None

    def over(self, *, sequences: int, batch: int) -> Options:
        """These options, with the steps that `epochs` passes over so many sequences are, `batch` a
        step. Raises TrainerError where others need more steps."""
        assert self.epochs is not None
        steps = max(1, math.ceil(self.epochs * sequences / batch))
        warmup, decay = default_warmup_steps(steps), default_decay_steps(steps)
        found = replace(
            self,
            steps=steps,
            warmup_steps=self.warmup_steps if "warmup_steps" in self.given else warmup,
            decay_steps=self.decay_steps if "decay_steps" in self.given else decay,
            eval_every=self.eval_every if "eval_every" in self.given else round(sequences / batch),
        )
        if wrong := found.contradiction():
            raise TrainerError(
                f"--epochs {self.epochs:g} are {steps} steps here, where {wrong}; or give --steps "
                "in its place"
            )
        return found

    def contradiction(self) -> str:
        """What does not go together with the number of steps, and what to do; empty where all
        does."""
        for name in ("profile", "memory_snapshot"):
            window = getattr(self, name)
            if (
                window is not None and sum(window) - 1 > self.steps
            ):  # what has no end is not written
                return f"--{name.replace('_', '-')} ends after the last step, {self.steps}"
        return contradiction(
            kind=self.lr_schedule,
            steps=self.steps,
            learning_rate=self.learning_rate,
            min_lr=self.min_lr,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps if "decay_steps" in self.given else None,
        )

    def recipe(self, plan: PlanConfig) -> Recipe:
        """How the plan's weights are updated. Raises TrainerError for an option that would do
        nothing with this plan."""
        self._require_meaning(plan)
        if self.param_group:
            require_all_used(self.param_group, parameter_names(plan.model))
        bias_rate = self.expert_bias_rate
        if bias_rate is None:
            bias_rate = default_bias_rate(plan.model)
        return Recipe(
            steps=self.steps,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            optimizer=plan.training.optimizer,
            adamw=self.adamw,
            lr_schedule=self.lr_schedule,
            min_lr=self.min_lr,
            decay_steps=self.decay_steps,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_eps,
            muon_learning_rate=self.muon_learning_rate,
            muon_weight_decay=self.muon_weight_decay,
            muon_momentum=self.muon_momentum,
            muon_nesterov=self.muon_nesterov,
            muon_ns_steps=self.muon_ns_steps,
            groups=self.param_group,
            expert_bias_rate=bias_rate,
            router_aux_loss_coef=self._coefficient(plan, bias_rate),
        )

    def _coefficient(self, plan: PlanConfig, bias_rate: float) -> float:
        """Of the auxiliary loss: as told, or else what stands in the published config, or in that
        of the plan, of a model whose experts no bias balances."""
        if self.router_aux_loss_coef is not None:
            return self.router_aux_loss_coef
        if not has_softmax_router(plan.model) or bias_rate > 0:
            return 0.0
        published = None if self.init_from is None else read_coefficient(self.init_from)
        if published is None and plan.model.experts is not None:
            published = plan.model.experts.router.aux_loss_coef
        return AUXILIARY_COEFFICIENT if published is None else published

    def _require_meaning(self, plan: PlanConfig) -> None:
        of_muon = sorted(self.given.intersection(OF_MUON))
        if of_muon and plan.training.optimizer != "muon":
            raise TrainerError(
                f"--{of_muon[0].replace('_', '-')} is of Muon, and the plan's optimizer is "
                f"{plan.training.optimizer}: leave it out, or plan with --optimizer muon"
            )
        if self.adamw != "fused" and plan.training.optimizer == "adamw_8bit":
            raise TrainerError(
                f"--adamw {self.adamw} is of AdamW, and the plan's optimizer, adamw_8bit, has a "
                "kernel of its own: leave it out"
            )
        for name in ("expert_bias_rate", "router_aux_loss_coef"):
            if name in self.given and plan.model.experts is None:
                raise TrainerError(
                    f"--{name.replace('_', '-')} balances experts, and the plan's model has none: "
                    "leave it out"
                )
        if self.router_aux_loss_coef and not has_softmax_router(plan.model):
            raise TrainerError(
                "--router-aux-loss-coef is of routers with a softmax, and the plan's model scores "
                "its experts by sigmoids, which biases balance: leave it out, and see "
                "--expert-bias-rate"
            )


def wants_numbers() -> bool:
    """Whether the environment lets the tiny step be."""
    return os.environ.get(NUMBERS_VARIABLE, "1") != "0"


def whole(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return value

    parse.__name__ = "whole number"
    return parse


def number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """An argparse type: a number within bounds; never NaN."""

    def parse(text: str) -> float:
        value = float(text)
        if value >= below < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be below {below:g}")
        if not (value > above and value >= least):
            bound = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"{text} must be {bound}")
        return value

    parse.__name__ = "number"
    return parse


def rank_list(text: str) -> tuple[int, ...]:
    """An argparse type: different ranks, separated by commas."""
    ranks = tuple(sorted({whole(0)(word) for word in text.split(",")}))
    return ranks


rank_list.__name__ = "list of ranks"


def step_window(text: str) -> tuple[int, int]:
    """An argparse type: START:STEPS, both at least 1."""
    first, colon, steps = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} must be START:STEPS, such as 10:3")
    return whole(1)(first), whole(1)(steps)


step_window.__name__ = "START:STEPS"


def parameter_group(text: str) -> ParameterGroup:
    """An argparse type: PATTERN:lr=NUMBER,weight_decay=NUMBER."""
    try:
        return parse_group(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def windows_meet(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    """Whether two windows of (first step, steps) have a step in common."""
    if one is None or other is None:
        return False
    return one[0] < sum(other) and other[0] < sum(one)


def make_parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m fsdpplan.trainer",
        description="Train the plan's model with the plan's layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--plan", metavar="FILE", help=f"plan to run; otherwise the JSON in ${PLAN_VARIABLE}")
    add(
        "--steps",
        type=whole(1),
        help=f"optimizer steps in all, resumed ones included (default: {STEPS})",
    )
    add(
        "--epochs",
        type=number(above=0),
        metavar="N",
        help="in place of --steps: passes over --data, counted when it is read; of several sources "
        "as many sequences as all have",
    )
    add(
        "--data",
        type=share_of,
        action="append",
        default=[],
        metavar="PATH[=WEIGHT]",
        help="token file, .txt or .jsonl file, or folder of these; otherwise synthetic tokens; "
        "several are mixed by their weights, or by their tokens",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json for text; otherwise bytes")
    add(
        "--sft",
        action="store_true",
        help="fine-tune on chats: --data has messages, or a prompt and a completion, in each line "
        "of .jsonl; answers alone count in the loss",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template for --sft; otherwise the one beside --tokenizer",
    )
    add(
        "--data-workers",
        type=whole(0),
        metavar="N",
        help="processes a rank that tokenise text ahead of the step; 0: its own thread does "
        "(default: by its share of the processors, at most 4)",
    )
    add(
        "--prefetch",
        type=whole(1),
        metavar="STEPS",
        help="steps whose data is made ahead (default: 2, or more for many workers)",
    )
    add("--pack", action="store_true", help="train the documents of a sequence apart")
    add(
        "--eval-data",
        type=Path,
        metavar="PATH",
        help="data like --data's that is not trained on: its loss is told at the end",
    )
    add(
        "--eval-every",
        type=whole(0),
        metavar="STEPS",
        help="0: only at the end (default: 0; with --epochs behind each of them)",
    )
    add("--eval-tokens", type=whole(1), metavar="N", help="most tokens of it (default: all)")
    add(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="begin with a Hugging Face model's weights (config.json, *.safetensors); a "
        "checkpoint that is resumed goes before",
    )
    add(
        "--export-hf",
        type=Path,
        metavar="DIR",
        help="write the trained model there, for transformers' from_pretrained",
    )
    add(
        "--learning-rate",
        type=number(above=0),
        help=f"at its peak (default: {LEARNING_RATE:g}; with --init-from or --sft "
        f"{FINE_TUNING_LEARNING_RATE:g})",
    )
    add(
        "--lr-schedule",
        choices=SCHEDULES,
        default="cosine",
        help="after the warm-up; wsd: constant, and in the last --decay-steps by 1 - sqrt",
    )
    add(
        "--min-lr",
        type=number(least=0),
        metavar="RATE",
        help="where the rate ends (default: a tenth of --learning-rate)",
    )
    add("--warmup-steps", type=whole(0), help="steps of linear warm-up (default: a tenth, <= 2000)")
    add("--decay-steps", type=whole(1), metavar="N", help="of wsd (default: a tenth)")
    add(
        "--weight-decay",
        type=number(least=0),
        default=WEIGHT_DECAY,
        help="of matrices",
    )
    add(
        "--clip-norm",
        type=number(above=0),
        default=CLIP_NORM,
        help="norm of all gradients; inf: none",
    )
    first, second = BETAS
    add("--adam-beta1", type=number(least=0, below=1), default=first, help="of the mean")
    add("--adam-beta2", type=number(least=0, below=1), default=second, help="of the square")
    add("--adam-eps", type=number(above=0), default=EPSILON, help="beside the root of the square")
    add(
        "--adamw",
        choices=("fused", "foreach", "loop"),
        default="fused",
        help="fused: one kernel; foreach: lists of tensors, more memory; loop: one at a time",
    )
    add(
        "--muon-learning-rate",
        type=number(above=0),
        help="of Muon's matrices, at its peak (default: --learning-rate)",
    )
    add(
        "--muon-weight-decay",
        type=number(least=0),
        help="of Muon's matrices (default: --weight-decay)",
    )
    add("--muon-momentum", type=number(least=0, below=1), default=MOMENTUM, help="of Muon")
    add(
        "--muon-nesterov",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Muon's momentum looks ahead",
    )
    add(
        "--muon-ns-steps",
        type=whole(1),
        default=NEWTON_SCHULZ_STEPS,
        help="steps of Newton-Schulz that orthogonalise Muon's updates",
    )
    add(
        "--param-group",
        type=parameter_group,
        action="append",
        metavar="PATTERN:lr=X,weight_decay=Y",
        help="another learning rate (times that of all) or weight decay for parameters whose name "
        "matches, such as 'tok_embeddings*:lr=0.1'; may be repeated, the first that matches counts",
    )
    add(
        "--expert-bias-rate",
        type=number(least=0),
        default=None,
        help="what a step moves a bias that balances experts by, 0: it stays (default: "
        f"{BALANCE_SPEED} where their scores are sigmoids, as in DeepSeek-V3, else 0)",
    )
    add(
        "--router-aux-loss-coef",
        type=number(least=0),
        default=None,
        help="of the auxiliary loss that balances experts, 0: none (default: where their scores "
        "are a softmax and no bias balances them, what the config of the model says, or "
        f"{AUXILIARY_COEFFICIENT}; else 0)",
    )
    add("--seed", type=whole(0), default=0, help="of weights and data")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="shared folder; otherwise none are kept")
    add("--checkpoint-every", type=whole(0), default=0, metavar="STEPS", help="0: only at the end")
    add("--checkpoint-keep", type=whole(1), default=2, metavar="N", help="newest ones to keep")
    add(
        "--checkpoint-async",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write while training goes on, from a copy in CPU memory",
    )
    add(
        "--resume",
        choices=("auto", "required", "never"),
        default="auto",
        help="auto: if --checkpoint-dir has a checkpoint (an older one where the newest is "
        "damaged); never: refuse to start if it has one",
    )
    add(
        "--allow-changes",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="resume though other options make the learning rate jump",
    )
    add("--metrics", type=Path, metavar="FILE", help="one JSON line a logged step")
    add(
        "--log-every",
        type=whole(1),
        default=1,
        metavar="STEPS",
        help="steps between lines; between them no number is read off the device",
    )
    add(
        "--gc-every",
        type=whole(0),
        default=GC_EVERY,
        metavar="STEPS",
        help="collect Python's garbage then, on all ranks at once; 0: whenever Python would",
    )
    add(
        "--on-spike",
        choices=("none", "skip", "rollback"),
        default="none",
        help="where the loss or the gradient norm is far off what it was: skip: leave that update "
        "out; rollback: go back to the last checkpoint, and on with other data",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="events for TensorBoard")
    add("--wandb", metavar="PROJECT", help="a run of this project of Weights & Biases")
    add("--mlflow", metavar="EXPERIMENT", help="a run of this experiment of MLflow")
    add(
        "--memory-snapshot",
        type=step_window,
        metavar="START:STEPS",
        help="steps whose allocations are recorded; files go beside --metrics",
    )
    add(
        "--prometheus",
        type=Path,
        metavar="FILE.prom",
        help="the newest step as text for Prometheus, replaced every few seconds",
    )
    add(
        "--profile",
        type=step_window,
        metavar="START:STEPS",
        help="steps to profile; a Chrome trace goes beside --metrics",
    )
    add(
        "--profile-stacks",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="with the lines of Python in the trace of --profile, which slows its steps",
    )
    add(
        "--profile-ranks",
        type=rank_list,
        default=(0,),
        metavar="RANKS",
        help="ranks that --profile and --memory-snapshot are about (0,7)",
    )
    add(
        "--hang-seconds",
        type=number(least=0),
        metavar="N",
        help="end when no step ends for so long, and say what each rank waits for; 0: never "
        "(default: 10 times the median step, at least 60)",
    )
    add(
        "--preflight",
        action="store_true",
        help="first try nodes, ranks and links, and name what is bad",
    )
    add(
        "--numbers",
        action=argparse.BooleanOptionalAction,
        default=wants_numbers(),
        help="first step a tiny model in the plan's layout, and end where its numbers are not "
        f"those of one process ({NUMBERS_VARIABLE}=0: not)",
    )
    add(
        "--preflight-seconds",
        type=number(above=0),
        default=PREFLIGHT_SECONDS,
        metavar="N",
        help="most that ranks wait for each other in --preflight and --numbers",
    )
    add(
        "--run-folder",
        type=Path,
        metavar="DIR",
        help="shared folder for what --preflight finds (preflight.json, bad-nodes), and for what "
        "was saved (saves.jsonl): without the one, no run begins anew that has saved",
    )
    add(
        "--rehearse",
        type=rank_list,
        default=(),
        metavar="RANKS",
        help="go through a step as these ranks (0,7,1023), without the others and without "
        "memory, in place of training",
    )
    add(
        "--build",
        metavar="FILE.py:FUNCTION",
        help="rehearse the model that this function makes, with an example of its inputs",
    )
    add("--report", type=Path, metavar="FILE", help="where --rehearse writes what they did")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; exits with code 2 and one line on a mistake."""
    parser = make_parser()
    values = vars(parser.parse_args(arguments))
    values["data"] = tuple(values["data"])
    if values["sft"] and (not values["data"] or values["tokenizer"] is None):
        parser.error("--sft needs --data with chats and their --tokenizer")
    if values["chat_template"] is not None and not values["sft"]:
        parser.error("--chat-template needs --sft")
    for name in ("eval_every", "eval_tokens"):
        if values[name] and values["eval_data"] is None:
            parser.error(f"--{name.replace('_', '-')} needs --eval-data")
    for name in ("tokenizer", "data_workers", "prefetch"):
        if values[name] is not None and not values["data"]:
            parser.error(f"--{name.replace('_', '-')} needs --data")
    try:
        require_shares(values["data"])
    except TrainerError as error:
        parser.error(str(error))
    for name in ("report", "build"):
        if values[name] is not None and not values["rehearse"]:
            parser.error(f"--{name} needs --rehearse")
    if values["profile_stacks"] and values["profile"] is None:
        parser.error("--profile-stacks needs steps to --profile")
    if values["epochs"] is not None and not values["data"]:
        parser.error("--epochs are passes over --data: give it too, or --steps")
    if values["epochs"] is not None and values["steps"] is not None:
        parser.error("--epochs and --steps each say how far to train: give one of them")
    if values["on_spike"] == "rollback" and not values["checkpoint_every"]:
        parser.error("--on-spike rollback needs --checkpoint-every, to have where to go back to")
    if windows_meet(values["profile"], values["memory_snapshot"]):
        parser.error("--profile and --memory-snapshot need steps of their own: torch records one")
    if values["checkpoint_dir"] is None:
        if values["checkpoint_every"]:
            parser.error("--checkpoint-every needs --checkpoint-dir")
        if values["resume"] == "required":
            parser.error("--resume required needs --checkpoint-dir")
        if values["allow_changes"]:
            parser.error("--allow-changes needs --checkpoint-dir")
    options = _settled(parser, values)
    if options.epochs is None and (wrong := options.contradiction()):
        parser.error(wrong)
    return options


def _settled(parser: argparse.ArgumentParser, values: dict[str, Any]) -> Options:
    """The options, with what was left out put in."""
    asked = (*OF_MUON, "expert_bias_rate", "router_aux_loss_coef", *OF_THE_STEPS)
    given = frozenset(name for name in asked if values[name] != parser.get_default(name))
    tunes = values["sft"] or values["init_from"] is not None
    steps = values["steps"] or STEPS
    defaults = {
        "steps": steps,
        "learning_rate": FINE_TUNING_LEARNING_RATE if tunes else LEARNING_RATE,
        "warmup_steps": default_warmup_steps(steps),
        "decay_steps": default_decay_steps(steps),
        "eval_every": 0,
    }
    left_out = {name: value for name, value in defaults.items() if values[name] is None}
    groups = tuple(values["param_group"] or ())
    return Options(**{**values, **left_out, "param_group": groups, "given": given})
