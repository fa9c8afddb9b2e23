"""Features: what of a job decides how far its step time is like another's."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import exp, log

from fsdpplan.cost.band import step_shares
from fsdpplan.cost.estimate import slower_host_seconds
from fsdpplan.cost.schedule.stages import layout_stage_blocks
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import TimeBreakdown
from fsdpplan.spec.training import Training

KINDS = ("matmul", "attention", "element_wise", "launch", "inside", "across", "bubble")
"""Parts of a step, as `step_shares` names them."""

PLACES = ("gpus", "degrees", "batch", "model", "policy")
"""Groups of coordinates; each has a reach of its own."""

HOST_LOGS = tuple(-1.2 + 0.2 * place for place in range(18))
"""Logs of how many times as long as predicted a program's host may take to start its kernels: from
0.3 to 9, a fifth apart."""

_RECOMPUTED = {"none": 0.0, "attention": 0.5, "op": 0.7, "full": 1.5}
_SHARDED = {"ddp": 0.0, "zero1": 0.5, "zero2": 1.0, "fsdp": 1.5}
_FP8_SCALES = {"tensorwise": 0.0, "delayed": 0.0, "rowwise": 4.0}
"""Coordinates of policies: how much work and traffic they add, roughly; the reach scales them. A
scale for every row of a matrix is another kernel, which nothing near tells of; those of a whole
tensor are one."""
_EXPERTS = 1.5
"""How far a mixture of experts is from a dense model, in the coordinates of a model's size."""

_VARIANT = re.compile(r"_(20\d\d|zero1|wrapped|others)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What runs have in common that a cost model cannot know."""

    software: str
    """Which program trains, by its framework's name."""
    runtime: str
    """The family of its runtime: that of 2024 and that of today are one."""
    precision: str
    device: str

    def is_program_of(self, other: Stack) -> bool:
        """Whether the same software trains, whatever the device and number format."""
        return (self.software, self.runtime) == (other.software, other.runtime)

    @classmethod
    def of(cls, *, software: str, training: Training, device: str) -> Stack:
        """That of a training."""
        return cls(
            software=software,
            runtime=runtime_family(training.runtime),
            precision=training.precision,
            device=device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """One job as the learner sees it."""

    stack: Stack
    seconds: float
    """The step by the cost model alone."""
    shares: tuple[float, ...]
    """Of the step, by `KINDS`: a pass is a launch by the chance that it waits for its host."""
    places: tuple[tuple[float, ...], ...]
    """Coordinates, by `PLACES`; a difference of 1 is a factor of e, or one policy."""
    delays: tuple[float, ...]
    """Log of how much longer the step takes than predicted where its host does, by `HOST_LOGS`; to
    a thousandth, so that factors which change nothing are one."""
    num_microbatches: int
    job: int
    """Equal for runs of one job: the hash of all that makes it one, since it is compared often."""


def runtime_family(runtime: str) -> str:
    """`fsdp2` of `fsdp2_2024`."""
    return _VARIANT.sub("", runtime)


def features_of(
    *,
    model: Model,
    training: Training,
    layout: Layout,
    gpus: int,
    time: TimeBreakdown,
    stack: Stack,
) -> Features:
    """Those of a job whose step takes `time` by the cost model."""
    shares = _shares(time)
    degrees = (*map(log, (layout.tp, layout.pp, layout.cp, layout.ep)), _SHARDED[layout.sharding])
    batch = (
        log(layout.micro_batch * training.seq_len),
        log(layout.num_microbatches),
        log(training.seq_len),
    )
    experts = _EXPERTS if model.experts else 0.0
    size = (1.5 * log(model.hidden), log(model.layers), experts)
    scales = _FP8_SCALES[training.fp8_recipe] if training.precision == "fp8" else 0.0
    policy = (
        _RECOMPUTED[layout.activation_checkpointing],
        float(layout.compile),
        float(layout.async_tp),
        scales,
        float(training.packed),  # how long documents are is said roughly, if at all
    )
    return Features(
        stack=stack,
        seconds=time.total_seconds,
        shares=tuple(shares[kind] for kind in KINDS),
        places=((log(gpus),), degrees, batch, size, policy),
        delays=delays_of(time),
        num_microbatches=layout.num_microbatches,
        job=hash((stack, model, numbers_of(training), gpus, _bare(model, layout))),
    )


def numbers_of(training: Training) -> Hashable:
    """What of a training makes its step another: not for how long it runs, nor what it must leave
    free, nor the release of torch, which is of the stack."""
    return replace(training, tokens=None, torch=None, headroom_fraction=0.0, fits_fraction=0.0)


def delays_of(time: TimeBreakdown) -> tuple[float, ...]:
    """`Features.delays` of a step."""
    steps = (slower_host_seconds(time, exp(one)) for one in HOST_LOGS)
    return tuple(round(log(step / time.total_seconds), 3) for step in steps)


def _shares(time: TimeBreakdown) -> dict[str, float]:
    """`step_shares`, where passes near the point at which their host is too slow are launches in
    part: a program whose host takes twice as long makes them whole ones.

    What the kernels of all passes have beside that is split among them as it was.
    """
    shares = step_shares(time)
    kernels = ("matmul", "attention", "element_wise")
    launch = time.launch_chance_seconds / time.total_seconds
    before = sum(shares[kind] for kind in kernels)
    left = max(0.0, before + shares["launch"] - launch)
    for kind in kernels:
        shares[kind] *= left / before if before else 0.0
    return shares | {"launch": launch}


def _bare(model: Model, layout: Layout) -> Hashable:
    """The layout, the same whether or not its stages' blocks are named."""
    if layout.pp == 1:
        return layout
    blocks = tuple(layout_stage_blocks(model=model, layout=layout))
    return replace(layout, stage_blocks=()), blocks
