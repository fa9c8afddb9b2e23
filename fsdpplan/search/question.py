"""Question: what is asked of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.search.learned import Learner
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.program import vocabulary_of
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.programs.words import Vocabulary
from fsdpplan.spec.training import Training

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "op", "full")
"""In the order of growing recomputation and shrinking memory."""


def _said(vocabulary: Vocabulary) -> tuple[ActivationCheckpointing, ...]:
    """What a program of others can recompute, growing."""
    said = vocabulary.words["activation_checkpointing"].values
    return tuple(mode for mode in get_args(ActivationCheckpointing) if said is None or mode in said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: the inputs of the search."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins
    learner: Learner | None = None
    """What measured runs say; None: nothing."""
    least_factor: float = 1.0
    """Least step time over the cost model's that `learner` is taken to say of any layout."""

    def case(self, layout: Layout) -> Case:
        """With one answer to it."""
        return Case(model=self.model, cluster=self.cluster, training=self.training, layout=layout)

    @property
    def available_bytes(self) -> int:
        """The highest peak that is planned with, by head-room and chance to fit."""
        return available_bytes(cluster=self.cluster, training=self.training)

    @property
    def modes(self) -> tuple[ActivationCheckpointing, ...]:
        """What backward may recompute, growing."""
        pinned = self.pins.activation_checkpointing
        if pinned:
            return (pinned,)
        is_some = self.pins.checkpoint_blocks not in (None, "all")
        vocabulary = vocabulary_of(self.training.program)
        modes = CHECKPOINTING if vocabulary is None else _said(vocabulary)
        return modes[1:] if is_some else modes

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled: on GPUs, unless the user or the schedule says no."""
        if self.pins.compile is not None:
            return self.pins.compile
        is_split = self.pins.schedule in SPLIT_BACKWARD_SCHEDULES
        return self.cluster.device.kind == "cuda" and not is_split
