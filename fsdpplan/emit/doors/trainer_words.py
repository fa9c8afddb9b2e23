"""What is asked of a training program that is not ours: steps, rate, checkpoints.

Which blocks each pipeline stage has, for programs that must be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.order import Order, differing
from fsdpplan.emit.trainer_program import (
    Trainer,
    decay_steps,
    peak_learning_rate,
    planned_steps,
    warmup_steps,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.trainer_options import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    FINAL_FRACTION,
    WEIGHT_DECAY,
    LrSchedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the weights are updated, with the reference trainer's numbers where none are given: other
    programs have defaults of their own, and a plan is checked with these."""

    steps: int
    learning_rate: float
    lr_schedule: LrSchedule
    min_lr: float
    warmup_steps: int
    decay_steps: int
    """Of `wsd`."""
    weight_decay: float
    clip_norm: float
    betas: tuple[float, float]
    eps: float

    @property
    def floor_fraction(self) -> float:
        """Where the rate ends, of its peak."""
        return self.min_lr / self.learning_rate


def recipe_of(order: Order, program: Trainer) -> Recipe:
    """What the options come to."""
    count = planned_steps(program, order.plan.training)
    rate = peak_learning_rate(program)
    first, second = BETAS
    return Recipe(
        steps=count,
        learning_rate=rate,
        lr_schedule=program.lr_schedule or "cosine",
        min_lr=_or(program.min_lr, FINAL_FRACTION * rate),
        warmup_steps=warmup_steps(program, count),
        decay_steps=decay_steps(program, count),
        weight_decay=_or(program.weight_decay, WEIGHT_DECAY),
        clip_norm=_or(program.clip_norm, CLIP_NORM),
        betas=(_or(program.adam_beta1, first), _or(program.adam_beta2, second)),
        eps=_or(program.adam_eps, EPSILON),
    )


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def own_program(order: Order, *, target: str, known: frozenset[str]) -> Trainer:
    """The options for a target that brings its own program. Raises SpecError for a script of the
    user's and for options of the reference trainer that the target has no word for."""
    program = order.job.program
    if isinstance(program, UserProgram):
        raise SpecError(
            f"--target {target} runs its own training program, not {program.script}: leave "
            "--script out, or use --target slurm"
        )
    asked = [name for name in differing(program, Trainer()) if name not in known]
    if asked:
        flags = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise SpecError(
            f"{flags} {'is' if len(asked) == 1 else 'are'} of the reference trainer, and --target "
            f"{target} has no word for {'it' if len(asked) == 1 else 'them'}: leave "
            f"{'it' if len(asked) == 1 else 'them'} out, or use --target slurm"
        )
    return program


def stage_ranges(layout: Layout) -> tuple[range, ...]:
    """Numbers of the blocks of each stage, first stage to last."""
    blocks = layout.stage_blocks
    assert blocks, "a plan that is read names the blocks of its stages"
    ends = list(accumulate(blocks))
    return tuple(range(end - size, end) for size, end in zip(blocks, ends, strict=True))
