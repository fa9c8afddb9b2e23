"""Program: what trains a plan, and what of a layout it can apply.

The trainer runs the reference decoder, and by `parallelize` a model of one's own or of Hugging
Face's. torchtitan, Megatron-LM and Accelerate are programs of their own: what they can say of a
plan is in `spec/programs/`, and `emit-launch --target` takes a plan for one as it is.

A model that is not the reference decoder is known to `parallelize` by its blocks only; what needs
to know more of it is refused there (trainer/user/model.py and its neighbours; a test holds the two
together).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.runtime import RuntimeName

ProgramName = Literal["reference", "own", "hf", "torchtitan", "megatron", "accelerate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a program can apply of a layout."""

    words: str
    """What to call it in a sentence."""
    knows_blocks: bool
    """It is built for the trainer: its blocks can be cut into stages, its attention recomputed
    alone, its tokens sent to experts, and its loss made in pieces."""
    has_tensor_plan: bool
    """It says of each matrix of a dense model how tensor parallelism splits it (a `tp_plan`)."""
    has_open_attention: bool
    """Its attention can be replaced by one that ranks share."""
    runtimes: tuple[RuntimeName, ...] = ("fsdp2",)
    """Runtimes that price what it does; the first by default. The reference decoder is of any."""
    is_target: bool = False
    """It is launched by `emit-launch --target` of its name."""


_PROGRAMS: dict[ProgramName, Program] = {
    "reference": Program(
        words="the reference decoder",
        knows_blocks=True,
        has_tensor_plan=True,
        has_open_attention=True,
    ),
    "own": Program(
        words="a model of your own",
        knows_blocks=False,
        has_tensor_plan=False,
        has_open_attention=False,
    ),
    "hf": Program(
        words="a Hugging Face model",
        knows_blocks=False,
        has_tensor_plan=True,
        has_open_attention=True,
    ),
    "torchtitan": Program(
        words="torchtitan",
        knows_blocks=True,
        has_tensor_plan=True,
        has_open_attention=True,
        is_target=True,
    ),
    "megatron": Program(
        words="Megatron-LM",
        knows_blocks=True,
        has_tensor_plan=True,
        has_open_attention=True,
        runtimes=("megatron", "megatron_lm"),
        is_target=True,
    ),
    "accelerate": Program(
        words="Accelerate",
        knows_blocks=True,
        has_tensor_plan=True,
        has_open_attention=True,
        runtimes=("fsdp2", "autocast"),
        is_target=True,
    ),
}


def program_named(name: ProgramName) -> Program:
    """What the program of that name can do."""
    return _PROGRAMS[name]
