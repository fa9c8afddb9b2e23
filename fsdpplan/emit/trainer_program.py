"""Trainer: the reference training program as a job runs it, and each of its options, once.

From a field's name, type and `Option` follow the flag of every command that starts it
(`cli/options/job.py`), what it may be, and the word that the program reads. The program itself
imports nothing of ours: a test compares its own command line (`trainer/options.py`) with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from fsdpplan.emit.safe_text import require_no_tokens, require_passable
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import require_choice, require_positive

DEFAULT_STEPS = 20
"""What the trainer takes where no steps are given; a test compares it with the trainer's own, as
what follows."""

DEFAULT_LEARNING_RATE = 3e-4
FINE_TUNING_LEARNING_RATE = 2e-5
DEFAULT_CLIP_NORM = 1.0
DEFAULT_WEIGHT_DECAY = 0.1
DEFAULT_SEED = 0
DEFAULT_BETAS = (0.9, 0.95)
DEFAULT_EPS = 1e-8
DEFAULT_AUX_LOSS_COEF = 0.001

UNCOUNTED_STEPS = 10**9
"""Stands for the steps of epochs over data that nobody has counted."""

FINAL_FRACTION = 0.1
"""Share of the peak at which the learning rate ends, where no floor is given."""

AdamW = Literal["fused", "foreach", "loop"]
LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
OnSpike = Literal["none", "skip", "rollback"]

DASHBOARDS = ("tensorboard", "wandb", "mlflow")
"""Options that need the Python package of the same name."""

_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
_WINDOW = re.compile(r"0*[1-9][0-9]{0,8}:0*[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an option of the trainer means; stands in the `Annotated` type of its field.

    A whole number is at least `least`, another number above 0, or at least `least`; that one is
    below `below`, too. One whose type is a tuple may be given several times.
    """

    help: str
    metavar: str | None = None
    """What stands for its value in the help."""
    example: str | None = None
    """A number to type where another was wrong."""
    least: float | None = None
    below: float | None = None
    default: bool = False
    """Of a switch: what the trainer does where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The reference trainer (`python -m fsdpplan.trainer`) and its options.

    None leaves the choice to the trainer.
    """

    HEADING: ClassVar[str] = "Training program (the reference trainer)"

    steps: Annotated[
        int | None, Option(help="Optimizer steps.", metavar="N", example="1000", least=1)
    ] = None
    epochs: Annotated[
        float | None,
        Option(
            help="In place of --steps: passes over --data, which the trainer counts when it reads "
            "it. Of several sources as many sequences as all have.",
            metavar="N",
            example="3",
        ),
    ] = None
    data: Annotated[
        str | tuple[str, ...],
        Option(
            help="Token file, .txt or .jsonl file, or folder of these; several are mixed by their "
            "weights, or by their tokens. Default: synthetic tokens.",
            metavar="PATH[=WEIGHT]",
        ),
    ] = ()
    tokenizer: Annotated[
        str | None, Option(help="tokenizer.json for text. Default: bytes.", metavar="PATH")
    ] = None
    sft: Annotated[
        bool | None,
        Option(
            help="Fine-tune on chats: --data is .jsonl with messages, or a prompt and a "
            "completion, in each line, and answers alone count in the loss.",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Option(
            help="Jinja template for --sft. Default: the one beside --tokenizer.", metavar="FILE"
        ),
    ] = None
    data_workers: Annotated[
        int | None,
        Option(
            help="Processes a rank that tokenise text ahead of the step; 0: the step's own thread "
            "does. Default: by its share of the processors, at most 4.",
            metavar="N",
            example="4",
            least=0,
        ),
    ] = None
    prefetch: Annotated[
        int | None,
        Option(
            help="Steps whose data is made ahead. Default: 2, or more for many workers.",
            metavar="STEPS",
            example="4",
            least=1,
        ),
    ] = None
    pack: Annotated[
        bool | None,
        Option(
            help="Train the documents of a sequence apart. Default: as planned (recommend --pack)."
        ),
    ] = None
    eval_data: Annotated[
        str | None,
        Option(
            help="Data like --data's that is not trained on: its loss is told at the end.",
            metavar="PATH",
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        Option(
            help="Steps between evaluations. Default: only at the end; with --epochs behind each.",
            metavar="N",
            example="500",
            least=1,
        ),
    ] = None
    eval_tokens: Annotated[
        int | None,
        Option(
            help="Most tokens of --eval-data to take, at least a sequence. Default: all.",
            metavar="N",
            example="1000000",
            least=1,
        ),
    ] = None
    init_from: Annotated[
        str | None,
        Option(
            help="Begin with the weights of a Hugging Face model: a folder with config.json and "
            "*.safetensors.",
            metavar="DIR",
        ),
    ] = None
    export_hf: Annotated[
        str | None,
        Option(
            help="Write the trained model there in the end, for transformers' from_pretrained.",
            metavar="DIR",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(
            help="At its peak. Default 3e-4; with --init-from or --sft 2e-5.",
            metavar="3e-4",
            example="3e-4",
        ),
    ] = None
    lr_schedule: Annotated[
        LrSchedule | None,
        Option(
            help="After the warm-up: a cosine (default), linear, constant, or constant until "
            "--decay-steps before the end (wsd).",
            metavar="cosine|linear|wsd|constant",
        ),
    ] = None
    min_lr: Annotated[
        float | None,
        Option(
            help="Where the rate ends. Default: a tenth of --learning-rate.",
            metavar="3e-5",
            example="3e-5",
            least=0,
        ),
    ] = None
    warmup_steps: Annotated[
        int | None,
        Option(
            help="Steps of linear warm-up. Default: a tenth, at most 2,000.",
            metavar="N",
            example="100",
            least=0,
        ),
    ] = None
    decay_steps: Annotated[
        int | None,
        Option(
            help="Last steps, in which --lr-schedule wsd decays. Default: a tenth.",
            metavar="N",
            example="100",
            least=1,
        ),
    ] = None
    weight_decay: Annotated[
        float | None, Option(help="Of matrices.", metavar="0.1", example="0.1", least=0)
    ] = None
    clip_norm: Annotated[
        float | None, Option(help="Largest gradient norm.", metavar="1.0", example="1.0")
    ] = None
    adam_beta1: Annotated[
        float | None,
        Option(help="Of AdamW's mean.", metavar="0.9", example="0.9", least=0, below=1),
    ] = None
    adam_beta2: Annotated[
        float | None,
        Option(help="Of AdamW's square.", metavar="0.95", example="0.95", least=0, below=1),
    ] = None
    adam_eps: Annotated[
        float | None,
        Option(help="Beside the root of AdamW's square.", metavar="1e-8", example="1e-8"),
    ] = None
    adamw: Annotated[
        AdamW | None,
        Option(
            help="How AdamW steps: in one kernel, by lists of tensors (more memory), or one by one."
            " Default: fused.",
            metavar="fused|foreach|loop",
        ),
    ] = None
    muon_learning_rate: Annotated[
        float | None,
        Option(
            help="Of the matrices that Muon updates, at its peak. Default: --learning-rate.",
            metavar="3e-4",
            example="3e-4",
        ),
    ] = None
    muon_weight_decay: Annotated[
        float | None,
        Option(help="Of these. Default: --weight-decay.", metavar="0.1", example="0.1", least=0),
    ] = None
    muon_momentum: Annotated[
        float | None,
        Option(help="Of Muon.", metavar="0.95", example="0.95", least=0, below=1),
    ] = None
    muon_nesterov: Annotated[
        bool | None, Option(help="Muon's momentum looks ahead. Default: does.", default=True)
    ] = None
    muon_ns_steps: Annotated[
        int | None,
        Option(
            help="Steps of Newton-Schulz that orthogonalise Muon's updates. Default: 5, as is "
            "priced.",
            metavar="N",
            example="5",
            least=1,
        ),
    ] = None
    param_group: Annotated[
        tuple[str, ...],
        Option(
            help="Parameters whose names match a pattern get another learning rate (times that of "
            "all) or weight decay, such as 'tok_embeddings*:lr=0.1,weight_decay=0'; may be "
            "repeated, the first that matches counts.",
            metavar="PATTERN:SETTINGS",
        ),
    ] = ()
    expert_bias_rate: Annotated[
        float | None,
        Option(
            help="What a step moves a bias that balances experts by; 0: it stays. Default: 0.001 "
            "where their scores are sigmoids (DeepSeek-V3), else 0.",
            metavar="0.001",
            example="0.001",
            least=0,
        ),
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        Option(
            help="Of the auxiliary loss that balances experts; 0: none. Default: where their "
            "scores are a softmax (Mixtral, Qwen) and no bias balances them, what the model's "
            "config says, or 0.001; else 0.",
            metavar="0.001",
            example="0.001",
            least=0,
        ),
    ] = None
    seed: Annotated[
        int | None, Option(help="Of the run.", metavar="N", example="1234", least=0)
    ] = None
    checkpoint_dir: Annotated[
        str | None, Option(help="Where to save and resume from.", metavar="PATH")
    ] = None
    checkpoint_every: Annotated[
        int | None, Option(help="Steps between saves.", metavar="N", example="500", least=1)
    ] = None
    checkpoint_keep: Annotated[
        int | None, Option(help="Newest saves to keep.", metavar="N", example="2", least=1)
    ] = None
    checkpoint_async: Annotated[
        bool | None,
        Option(
            help="Save while training goes on, from a copy in CPU memory. Default: do.",
            default=True,
        ),
    ] = None
    allow_changes: Annotated[
        bool | None,
        Option(help="Resume though other options make the learning rate jump. Default: refuse."),
    ] = None
    log_every: Annotated[
        int | None,
        Option(
            help="Steps between lines; between them no number is read off the device. Default: 1.",
            metavar="N",
            example="10",
            least=1,
        ),
    ] = None
    gc_every: Annotated[
        int | None,
        Option(
            help="Steps between collections of Python's garbage, on all ranks at once; 0: whenever "
            "Python would. Default: 50.",
            metavar="N",
            example="50",
            least=0,
        ),
    ] = None
    on_spike: Annotated[
        OnSpike | None,
        Option(
            help="Where the loss or the gradient norm is far off what it was: leave that update "
            "out, or go back to the last checkpoint and on with other data. Default: none.",
            metavar="none|skip|rollback",
        ),
    ] = None
    tensorboard: Annotated[str | None, Option(help="Events for TensorBoard.", metavar="DIR")] = None
    wandb: Annotated[
        str | None, Option(help="A run in this project of Weights & Biases.", metavar="PROJECT")
    ] = None
    mlflow: Annotated[
        str | None,
        Option(
            help="A run in this experiment of MLflow, at MLFLOW_TRACKING_URI.", metavar="EXPERIMENT"
        ),
    ] = None
    memory_snapshot: Annotated[
        str | None,
        Option(
            help="Steps whose allocations are recorded on rank 0: a snapshot and a timeline beside "
            "--metrics.",
            metavar="START:STEPS",
        ),
    ] = None
    prometheus: Annotated[
        str | None, Option(help="Newest step as text, for node_exporter.", metavar="FILE.prom")
    ] = None
    profile: Annotated[
        str | None, Option(help="Steps to profile on rank 0.", metavar="START:STEPS")
    ] = None
    profile_stacks: Annotated[
        bool | None,
        Option(
            help="With the lines of Python that asked for each operator, in the trace of --profile."
        ),
    ] = None
    hang_seconds: Annotated[
        int | None,
        Option(
            help="End when no step ends for so long; 0: never. Default: 10 median steps, at least "
            "60.",
            metavar="N",
            example="300",
            least=0,
        ),
    ] = None
    numbers: Annotated[
        bool | None,
        Option(
            help="Step a tiny model first, and end where it does not as one process. Default: do.",
            default=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, (kind, option) in options_of_trainer().items():
            value = getattr(self, name)
            if value not in (None, ()):
                _check(name, value, kind, option)
        for name in ("checkpoint_every", "checkpoint_keep", "checkpoint_async", "allow_changes"):
            if getattr(self, name) is not None and self.checkpoint_dir is None:
                raise SpecError(f"{name} needs a place: give --checkpoint-dir too")
        if self.sft and (not self.sources or self.tokenizer is None):
            raise SpecError(
                "sft needs chats and what turns them into tokens: give --data chats.jsonl and "
                "--tokenizer too"
            )
        if self.profile_stacks and self.profile is None:
            raise SpecError("profile_stacks needs steps to look at: give --profile 10:3 too")
        if self.chat_template is not None and not self.sft:
            raise SpecError("chat_template is for chats: give --sft too")
        for name in ("eval_every", "eval_tokens"):
            if getattr(self, name) is not None and self.eval_data is None:
                raise SpecError(f"{name} needs data to judge by: give --eval-data too")
        if self.tokenizer is not None and not self.sources:
            raise SpecError("tokenizer needs text: give --data with .txt or .jsonl files too")
        if self.epochs is not None and not self.sources:
            raise SpecError("epochs are passes over data: give --data too, or --steps")
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

    def _check_data(self) -> None:
        for name in ("data_workers", "prefetch"):
            if getattr(self, name) is not None and not self.sources:
                raise SpecError(f"{name} is for data that is read: give --data too")
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
            if weight == 0:
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
        if not _WINDOW.fullmatch(text):
            raise SpecError(f"{name} {text!r} must be START:STEPS, such as 10:3 for steps 10 to 12")
        first, steps = map(int, text.split(":"))
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
        for name, (kind, option) in options_of_trainer().items():
            value, flag = getattr(self, name), name.replace("_", "-")
            if kind is tuple:
                yield from (f"--{flag}={each}" for each in _several(value))
            elif kind is bool:
                if value is not None and value != option.default:
                    yield f"--{flag}" if value else f"--no-{flag}"
            elif value is not None:
                yield f"--{flag}={value}"


def is_fine_tuning(program: Trainer) -> bool:
    """Whether a model that is there learns more, or chats are learned."""
    return bool(program.sft) or program.init_from is not None


def peak_learning_rate(program: Trainer) -> float:
    """The learning rate at its peak: the one given, or the trainer's default."""
    if program.learning_rate is not None:
        return program.learning_rate
    return FINE_TUNING_LEARNING_RATE if is_fine_tuning(program) else DEFAULT_LEARNING_RATE


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
    steps = steps or DEFAULT_STEPS
    replace(program, steps=steps)  # which holds the other options to it
    return steps


def warmup_steps(program: Trainer, steps: int) -> int:
    """Steps of warm-up of `steps`: those given, or a tenth, at most 2,000, as the trainer takes."""
    return min(2000, steps // 10) if program.warmup_steps is None else program.warmup_steps


def decay_steps(program: Trainer, steps: int) -> int:
    """Last steps in which `wsd` decays, of `steps`: those given, or a tenth."""
    return max(1, steps // 10) if program.decay_steps is None else program.decay_steps


def router_aux_loss_coef(program: Trainer, model: Model) -> float:
    """That of the auxiliary loss which balances the model's experts, as the trainer takes it, but
    for what the config of --init-from says; 0: there is none."""
    if program.router_aux_loss_coef is not None:
        return program.router_aux_loss_coef
    experts = model.experts
    if experts is None or experts.router.scores != "softmax" or program.expert_bias_rate:
        return 0.0
    said = experts.router.aux_loss_coef
    return DEFAULT_AUX_LOSS_COEF if said is None else said


def require_meaning(program: Trainer, training: Training, model: Model) -> None:
    """Raise SpecError for an option that would do nothing with this plan."""
    of_muon = [
        name
        for name in options_of_trainer()
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


@cache
def options_of_trainer() -> dict[str, tuple[Any, Option]]:
    """Field of `Trainer` -> (its type without None, its option), in their order; the type of one
    that may be given several times is `tuple`."""
    hints = get_type_hints(Trainer, include_extras=True)
    found = {}
    for field in fields(Trainer):
        hint, option = get_args(hints[field.name])
        found[field.name] = kind_of(hint), option
    return found


def kind_of(hint: Any) -> Any:
    """An option's type, without None; `tuple` for one that may be given several times."""
    kinds = [each for each in get_args(hint) if each is not type(None)]
    if tuple in (get_origin(hint), *map(get_origin, kinds)):
        return tuple
    return kinds[0]


_GROUP_SETTING = re.compile(r"(lr|weight_decay)=(.+)")


def _check_group(text: str) -> None:
    """As `trainer/groups.py` reads it; a test compares both."""
    pattern, _, rest = text.rpartition(":")
    said = [_GROUP_SETTING.fullmatch(part) for part in rest.split(",")]
    names = [match[1] for match in said if match]
    if pattern.strip() != pattern or not pattern or None in said or len(set(names)) < len(said):
        raise SpecError(
            f"param_group {text!r} must be PATTERN:SETTINGS with lr (times the learning rate) and "
            "weight_decay, each once, such as 'tok_embeddings*:lr=0.1,weight_decay=0'"
        )
    for match in said:
        assert match is not None
        try:
            value = float(match[2])
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise SpecError(
                f"param_group {text!r} says {match[2]!r} where a number of at least 0 must be: "
                "type one, as in lr=0.1"
            )


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def data_share(text: str) -> tuple[str, float | None]:
    """(path, weight) of one `--data PATH[=WEIGHT]`; a number behind the last `=` is a weight."""
    path, equals, number = text.rpartition("=")
    if path and equals and _WEIGHT.fullmatch(number):
        return path, float(number)
    return text, None


def _check(name: str, value: Any, kind: Any, option: Option) -> None:
    if kind is tuple:
        if not isinstance(value, str | tuple) or not all(isinstance(each, str) for each in value):
            raise SpecError(f"{name} must be a text or a tuple of these, not {value!r}")
        if name == "param_group":
            for each in _several(value):
                _check_group(each)
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
