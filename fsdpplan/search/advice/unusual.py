"""Unusual: settings that most jobs leave alone, each with what it asks of whoever runs it.

This is the one list. A setting that is not here is free: micro-batch, keeping parameters after
forward, whole recomputation and synchronising once a step are everyday choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdpplan.spec.layout import DDP_BUCKET_BYTES, SPLIT_BACKWARD_SCHEDULES, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusualSetting:
    """One unusual setting."""

    words: str
    why: str
    """What it asks for that the usual does not."""
    is_in: Callable[[Layout], bool]


UNUSUAL = (
    UnusualSetting(
        words="async TP",
        why="needs torch.compile and symmetric memory, which not every system has",
        is_in=lambda layout: layout.async_tp,
    ),
    UnusualSetting(
        words="experts over tp",
        why="experts have a mesh of their own, which checkpoints and few programs know",
        is_in=lambda layout: layout.experts_over_tp,
    ),
    UnusualSetting(
        words="integer reshard",
        why="keeps a second sharding of the parameters, in groups that only this uses",
        is_in=lambda layout: isinstance(layout.reshard_after_forward, int),
    ),
    UnusualSetting(
        words="recomputation by operation",
        why="which operations it saves is a list that follows the versions of torch",
        is_in=lambda layout: layout.activation_checkpointing == "op",
    ),
    UnusualSetting(
        words="some blocks recomputed",
        why="a number to find again for every other model, batch or device",
        is_in=lambda layout: layout.checkpoint_blocks != "all",
    ),
    UnusualSetting(
        words="pieces of the loss",
        why="the loss makes gradients itself, so that a loss of one's own must be rewritten",
        is_in=lambda layout: layout.loss_chunks > 1,
    ),
    UnusualSetting(
        words="gradients reduced in two stages",
        why="reduce_scatter_only keeps sums on each copy that nothing but the last pass may read",
        is_in=lambda layout: layout.gradient_sync == "reduce_scatter_only",
    ),
    UnusualSetting(
        words="offload",
        why="steps wait for the host's memory and processors, which differ from node to node",
        is_in=lambda layout: layout.offload != "none",
    ),
    UnusualSetting(
        words="several stages a rank",
        why="checkpoints and models must be cut into parts that are not neighbours",
        is_in=lambda layout: layout.virtual_stages > 1,
    ),
    UnusualSetting(
        words="a rare schedule",
        why="split backward passes and looped schedules run in few programs, mostly uncompiled",
        is_in=lambda layout: layout.schedule in {*SPLIT_BACKWARD_SCHEDULES, "looped_bfs"},
    ),
    UnusualSetting(
        words="stages cut by hand",
        why="who changes the model has to cut again",
        is_in=lambda layout: bool(layout.stage_blocks),
    ),
    UnusualSetting(
        words="several blocks a unit",
        why="FSDP is wrapped otherwise than every example does it",
        is_in=lambda layout: layout.wrap_blocks > 1,
    ),
    UnusualSetting(
        words="another bucket of DDP",
        why="a number to tune again on other machines",
        is_in=lambda layout: layout.ddp_bucket_bytes != DDP_BUCKET_BYTES,
    ),
)


def unusual(layout: Layout) -> tuple[str, ...]:
    """The unusual settings of `layout`, in words."""
    return tuple(setting.words for setting in UNUSUAL if setting.is_in(layout))
