"""What is asked of a training program that is not ours: steps, rate, checkpoints.

Which blocks each pipeline stage has, for programs that must be told.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil

from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.order import Order, differing
from fsdpplan.emit.trainer_program import DEFAULT_STEPS, Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_CLIP_NORM = 1.0
DEFAULT_WEIGHT_DECAY = 0.1
DEFAULT_SEED = 0
"""Those of the reference trainer, which a plan is checked with."""


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


def steps(order: Order, program: Trainer) -> int:
    """Optimizer steps: those asked for, those of the plan's tokens, or the reference trainer's."""
    if program.steps is not None:
        return program.steps
    training = order.plan.training
    if training.tokens is None:
        return DEFAULT_STEPS
    return ceil(training.tokens / training.tokens_per_step)


def stage_ranges(layout: Layout) -> tuple[range, ...]:
    """Numbers of the blocks of each stage, first stage to last."""
    blocks = layout.stage_blocks
    assert blocks, "a plan that is read names the blocks of its stages"
    ends = list(accumulate(blocks))
    return tuple(range(end - size, end) for size, end in zip(blocks, ends, strict=True))
