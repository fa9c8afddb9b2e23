"""Command line of the trainer."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from .config import PlanConfig
from .errors import TrainerError
from .groups import ParameterGroup, parse_group, require_all_used
from .huggingface.load import read_coefficient
from .model.balance import default_bias_rate, has_softmax_router
from .model.decoder import trained_names
from .optimizer import Recipe, Updates
from .schedule import contradiction
from .shared import trainer_options
from .text.mixture import Share, require_shares, share_of

OF_THE_STEPS = ("warmup_steps", "decay_steps", "eval_every")
"""Options whose defaults follow from how many steps there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Updates):
    """What the command line says, with what was left out put in; `spec/trainer_options.py` says
    what each means."""

    plan: str | None
    epochs: float | None
    """Passes over the data; `steps` are those of a trial until it has been counted."""
    data: tuple[Share, ...]
    """Where the tokens come from; empty: they are made up."""
    tokenizer: Path | None
    sft: bool
    chat_template: Path | None
    data_workers: int | None
    prefetch: int | None
    pack: bool
    eval_data: Path | None
    eval_every: int
    """0: only at the end."""
    eval_tokens: int | None
    init_from: Path | None
    export_hf: Path | None
    export_peft: Path | None
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    param_group: tuple[ParameterGroup, ...]
    expert_bias_rate: float | None
    router_aux_loss_coef: float | None
    given: frozenset[str]
    """Names of the options that were typed, of those that need something of the plan or the
    data."""
    seed: int
    checkpoint_dir: Path | None
    checkpoint_every: int
    """0: only at the end."""
    checkpoint_keep: int
    checkpoint_async: bool
    resume: str
    allow_changes: bool
    metrics: Path | None
    log_every: int
    gc_every: int
    on_spike: str
    prometheus: Path | None
    tensorboard: Path | None
    wandb: str | None
    mlflow: str | None
    memory_snapshot: tuple[int, int] | None
    """First step and number of steps."""
    profile: tuple[int, int] | None
    """First step and number of steps."""
    profile_stacks: bool
    profile_ranks: tuple[int, ...]
    hang_seconds: float | None
    """How long a step may take; 0: for ever, None: as the steps before it say."""
    preflight: bool
    numbers: bool
    preflight_seconds: float
    run_folder: Path | None
    rehearse: tuple[int, ...]
    report: Path | None
    build: str | None

    @property
    def is_fine_tuning(self) -> bool:
        """Whether a model that is there learns more, or chats are learned."""
        return self.sft or self.init_from is not None

    def over(self, *, sequences: int, batch: int) -> Options:
        """These options, with the steps that `epochs` passes over so many sequences are, `batch` a
        step. Raises TrainerError where others need more steps."""
        assert self.epochs is not None
        steps = max(1, math.ceil(self.epochs * sequences / batch))
        warmup, decay = (
            trainer_options.default_warmup_steps(steps),
            trainer_options.default_decay_steps(steps),
        )
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
            names = trained_names(plan.model, plan.training.adapters)
            require_all_used(self.param_group, names)
        bias_rate = self.expert_bias_rate
        if bias_rate is None:
            bias_rate = default_bias_rate(plan.model)
        typed = {each.name: getattr(self, each.name) for each in fields(Updates)}
        if plan.training.adapters is not None and "learning_rate" not in self.given:
            typed["learning_rate"] = trainer_options.ADAPTER_LEARNING_RATE
        return Recipe(
            **typed,
            optimizer=plan.training.optimizer,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_eps,
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
        return trainer_options.AUXILIARY_COEFFICIENT if published is None else published

    def _require_meaning(self, plan: PlanConfig) -> None:
        of_muon = sorted(name for name in self.given if name.startswith("muon_"))
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
    return os.environ.get(trainer_options.NUMBERS_VARIABLE, "1") != "0"


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
    try:
        return trainer_options.step_window(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


PARSERS: dict[str, Callable[[str], Any]] = {
    "data": share_of,
    "param_group": parameter_group,
    "memory_snapshot": step_window,
    "profile": step_window,
    "profile_ranks": rank_list,
    "rehearse": rank_list,
}
"""Of the options whose values are more than a text or a number."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of all declared options."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m fsdpplan.trainer",
        description="Train the plan's model with the plan's layout.",
    )
    for declared in (trainer_options.TrainerOptions, trainer_options.LaunchOptions):
        for name, (kind, option) in trainer_options.options_of(declared).items():
            _add(parser, name, kind, option)
    parser.set_defaults(numbers=wants_numbers())
    return parser


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Any, option: trainer_options.Option
) -> None:
    flag, text = "--" + name.replace("_", "-"), option.text.replace("%", "%%")
    if kind is bool:
        switch = argparse.BooleanOptionalAction
        parser.add_argument(flag, action=switch, default=bool(option.default), help=text)
        return
    takes: dict[str, Any] = {"type": _parser_of(name, kind, option), "default": option.default}
    if kind is tuple:
        takes |= {"action": "append", "default": []}
    elif kind not in (int, float, str):
        takes = {"choices": get_args(kind), "default": option.default}
    parser.add_argument(flag, metavar=option.metavar, help=text, **takes)


def _parser_of(name: str, kind: Any, option: trainer_options.Option) -> Callable[[str], Any]:
    if name in PARSERS:
        return PARSERS[name]
    if kind is int:
        return whole(0 if option.takes_zero else int(option.least or 0))
    if kind is float:
        below = math.inf if option.below is None else option.below
        return number(above=0) if option.least is None else number(least=option.least, below=below)
    return Path if option.is_path else str


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; exits with code 2 and one line on a mistake."""
    parser = make_parser()
    values = vars(parser.parse_args(arguments))
    for name in ("data", "param_group"):
        values[name] = tuple(values[name])
    if values["sft"] and (not values["data"] or values["tokenizer"] is None):
        parser.error("--sft needs --data with chats and their --tokenizer")
    for declared in (trainer_options.TrainerOptions, trainer_options.LaunchOptions):
        if wrong := trainer_options.unmet_needs(declared, _given(parser, values)):
            parser.error(wrong)
    try:
        require_shares(values["data"])
    except TrainerError as error:
        parser.error(str(error))
    if values["epochs"] is not None and values["steps"] is not None:
        parser.error("--epochs and --steps each say how far to train: give one of them")
    if values["on_spike"] == "rollback" and not values["checkpoint_every"]:
        parser.error("--on-spike rollback needs --checkpoint-every, to have where to go back to")
    if windows_meet(values["profile"], values["memory_snapshot"]):
        parser.error("--profile and --memory-snapshot need steps of their own: torch records one")
    if values["resume"] == "required" and values["checkpoint_dir"] is None:
        parser.error("--resume required needs --checkpoint-dir")
    options = _settled(parser, values)
    if options.epochs is None and (wrong := options.contradiction()):
        parser.error(wrong)
    return options


def _given(parser: argparse.ArgumentParser, values: dict[str, Any]) -> set[str]:
    """The options that say something else than where nothing is said; 0 is the end alone."""
    ends = {
        name
        for name, (_, option) in trainer_options.options_of(trainer_options.TrainerOptions).items()
        if option.takes_zero and values[name] == 0
    }
    said = {name for name in values if values[name] not in (None, (), parser.get_default(name))}
    return said - ends


def _settled(parser: argparse.ArgumentParser, values: dict[str, Any]) -> Options:
    """The options, with what was left out put in."""
    of_the_plan = ("learning_rate", "expert_bias_rate", "router_aux_loss_coef", *OF_THE_STEPS)
    asked = (name for name in values if name.startswith("muon_") or name in of_the_plan)
    given = frozenset(name for name in asked if values[name] != parser.get_default(name))
    tunes = values["sft"] or values["init_from"] is not None
    steps = values["steps"] or trainer_options.STEPS
    defaults = {
        "steps": steps,
        "learning_rate": trainer_options.default_learning_rate(fine_tunes=tunes),
        "warmup_steps": trainer_options.default_warmup_steps(steps),
        "decay_steps": trainer_options.default_decay_steps(steps),
        "eval_every": 0,
        "checkpoint_every": 0,
        "rehearse": (),
    }
    left_out = {name: value for name, value in defaults.items() if values[name] is None}
    return Options(**{**values, **left_out, "given": given})
