"""The options of the reference trainer: each once, with its type, default, bounds and help.

The flags of `emit-launch` and `run` are made of them (`cli/options/expand.py`), and so is the
trainer's own command line (`trainer/options.py`). This module needs the standard library only: a
job folder has it in the copy of the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

STEPS = 20
"""Steps of a job of which nobody says how far it trains."""

LEARNING_RATE = 3e-4
FINE_TUNING_LEARNING_RATE = 2e-5
"""Of runs that begin with a published model, or learn chats. Source: alignment-handbook
recipes/zephyr-7b-beta/sft/config_full.yaml, torchtune recipes/configs/llama3_1/8B_full.yaml and
axolotl examples/llama-3/fft-8b.yaml have it; the first and the last with a cosine, too."""

ADAPTER_LEARNING_RATE = 2e-4
"""Of adapters. Source: axolotl examples/llama-3/qlora.yml."""

FINAL_FRACTION = 0.1
"""Share of the peak at which a schedule ends that is not told its floor."""

WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
EPSILON = 1e-8
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
SEED = 0

BALANCE_SPEED = 0.001
"""What a step adds to a bias, or takes (DeepSeek-V3, section 4.2), unless it is told otherwise."""

AUXILIARY_COEFFICIENT = 0.001
"""Where no config says another: `router_aux_loss_coef` of MixtralConfig, Qwen2MoeConfig and
Qwen3MoeConfig in transformers 5."""

GC_EVERY = 50
"""Steps; as often as torchtitan does."""

PREFLIGHT_SECONDS = 30.0
"""NCCL connects thousands of ranks in less, and people wait for no more."""

NUMBERS_VARIABLE = "FSDPPLAN_NUMBERS"
"""Environment variable that, where it is 0, leaves the tiny step out, in `parallelize`, too."""

MOST_WARMUP_STEPS = 2000

_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
_WINDOW = re.compile(r"0*[1-9][0-9]{0,8}:0*[1-9][0-9]{0,8}")

AdamW = Literal["fused", "foreach", "loop"]
LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
OnSpike = Literal["none", "skip", "rollback"]
Resume = Literal["auto", "required", "never"]


def default_learning_rate(*, fine_tunes: bool, has_adapters: bool = False) -> float:
    """The peak where none is told."""
    if has_adapters:
        return ADAPTER_LEARNING_RATE
    return FINE_TUNING_LEARNING_RATE if fine_tunes else LEARNING_RATE


def default_warmup_steps(steps: int) -> int:
    """Steps of warm-up where none are told: a tenth, at most `MOST_WARMUP_STEPS`."""
    return min(MOST_WARMUP_STEPS, steps // 10)


def default_decay_steps(steps: int) -> int:
    """Steps of decay of `wsd` where none are told: a tenth (MiniCPM, arXiv 2404.06395: 10 % are
    enough)."""
    return max(1, steps // 10)


def data_share(text: str) -> tuple[str, str | None]:
    """(path, weight) of one `--data PATH[=WEIGHT]`. A number behind the last `=` is a weight, so a
    path that ends like that needs one: `runs/lr=0.3=1`."""
    path, equals, number = text.rpartition("=")
    return (path, number) if path and equals and _WEIGHT.fullmatch(number) else (text, None)


def step_window(text: str) -> tuple[int, int]:
    """(first step, number of steps) of START:STEPS. Raises ValueError."""
    if not _WINDOW.fullmatch(text):
        raise ValueError(f"{text!r} must be START:STEPS, such as 10:3 for steps 10 to 12")
    first, steps = map(int, text.split(":"))
    return first, steps


def group_settings(text: str) -> tuple[str, dict[str, float]]:
    """(pattern, settings) of one `--param-group PATTERN:lr=X,weight_decay=Y`. Raises ValueError."""
    pattern, colon, rest = text.rpartition(":")
    said = [part.partition("=") for part in rest.split(",")]
    if not (colon and pattern.strip() == pattern != ""):
        raise ValueError(f"{text!r} must be PATTERN:SETTINGS, such as 'norm*:weight_decay=0'")
    if len({name for name, _, _ in said}) < len(said):
        raise ValueError(f"{text!r} says a setting twice: leave one out")
    unknown = next((name for name, _, _ in said if name not in ("lr", "weight_decay")), None)
    if unknown is not None:
        raise ValueError(
            f"{text!r} says {unknown!r}: a group has lr (times the learning rate) and "
            "weight_decay; lr=0 keeps parameters as they are"
        )
    return pattern, {name: _setting(value, text) for name, _, value in said}


def _setting(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(
            f"{text!r} says {value!r} where a number of at least 0 must be: type one, as in lr=0.1"
        )
    return number


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
    default: bool | float | str | None = None
    """What the trainer takes where nothing is said; None: nothing, or what the help says."""
    needs: str = ""
    """Another option without which this one does nothing."""
    is_path: bool = False
    takes_zero: bool = False
    """The trainer's own command line takes 0, too, which is the end alone: a job says that by
    leaving the option out."""

    @property
    def text(self) -> str:
        """The help with the default."""
        if self.default is None or self.default is False or "Default" in self.help:
            return self.help
        default = "on" if self.default is True else f"{self.default}".removesuffix(".0")
        return f"{self.help} Default: {default.replace('e-0', 'e-')}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """The options that a job passes to the trainer. None leaves the choice to the trainer."""

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
            needs="data",
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
        str | None,
        Option(
            help="tokenizer.json for text. Default: bytes.",
            metavar="PATH",
            is_path=True,
            needs="data",
        ),
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
            help="Jinja template for --sft. Default: the one beside --tokenizer.",
            metavar="FILE",
            is_path=True,
            needs="sft",
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
            needs="data",
        ),
    ] = None
    prefetch: Annotated[
        int | None,
        Option(
            help="Steps whose data is made ahead. Default: 2, or more for many workers.",
            metavar="STEPS",
            example="4",
            least=1,
            needs="data",
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
            is_path=True,
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        Option(
            help="Steps between evaluations. Default: only at the end; with --epochs behind each.",
            metavar="N",
            example="500",
            least=1,
            takes_zero=True,
            needs="eval_data",
        ),
    ] = None
    eval_tokens: Annotated[
        int | None,
        Option(
            help="Most tokens of --eval-data to take, at least a sequence. Default: all.",
            metavar="N",
            example="1000000",
            least=1,
            needs="eval_data",
        ),
    ] = None
    init_from: Annotated[
        str | None,
        Option(
            help="Begin with the weights of a Hugging Face model: a folder with config.json and "
            "*.safetensors.",
            metavar="DIR",
            is_path=True,
        ),
    ] = None
    export_hf: Annotated[
        str | None,
        Option(
            help="Write the trained model there in the end, for transformers' from_pretrained.",
            metavar="DIR",
            is_path=True,
        ),
    ] = None
    export_peft: Annotated[
        str | None,
        Option(
            help="Write the trained adapters there in the end, as PEFT and vLLM load them.",
            metavar="DIR",
            is_path=True,
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(
            help="Learning rate at its peak. Default 3e-4; with --init-from or --sft 2e-5, of "
            "adapters 2e-4.",
            metavar="3e-4",
            example="3e-4",
        ),
    ] = None
    lr_schedule: Annotated[
        LrSchedule | None,
        Option(
            help="After the warm-up: a cosine, linear, constant, or constant until --decay-steps "
            "before the end (wsd).",
            metavar="cosine|linear|wsd|constant",
            default="cosine",
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
        float | None,
        Option(
            help="Weight decay of matrices.",
            metavar="0.1",
            example="0.1",
            least=0,
            default=WEIGHT_DECAY,
        ),
    ] = None
    clip_norm: Annotated[
        float | None,
        Option(
            help="Largest norm of all gradients.",
            metavar="1.0",
            example="1.0",
            default=CLIP_NORM,
        ),
    ] = None
    adam_beta1: Annotated[
        float | None,
        Option(
            help="AdamW beta 1: decay of the mean of the gradient.",
            metavar="0.9",
            example="0.9",
            least=0,
            below=1,
            default=BETAS[0],
        ),
    ] = None
    adam_beta2: Annotated[
        float | None,
        Option(
            help="AdamW beta 2: decay of the mean of its square.",
            metavar="0.95",
            example="0.95",
            least=0,
            below=1,
            default=BETAS[1],
        ),
    ] = None
    adam_eps: Annotated[
        float | None,
        Option(
            help="AdamW epsilon, added to the denominator.",
            metavar="1e-8",
            example="1e-8",
            default=EPSILON,
        ),
    ] = None
    adamw: Annotated[
        AdamW | None,
        Option(
            help="How AdamW steps: in one kernel, by lists of tensors (more memory), or one by "
            "one.",
            metavar="fused|foreach|loop",
            default="fused",
        ),
    ] = None
    muon_learning_rate: Annotated[
        float | None,
        Option(
            help="Learning rate of the matrices that Muon updates, at its peak. Default: "
            "--learning-rate.",
            metavar="3e-4",
            example="3e-4",
        ),
    ] = None
    muon_weight_decay: Annotated[
        float | None,
        Option(
            help="Weight decay of these matrices. Default: --weight-decay.",
            metavar="0.1",
            example="0.1",
            least=0,
        ),
    ] = None
    muon_momentum: Annotated[
        float | None,
        Option(
            help="Momentum of the Muon update.",
            metavar="0.95",
            example="0.95",
            least=0,
            below=1,
            default=MUON_MOMENTUM,
        ),
    ] = None
    muon_nesterov: Annotated[
        bool | None, Option(help="Nesterov momentum in the Muon update.", default=True)
    ] = None
    muon_ns_steps: Annotated[
        int | None,
        Option(
            help="Newton-Schulz steps that orthogonalise a Muon update; 5 are priced.",
            metavar="N",
            example="5",
            least=1,
            default=NEWTON_SCHULZ_STEPS,
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
            help="Coefficient of the auxiliary loss that balances experts; 0: none. Default: where "
            "their scores are a softmax (Mixtral, Qwen) and no bias balances them, what the "
            "model's config says, or 0.001; else 0.",
            metavar="0.001",
            example="0.001",
            least=0,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            help="Seed of weights and data.", metavar="N", example="1234", least=0, default=SEED
        ),
    ] = None
    checkpoint_dir: Annotated[
        str | None, Option(help="Where to save and resume from.", metavar="PATH", is_path=True)
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Option(
            help="Steps between saves.",
            metavar="N",
            example="500",
            least=1,
            takes_zero=True,
            needs="checkpoint_dir",
        ),
    ] = None
    checkpoint_keep: Annotated[
        int | None,
        Option(
            help="Newest saves to keep.",
            metavar="N",
            example="2",
            least=1,
            default=2,
            needs="checkpoint_dir",
        ),
    ] = None
    checkpoint_async: Annotated[
        bool | None,
        Option(
            help="Save while training goes on, from a copy in CPU memory.",
            default=True,
            needs="checkpoint_dir",
        ),
    ] = None
    allow_changes: Annotated[
        bool | None,
        Option(
            help="Resume even if changed options would make the learning rate jump. Default: "
            "refuse.",
            needs="checkpoint_dir",
        ),
    ] = None
    log_every: Annotated[
        int | None,
        Option(
            help="Steps between lines; between them no number is read off the device.",
            metavar="N",
            example="10",
            least=1,
            default=1,
        ),
    ] = None
    gc_every: Annotated[
        int | None,
        Option(
            help="Steps between collections of Python's garbage, on all ranks at once; 0: whenever "
            "Python would.",
            metavar="N",
            example="50",
            least=0,
            default=GC_EVERY,
        ),
    ] = None
    on_spike: Annotated[
        OnSpike | None,
        Option(
            help="Where the loss or the gradient norm is far off what it was: leave that update "
            "out, or go back to the last checkpoint and on with other data.",
            metavar="none|skip|rollback",
            default="none",
        ),
    ] = None
    tensorboard: Annotated[
        str | None, Option(help="Events for TensorBoard.", metavar="DIR", is_path=True)
    ] = None
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
        str | None,
        Option(help="Newest step as text, for node_exporter.", metavar="FILE.prom", is_path=True),
    ] = None
    profile: Annotated[
        str | None, Option(help="Steps to profile on rank 0.", metavar="START:STEPS")
    ] = None
    profile_stacks: Annotated[
        bool | None,
        Option(
            help="With the lines of Python that asked for each operator, in the trace of "
            "--profile.",
            needs="profile",
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
            help="Step a tiny model first, and end where it does not as one process "
            "(FSDPPLAN_NUMBERS=0: not).",
            default=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of the trainer that no job is asked for: a launch adds them, a rehearsal has
    them, or somebody who starts the trainer types them."""

    plan: Annotated[
        str | None,
        Option(help="Plan to run. Default: the JSON in $FSDPPLAN_PLAN.", metavar="FILE"),
    ] = None
    resume: Annotated[
        Resume | None,
        Option(
            help="auto: if --checkpoint-dir has a checkpoint (an older one where the newest is "
            "damaged); never: refuse to start if it has one.",
            metavar="auto|required|never",
            default="auto",
        ),
    ] = None
    metrics: Annotated[
        str | None, Option(help="One JSON line a logged step.", metavar="FILE", is_path=True)
    ] = None
    profile_ranks: Annotated[
        str | None,
        Option(
            help="Ranks that --profile and --memory-snapshot are about (0,7).",
            metavar="RANKS",
            default="0",
        ),
    ] = None
    preflight: Annotated[
        bool | None, Option(help="First try nodes, ranks and links, and name what is bad.")
    ] = None
    preflight_seconds: Annotated[
        float | None,
        Option(
            help="Most that ranks wait for each other in --preflight and --numbers.",
            metavar="N",
            default=PREFLIGHT_SECONDS,
        ),
    ] = None
    run_folder: Annotated[
        str | None,
        Option(
            help="Shared folder for what --preflight finds (preflight.json, bad-nodes), and for "
            "what was saved (saves.jsonl): without the one, no run begins anew that has saved.",
            metavar="DIR",
            is_path=True,
        ),
    ] = None
    rehearse: Annotated[
        str | None,
        Option(
            help="Go through a step as these ranks (0,7,1023), without the others and without "
            "memory, in place of training.",
            metavar="RANKS",
        ),
    ] = None
    build: Annotated[
        str | None,
        Option(
            help="Rehearse the model that this function makes, with an example of its inputs.",
            metavar="FILE.py:FUNCTION",
            needs="rehearse",
        ),
    ] = None
    report: Annotated[
        str | None,
        Option(
            help="Where --rehearse writes what they did.",
            metavar="FILE",
            is_path=True,
            needs="rehearse",
        ),
    ] = None


@cache
def options_of(declared: type) -> dict[str, tuple[Any, Option]]:
    """Field of `declared` -> (its type without None, its option), in their order; the type of one
    that may be given several times is `tuple`."""
    hints = get_type_hints(declared, include_extras=True)
    found = {}
    for field in fields(declared):
        hint, option = get_args(hints[field.name])
        found[field.name] = kind_of(hint), option
    return found


def unmet_needs(declared: type, given: Collection[str]) -> str:
    """That an option is given without the one that it needs, and what to do; empty where none
    is."""
    for name, (_, option) in options_of(declared).items():
        if option.needs and name in given and option.needs not in given:
            flag, other = name.replace("_", "-"), option.needs.replace("_", "-")
            return f"--{flag} needs --{other}: give --{other} too, or leave it out"
    return ""


def kind_of(hint: Any) -> Any:
    """An option's type, without None; `tuple` for one that may be given several times."""
    kinds = [each for each in get_args(hint) if each is not type(None)]
    if tuple in (get_origin(hint), *map(get_origin, kinds)):
        return tuple
    return kinds[0]
