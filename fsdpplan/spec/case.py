"""Case: what is asked of the cost model, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.remembered import RemembersHash, remembered_hash
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(RemembersHash):
    """What is trained, on what, and how: all that decides its time, its memory, its collectives and
    what it needs of torch.

    A part of a model is a case of its own: blocks without experts, or those that keep everything
    while others recompute.
    """

    __hash__ = remembered_hash

    model: Model
    cluster: Cluster
    training: Training
    layout: Layout

    def of_blocks(self, kind: Model) -> Case:
        """As it is for the blocks of one kind: `kind` is the model with all blocks like them."""
        return self if kind is self.model else replace(self, model=kind)

    @property
    def on_cuda(self) -> bool:
        """Whether it trains on CUDA devices."""
        return self.cluster.device.kind == "cuda"
