"""Trainer: the reference training program as a job runs it, and each of its options, once.

From a field's name, type and `Option` follow the flag of every command that starts it
(`cli/options/job.py`), what it may be, and the word that the program reads. The program itself
imports nothing of ours: a test compares its own command line (`trainer/options.py`) with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from fsdpplan.emit.safe_text import require_no_tokens, require_passable
from fsdpplan.errors import SpecError
from fsdpplan.spec.values import require_choice, require_positive

DEFAULT_STEPS = 20
"""What the trainer takes where no steps are given; a test compares it with the trainer's own."""

AdamW = Literal["fused", "foreach", "loop"]
OnSpike = Literal["none", "skip", "rollback"]

DASHBOARDS = ("tensorboard", "wandb", "mlflow")
"""Options that need the Python package of the same name."""

_WINDOW = re.compile(r"0*[1-9][0-9]{0,8}:0*[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an option of the trainer means; stands in the `Annotated` type of its field.

    A whole number is at least `least`, another number above 0, or at least `least`.
    """

    help: str
    metavar: str | None = None
    """What stands for its value in the help."""
    example: str | None = None
    """A number to type where another was wrong."""
    least: float | None = None
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
    data: Annotated[
        str | None,
        Option(
            help="Token file, .txt or .jsonl file, or folder of these. Default: synthetic tokens.",
            metavar="PATH",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Option(help="tokenizer.json for text. Default: bytes.", metavar="PATH")
    ] = None
    pack: Annotated[
        bool | None,
        Option(
            help="Train the documents of a sequence apart. Memory stays that of whole sequences."
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
        float | None, Option(help="At its peak.", metavar="3e-4", example="3e-4")
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
    weight_decay: Annotated[
        float | None, Option(help="Of matrices.", metavar="0.1", example="0.1", least=0)
    ] = None
    clip_norm: Annotated[
        float | None, Option(help="Largest gradient norm.", metavar="1.0", example="1.0")
    ] = None
    adamw: Annotated[
        AdamW | None,
        Option(
            help="How AdamW steps: in one kernel, by lists of tensors (more memory), or one by one."
            " Default: fused.",
            metavar="fused|foreach|loop",
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
            if value is not None:
                _check(name, value, kind, option)
        for name in ("checkpoint_every", "checkpoint_keep", "checkpoint_async"):
            if getattr(self, name) is not None and self.checkpoint_dir is None:
                raise SpecError(f"{name} needs a place: give --checkpoint-dir too")
        if self.tokenizer is not None and self.data is None:
            raise SpecError("tokenizer needs text: give --data with .txt or .jsonl files too")
        self._check_windows()
        if self.on_spike == "rollback" and self.checkpoint_every is None:
            raise SpecError(
                "on_spike rollback needs where to go back to: give --checkpoint-every too"
            )
        require_no_tokens(self)
        for word in self.words():
            require_passable(word.partition("=")[0], word)

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
        if self.steps is not None and first > self.steps:
            raise SpecError(
                f"{name} {text} begins after the last step, {self.steps}: begin "
                "earlier, or train more --steps"
            )
        return first, steps

    def words(self) -> tuple[str, ...]:
        """The command line after the program."""
        return tuple(self._words())

    def _words(self) -> Iterator[str]:
        for name, (kind, option) in options_of_trainer().items():
            value, flag = getattr(self, name), name.replace("_", "-")
            if kind is bool:
                if value is not None and value != option.default:
                    yield f"--{flag}" if value else f"--no-{flag}"
            elif value is not None:
                yield f"--{flag}={value}"


@cache
def options_of_trainer() -> dict[str, tuple[Any, Option]]:
    """Field of `Trainer` -> (its type without None, its option), in their order."""
    hints = get_type_hints(Trainer, include_extras=True)
    found = {}
    for field in fields(Trainer):
        optional, option = get_args(hints[field.name])
        (kind,) = (each for each in get_args(optional) if each is not type(None))
        found[field.name] = kind, option
    return found


def _check(name: str, value: Any, kind: Any, option: Option) -> None:
    if kind is int:
        least = option.least or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{name} must be a whole number of at least {least:g}, not {value!r}")
    elif kind is float and option.least is None:
        require_positive(**{name: value})
    elif kind is float:
        if not option.least <= value < float("inf"):
            raise SpecError(f"{name} must be a number of at least {option.least:g}, not {value!r}")
    elif kind is not bool and kind is not str:
        require_choice(name, value, get_args(kind))
