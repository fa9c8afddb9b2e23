"""Command line of the trainer."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import PLAN_VARIABLE

PREFLIGHT_SECONDS = 30.0
"""NCCL connects thousands of ranks in less, and people wait for no more."""

GC_EVERY = 50
"""Steps; as often as torchtitan does."""

NUMBERS_VARIABLE = "FSDPPLAN_NUMBERS"
"""Environment variable that, where it is 0, leaves the tiny step out, in `parallelize`, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    plan: str | None
    steps: int
    data: Path | None
    tokenizer: Path | None
    pack: bool
    init_from: Path | None
    """Folder of a published model to begin with."""
    export_hf: Path | None
    """Folder for the trained model, as published ones are."""
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    adamw: str
    seed: int
    checkpoint_dir: Path | None
    checkpoint_every: int
    checkpoint_keep: int
    checkpoint_async: bool
    resume: str
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
    """Shared folder for what is found."""
    rehearse: tuple[int, ...]
    """Ranks to rehearse instead of training."""
    report: Path | None
    """Where the rehearsal's report goes."""
    build: str | None
    """`FILE.py:FUNCTION` that makes the model to rehearse."""


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


def number(*, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """An argparse type: a number within bounds; never NaN."""

    def parse(text: str) -> float:
        value = float(text)
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
    add("--steps", type=whole(1), default=20, help="optimizer steps in all, resumed ones included")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="token file, .txt or .jsonl file, or folder of these; otherwise synthetic tokens",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json for text; otherwise bytes")
    add("--pack", action="store_true", help="train the documents of a sequence apart")
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
    add("--learning-rate", type=number(above=0), default=3e-4, help="at its peak")
    add("--warmup-steps", type=whole(0), help="steps of linear warm-up (default: a tenth, <= 2000)")
    add("--weight-decay", type=number(least=0), default=0.1, help="of matrices")
    add("--clip-norm", type=number(above=0), default=1.0, help="norm of all gradients; inf: none")
    add(
        "--adamw",
        choices=("fused", "foreach", "loop"),
        default="fused",
        help="fused: one kernel; foreach: lists of tensors, more memory; loop: one at a time",
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
        help="shared folder for what --preflight finds: preflight.json, bad-nodes",
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
    if values["tokenizer"] is not None and values["data"] is None:
        parser.error("--tokenizer needs --data with text")
    for name in ("report", "build"):
        if values[name] is not None and not values["rehearse"]:
            parser.error(f"--{name} needs --rehearse")
    for name in ("profile", "memory_snapshot"):
        if values[name] is not None and values[name][0] > values["steps"]:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} begins after the last step, {values['steps']}")
    if values["on_spike"] == "rollback" and not values["checkpoint_every"]:
        parser.error("--on-spike rollback needs --checkpoint-every, to have where to go back to")
    if windows_meet(values["profile"], values["memory_snapshot"]):
        parser.error("--profile and --memory-snapshot need steps of their own: torch records one")
    if values["checkpoint_dir"] is None:
        if values["checkpoint_every"]:
            parser.error("--checkpoint-every needs --checkpoint-dir")
        if values["resume"] == "required":
            parser.error("--resume required needs --checkpoint-dir")
    if values["warmup_steps"] is None:
        values["warmup_steps"] = min(2000, values["steps"] // 10)
    return Options(**values)
