"""Trainer: the reference training program as a job runs it, with its options as they were given.

The options are declared in `spec/trainer_options.py`; here is what goes together, and the words
that the program reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from fsdpplan.emit.safe_text import require_no_tokens, require_passable
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Model
from fsdpplan.spec.trainer_options import (
    AUXILIARY_COEFFICIENT,
    STEPS,
    Option,
    TrainerOptions,
    data_share,
    default_decay_steps,
    default_learning_rate,
    default_warmup_steps,
    group_settings,
    options_of,
    step_window,
    unmet_needs,
)
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import require_choice, require_positive

UNCOUNTED_STEPS = 10**9
"""Stands for the steps of epochs over data that nobody has counted."""

DASHBOARDS = ("tensorboard", "wandb", "mlflow")
"""Options that need the Python package of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer(TrainerOptions):
    """The reference trainer (`python -m fsdpplan.trainer`) and its options, checked."""

    HEADING: ClassVar[str] = "Training program (the reference trainer)"

    def __post_init__(self) -> None:
        for name, (kind, option) in options_of(TrainerOptions).items():
            value = getattr(self, name)
            if value not in (None, ()):
                _check(name, value, kind, option)
        if self.sft and (not self.sources or self.tokenizer is None):
            raise SpecError(
                "sft needs chats and what turns them into tokens: give --data chats.jsonl and "
                "--tokenizer too"
            )
        given = {name for name in options_of(TrainerOptions) if self._is_given(name)}
        if wrong := unmet_needs(TrainerOptions, given):
            raise SpecError(wrong)
        if self.epochs is not None and self.steps is not None:
            raise SpecError("epochs and steps each say how far to train: give one of them")
        self._check_data()
        self._check_schedule()
        self._check_windows()
        if self.on_spike == "rollback" and self.checkpoint_every is None:
            raise SpecError(
                "on_spike rollback needs where to go back to: give --checkpoint-every too"
            )
        require_no_tokens(self)
        for word in self.words():
            require_passable(word.partition("=")[0], word)

    def _is_given(self, name: str) -> bool:
        """Whether the option says something: a switch is off where nothing is said, but for those
        that are on then."""
        value = getattr(self, name)
        is_on = options_of(TrainerOptions)[name][1].default is True
        return value not in (None, ()) and (value is not False or is_on)

    def _check_data(self) -> None:
        if self.data_workers == 0 and self.prefetch is not None:
            raise SpecError(
                "prefetch is for data that is read ahead, which data_workers 0 is not: leave one "
                "of them out"
            )
        weights = [data_share(text)[1] for text in self.sources]
        bare = [text for text, weight in zip(self.sources, weights, strict=True) if weight is None]
        if bare and len(bare) < len(self.sources):
            raise SpecError(
                f"data {bare[0]!r} has no weight, others have: write {bare[0]}=WEIGHT, or leave "
                "all weights out, for each source to have its share by its tokens"
            )
        for text, weight in zip(self.sources, weights, strict=True):
            if weight is not None and not float(weight):
                raise SpecError(f"data {text!r} has a weight of 0: give it more, or leave it out")

    def _check_windows(self) -> None:
        windows = [self._window("profile"), self._window("memory_snapshot")]
        found = sorted(window for window in windows if window is not None)
        if len(found) == 2 and found[1][0] < sum(found[0]):
            raise SpecError(
                "profile and memory_snapshot need steps of their own, since torch records one at a "
                f"time: give --memory-snapshot {sum(found[0])}:{found[1][1]}, or an earlier one"
            )

    def _window(self, name: str) -> tuple[int, int] | None:
        """(first step, number of steps) of an option."""
        text = getattr(self, name)
        if text is None:
            return None
        try:
            first, steps = step_window(text)
        except ValueError as error:
            raise SpecError(f"{name} {error}") from error
        if self.steps is not None and first + steps - 1 > self.steps:
            raise SpecError(
                f"{name} {text} ends after the last step, {self.steps}: begin "
                "earlier, or train more --steps"
            )
        return first, steps

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the tokens come from, each `PATH` or `PATH=WEIGHT`; empty: they are made up."""
        return _several(self.data)

    def _check_schedule(self) -> None:
        kind = self.lr_schedule or "cosine"
        peak = peak_learning_rate(self)
        if self.min_lr is not None and kind == "constant":
            raise SpecError("min_lr has no meaning with lr_schedule constant: leave --min-lr out")
        if self.min_lr is not None and self.min_lr > peak:
            raise SpecError(
                f"min_lr {self.min_lr:g} is above the peak, learning_rate {peak:g}: lower --min-lr"
            )
        if self.decay_steps is not None and kind != "wsd":
            raise SpecError(
                f"decay_steps is of lr_schedule wsd, not of {kind}: leave --decay-steps out, or "
                "add --lr-schedule wsd"
            )
        if kind != "wsd" or self.steps is None:  # the plan may say how many: `require_meaning`
            return
        warmup, decay = warmup_steps(self, self.steps), decay_steps(self, self.steps)
        if warmup + decay > self.steps:
            raise SpecError(
                f"{warmup} steps of warm-up and {decay} of decay are more than the {self.steps} "
                "steps: lower --warmup-steps or --decay-steps, or train more --steps"
            )

    def words(self) -> tuple[str, ...]:
        """The command line after the program."""
        return tuple(self._words())

    def _words(self) -> Iterator[str]:
        for name, (kind, option) in options_of(TrainerOptions).items():
            value, flag = getattr(self, name), name.replace("_", "-")
            if kind is tuple:
                yield from (f"--{flag}={each}" for each in _several(value))
            elif kind is bool:
                if value is not None and value is not bool(option.default):
                    yield f"--{flag}" if value else f"--no-{flag}"
            elif value is not None:
                yield f"--{flag}={value}"


def is_fine_tuning(program: Trainer) -> bool:
    """Whether a model that is there learns more, or chats are learned."""
    return bool(program.sft) or program.init_from is not None


def peak_learning_rate(program: Trainer, training: Training | None = None) -> float:
    """The learning rate at its peak: the one given, or the trainer's default for that training."""
    if program.learning_rate is not None:
        return program.learning_rate
    has_adapters = training is not None and training.adapters is not None
    return default_learning_rate(fine_tunes=is_fine_tuning(program), has_adapters=has_adapters)


def said_steps(program: Trainer, training: Training) -> int | None:
    """Optimizer steps that were asked for, or that the plan's tokens take; None where neither says
    how far to train, and of epochs, which the trainer counts."""
    if program.epochs is not None:
        return None
    return training.steps if program.steps is None else program.steps


def planned_steps(program: Trainer, training: Training) -> int:
    """Optimizer steps of a job: those said, or a trial's on made-up tokens; of epochs what the
    plan's tokens take, or else more than any. Raises SpecError where data is given and nothing says
    how far to train, and for options that need more steps."""
    if program.epochs is not None:
        return training.steps or UNCOUNTED_STEPS
    steps = said_steps(program, training)
    if steps is None and program.sources:
        raise SpecError(
            "--data is given, and neither the job nor its plan says how far to train on it: add "
            "--steps, such as --steps 1000, or --epochs, such as --epochs 1, or plan again with "
            "--tokens, such as --tokens 10B"
        )
    steps = steps or STEPS
    replace(program, steps=steps)  # which holds the other options to it
    return steps


def warmup_steps(program: Trainer, steps: int) -> int:
    """Steps of warm-up of `steps`: those given, or a tenth, at most 2,000, as the trainer takes."""
    return default_warmup_steps(steps) if program.warmup_steps is None else program.warmup_steps


def decay_steps(program: Trainer, steps: int) -> int:
    """Last steps in which `wsd` decays, of `steps`: those given, or a tenth."""
    return default_decay_steps(steps) if program.decay_steps is None else program.decay_steps


def router_aux_loss_coef(program: Trainer, model: Model) -> float:
    """That of the auxiliary loss which balances the model's experts, as the trainer takes it, but
    for what the config of --init-from says; 0: there is none."""
    if program.router_aux_loss_coef is not None:
        return program.router_aux_loss_coef
    experts = model.experts
    if experts is None or experts.router.scores != "softmax" or program.expert_bias_rate:
        return 0.0
    said = experts.router.aux_loss_coef
    return AUXILIARY_COEFFICIENT if said is None else said


def require_meaning(program: Trainer, training: Training, model: Model) -> None:
    """Raise SpecError for an option that would do nothing with this plan."""
    of_muon = [
        name
        for name in options_of(TrainerOptions)
        if name.startswith("muon_") and _is_given(program, name)
    ]
    if of_muon and training.optimizer != "muon":
        raise SpecError(
            f"--{of_muon[0].replace('_', '-')} is of Muon, and the plan's optimizer is "
            f"{training.optimizer}: leave it out, or plan with --optimizer muon"
        )
    if program.adamw is not None and training.optimizer == "adamw_8bit":
        raise SpecError(
            f"--adamw {program.adamw} is of AdamW, and the plan's optimizer, adamw_8bit, has a "
            "kernel of its own: leave it out"
        )
    if program.export_peft is not None and training.adapters is None:
        raise SpecError(
            "--export-peft writes adapters, and the plan trains all of the model: leave it out for "
            "--export-hf, or plan with --lora 16"
        )
    if program.export_hf is not None and training.adapters is not None:
        raise SpecError(
            "--export-hf writes a whole model, and the plan trains adapters beside one: use "
            "--export-peft, and fsdpplan export --merged behind the run"
        )
    for name in ("expert_bias_rate", "router_aux_loss_coef"):
        if _is_given(program, name) and model.experts is None:
            raise SpecError(
                f"--{name.replace('_', '-')} balances experts, and {model.name} has none: leave it "
                "out"
            )
    if program.router_aux_loss_coef and model.experts and model.experts.router.scores != "softmax":
        raise SpecError(
            f"--router-aux-loss-coef is of routers with a softmax, and {model.name} scores its "
            "experts by sigmoids, which biases balance: leave it out, and see --expert-bias-rate"
        )


def _is_given(program: Trainer, name: str) -> bool:
    return getattr(program, name) is not None


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _check(name: str, value: Any, kind: Any, option: Option) -> None:
    if kind is tuple:
        if not isinstance(value, str | tuple) or not all(isinstance(each, str) for each in value):
            raise SpecError(f"{name} must be a text or a tuple of these, not {value!r}")
        if name == "param_group":
            for each in _several(value):
                try:
                    group_settings(each)
                except ValueError as error:
                    raise SpecError(f"param_group {error}") from error
        return
    if kind is int:
        least = option.least or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{name} must be a whole number of at least {least:g}, not {value!r}")
    elif kind is float and option.least is None:
        require_positive(**{name: value})
    elif kind is float:
        if not option.least <= value < float("inf"):
            raise SpecError(f"{name} must be a number of at least {option.least:g}, not {value!r}")
        if option.below is not None and value >= option.below:
            raise SpecError(f"{name} must be below {option.below:g}, not {value!r}")
    elif kind is not bool and kind is not str:
        require_choice(name, value, get_args(kind))
