"""Words for numbers that are wrong: by which factor, over which axis, of which parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from ..config import PlanConfig
from ..parallel.mesh import place
from .look import Seen

CLOSE = 1e-2
"""By which a ratio may differ from the number that it is taken for."""
MISSING = 1e-6
"""Of a gradient: rounding, where there is none."""
ROUGH_FRACTION = 0.25
"""Of a gradient in 16 bits, or of a norm: less than any axis changes it by."""
MOST_NAMES = 3


def axis_sizes(plan: PlanConfig) -> dict[str, int]:
    """Axes of more than one rank, as predictions name them."""
    layout = plan.layout
    sharded = "dp_shard" if layout.cp == 1 else "dp_shard*cp"
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        sharded: layout.shard_ranks,
        "ep": layout.ep,
        "tp": layout.tp,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def axes_words(plan: PlanConfig) -> str:
    """`dp_shard 4 x tp 2`."""
    return " x ".join(f"{name} {size}" for name, size in axis_sizes(plan).items())


def names_words(names: Sequence[str]) -> str:
    """`layers.0.attention.wq.weight and 3 more`."""
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - MOST_NAMES} more" if len(each) > MOST_NAMES else ""
    return ", ".join(each[:MOST_NAMES]) + more


def gradient_words(wrong: Sequence[Seen]) -> str:
    most = max(wrong, key=lambda each: len(each.gradients))
    if len(most.gradients) == most.compared:
        return "of all parameters"
    return f"of {len(most.gradients)} of {most.compared} parameters: {names_words(most.gradients)}"


def times_words(ratio: float) -> str:
    """`4 times too large`."""
    if abs(ratio - 1) <= CLOSE:
        return ""
    if abs(ratio) > 1:
        return f"{_number(ratio)} times too large"
    return f"{_number(1 / ratio)} times too small" if ratio else "nothing"


def _number(value: float) -> str:
    near = round(value)
    return str(near) if abs(value - near) <= CLOSE * abs(value) else f"{value:.3g}"


def ratio_words(ratio: float, wrong: Sequence[Seen], plan: PlanConfig) -> str:
    """What makes all gradients of some parameters that many times one process's."""
    names = [name for each in wrong for name in each.gradients]
    subject = "the gradients"
    is_routed = names and all(".experts." in name for name in names)
    if is_routed:
        subject = "the gradients of the routed experts"
    elif wrong:
        subject = f"the gradients {gradient_words(wrong)}"
    if abs(ratio) <= MISSING:
        return f"{subject} are missing{_stage_words(wrong, plan)}"
    software = f"torch {torch.__version__}, {_backend()}"
    axes = " or ".join(_axes_of_size(abs(ratio), plan))
    if ratio > 1 and axes:
        return (
            f"{subject} are {times_words(ratio)}: sums where they should be means, over {axes} "
            f"({software})"
        )
    inverse = " or ".join(_axes_of_size(1 / abs(ratio), plan))
    if 0 < ratio < 1 and inverse:
        return f"{subject} are {times_words(ratio)}: divided twice, over {inverse} ({software})"
    if abs(ratio - 2) <= CLOSE:
        return f"{subject} are twice too large: something is added or scaled twice ({software})"
    return f"{subject} are {times_words(ratio) or f'{ratio:.4g} times one process’s'} ({software})"


def _stage_words(wrong: Sequence[Seen], plan: PlanConfig) -> str:
    """Which pipeline stage it is, where it is one of several."""
    stages = {place(plan.layout, each.rank).pp for each in wrong}
    if plan.layout.pp == 1 or len(stages) != 1:
        return ""
    return f": those of pipeline rank {min(stages)} of {plan.layout.pp}"


def _axes_of_size(size: float, plan: PlanConfig) -> list[str]:
    """Axes over which gradients are averaged, of so many ranks; micro-batches, too."""
    layout = plan.layout
    sizes = {name: n for name, n in axis_sizes(plan).items() if name != "pp"}
    data = [name for name in sizes if name.startswith("dp_")]
    of = {name: sizes[name] for name in data}
    if len(data) > 1:
        of[" x ".join(data)] = prod(of.values())
    if layout.cp > 1 and layout.dp_shard > 1:
        of |= {"dp_shard": layout.dp_shard, "cp": layout.cp}
    of |= {name: sizes[name] for name in ("ep", "tp") if name in sizes}
    words = [f"{name} ({n} ranks)" for name, n in of.items() if abs(size / n - 1) <= CLOSE]
    batches = layout.num_microbatches
    if batches > 1 and abs(size / batches - 1) <= CLOSE:
        words.append(f"the {batches} micro-batches")
    return words


def nearest_ratio(ratio: float, plan: PlanConfig) -> float:
    """The number of ranks, or its inverse, that a blurred ratio is close to; itself if none is."""
    sizes = {*axis_sizes(plan).values(), plan.layout.num_microbatches, plan.layout.data_parallel}
    choices = [0.0, *(float(n) for n in sizes), *(1.0 / n for n in sizes)]
    best = min(choices, key=lambda choice: abs(choice - ratio))
    return best if abs(best - ratio) <= ROUGH_FRACTION * max(best, 0.2) else ratio


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_initialized() else "no process group"
