"""Plan: a model, a cluster, a training and the layouts chosen for them."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.errors import SpecError
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.torch_release import TorchRelease
from fsdpplan.spec.training import Training

TORCH_SOURCE = "training.torch"
"""Names the source of the release in a plan's sources."""
DEFAULT_SOURCE = "default"
"""Source of what was not said."""

_PADDED = "vocabulary padded from"


def assumed(said: tuple[str, ...], *, model: Model, layout: Layout) -> tuple[str, ...]:
    """The assumptions `said`, with what this `layout` takes for granted of `model` in the place of
    what another one does."""
    rest = tuple(sentence for sentence in said if not sentence.startswith(_PADDED))
    rows = model.vocab_rows(layout.tp)
    if rows == model.vocab:
        return rest
    why = f" for tp {layout.tp}"
    if model.vocab_multiple > 1:
        why = f", {model.vocab_multiple} by {rows // model.vocab_multiple:,} (--vocab-multiple)"
    return (*rest, f"{_PADDED} {model.vocab:,} to {rows:,} rows{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """One line of the answer."""

    rank: int
    """1 comes first: the fastest that fits, or one that is not told apart from it."""
    layout: Layout
    estimate: Estimate
    reason: str
    """Why it is first, or why it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that emitting, running and checking need: they never plan again."""

    model: Model
    cluster: Cluster
    training: Training
    layout: Layout
    """The layout to run."""
    estimate: Estimate
    """Its prediction."""
    alternatives: tuple[RankedLayout, ...]
    """The ranked list that the layout was taken from, itself included."""
    sources: tuple[tuple[str, str], ...]
    """(field, where its value came from) for each input: flag, catalogue, profile, default."""
    assumptions: tuple[str, ...]
    """Sentences on what was not given and what is taken instead."""
    warnings: tuple[str, ...]
    """Sentences on what the user should look at."""
    versions: tuple[tuple[str, str], ...]
    """(name, version) of fsdpplan and Python; torch's is checked where it runs."""

    def __post_init__(self) -> None:
        if self.layout.world != self.cluster.gpus:
            raise SpecError(
                f"the layout has {self.layout.world} ranks, the cluster {self.cluster.gpus} GPUs: "
                "both must be the same"
            )
        if self.layout.global_batch != self.training.global_batch:
            raise SpecError(
                f"the layout takes {self.layout.global_batch} sequences a step, the training "
                f"{self.training.global_batch}: both must be the same"
            )

    @property
    def case(self) -> Case:
        """What is trained, on what, and how."""
        return Case(
            model=self.model, cluster=self.cluster, training=self.training, layout=self.layout
        )

    @property
    def torch_source(self) -> str:
        """Where its release of torch came from: a flag, a Python that was asked, an assumption."""
        return dict(self.sources).get(TORCH_SOURCE, DEFAULT_SOURCE)

    @property
    def known_torch(self) -> TorchRelease | None:
        """The release of torch that the job will run; None where it is only assumed."""
        return None if self.torch_source == DEFAULT_SOURCE else self.training.torch_release
