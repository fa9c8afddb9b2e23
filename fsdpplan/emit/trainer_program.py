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
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from fsdpplan.emit.safe_text import require_no_tokens, require_passable
from fsdpplan.errors import SpecError
from fsdpplan.spec.values import require_choice, require_positive

DEFAULT_STEPS = 20
"""What the trainer takes where no steps are given; a test compares it with the trainer's own."""

AdamW = Literal["fused", "foreach", "loop"]

_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
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
        Option(help="Steps between evaluations.", metavar="N", example="500", least=1),
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
        if self.sft and (not self.sources or self.tokenizer is None):
            raise SpecError(
                "sft needs chats and what turns them into tokens: give --data chats.jsonl and "
                "--tokenizer too"
            )
        if self.chat_template is not None and not self.sft:
            raise SpecError("chat_template is for chats: give --sft too")
        for name in ("eval_every", "eval_tokens"):
            if getattr(self, name) is not None and self.eval_data is None:
                raise SpecError(f"{name} needs data to judge by: give --eval-data too")
        if self.tokenizer is not None and not self.sources:
            raise SpecError("tokenizer needs text: give --data with .txt or .jsonl files too")
        self._check_data()
        self._check_profile()
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

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if not _WINDOW.fullmatch(self.profile):
            raise SpecError(
                f"profile {self.profile!r} must be START:STEPS, such as 10:3 for steps 10 to 12"
            )
        if self.steps is not None and int(self.profile.partition(":")[0]) > self.steps:
            raise SpecError(
                f"profile {self.profile} begins after the last step, {self.steps}: begin "
                "earlier, or train more --steps"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the tokens come from, each `PATH` or `PATH=WEIGHT`; empty: they are made up."""
        return _several(self.data)

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


@cache
def options_of_trainer() -> dict[str, tuple[Any, Option]]:
    """Field of `Trainer` -> (its type without None, its option), in their order; the type of one
    that may be given several times is `tuple`."""
    hints = get_type_hints(Trainer, include_extras=True)
    found = {}
    for field in fields(Trainer):
        optional, option = get_args(hints[field.name])
        kinds = [each for each in get_args(optional) if each is not type(None)]
        several = any(get_origin(kind) is tuple for kind in kinds)
        found[field.name] = (tuple if several else kinds[0]), option
    return found


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
    elif kind is not bool and kind is not str:
        require_choice(name, value, get_args(kind))
