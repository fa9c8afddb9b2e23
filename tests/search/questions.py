"""Questions for the tests of the search, and the answer that pricing everything gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdpplan.cost.band import difference_fraction
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.bounds.fitting import needed_bytes
from fsdpplan.search.enumerate import (
    degrees,
    layout_of,
    micro_batches,
    reshard_policies,
    schedules,
    sync_policies,
)
from fsdpplan.search.order import Entry, in_order, listed
from fsdpplan.search.pins import Pins, default_global_batch
from fsdpplan.search.question import Question as Asked
from fsdpplan.search.question import SearchResult
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import in_pieces
from fsdpplan.search.space import Space, entry_of
from fsdpplan.search.variants import overlapped
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL

NO_PINS = Pins()

WIDE = replace(SMALL, name="wide", layers=12, hidden=4096, ffn_hidden=16384, head_dim=256)
"""3.1 B parameters: tight on a few GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the search."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins = NO_PINS

    def answer(self, *, limit: int = 10) -> SearchResult:
        """What the search says."""
        return recommend(
            model=self.model,
            cluster=self.cluster,
            training=self.training,
            pins=self.pins,
            limit=limit,
        )

    def case(self, layout: Layout) -> Case:
        """With one answer to it."""
        return self.asked.case(layout)

    @property
    def asked(self) -> Asked:
        """The question as the search's own parts take it."""
        return Asked(model=self.model, cluster=self.cluster, training=self.training, pins=self.pins)


def question(
    model: str | Model,
    gpus: int,
    profile: str = "dgx-h100",
    *,
    seq_len: int = 4096,
    global_batch: int | None = None,
    precision: str = "bf16",
    **pins: object,
) -> Question:
    """A question with the defaults of the command line."""
    return Question(
        model=load_model(model) if isinstance(model, str) else model,
        cluster=load_cluster(profile, gpus=gpus).cluster,
        training=Training(
            seq_len=seq_len,
            global_batch=global_batch or default_global_batch(seq_len=seq_len, gpus=gpus),
            precision=precision,  # type: ignore[arg-type]
        ),
        pins=Pins(**pins),  # type: ignore[arg-type]
    )


def policies(question: Question) -> Iterator[Layout]:
    """Every layout with usual settings, without recomputation, whether it fits or not."""
    pins, cluster, training = question.pins, question.cluster, question.training
    common, frees = {"cluster": cluster, "pins": pins}, training.traits.reshards_stages
    for d in degrees(model=question.model, training=training, **common):  # type: ignore[arg-type]
        for micro_batch in micro_batches(
            training=training, data_parallel=d.data_parallel, pins=pins
        ):
            number = max(1, training.global_batch // (d.data_parallel * micro_batch))
            for schedule, virtual_stages in schedules(
                d=d, model=question.model, num_microbatches=number, pins=pins
            ):
                for reshard in reshard_policies(d=d, reshards_stages=frees, **common):  # type: ignore[arg-type]
                    for sync in sync_policies(d=d, num_microbatches=number, pins=pins):
                        yield layout_of(
                            d,
                            micro_batch=micro_batch,
                            num_microbatches=number,
                            reshard=reshard,
                            sync=sync,
                            schedule=schedule,
                            virtual_stages=virtual_stages,
                            compiled=question.asked.compiled,
                            pins=pins,
                            model=question.model,
                            training=question.training,
                        )


def everything(question: Question) -> list[Entry]:
    """All layouts with usual settings that fit, priced, whatever bound would skip them."""
    asked = question.asked
    return [
        entry_of(asked, one)
        for leaf in policies(question)
        if Space(asked).is_legal(leaf)
        for layout in _least_recomputation(asked, leaf)
        for one in (layout, *overlapped(asked, layout))
    ]


def _least_recomputation(asked: Asked, leaf: Layout) -> list[Layout]:
    """With the least that fits, and the least with the loss in pieces if that is less."""
    found: list[Layout] = []
    for mode in asked.modes:
        whole = replace(leaf, activation_checkpointing=mode)
        if needed_bytes(asked, whole) <= asked.available_bytes:
            return [*found, whole]
        pieces = in_pieces(whole, training=asked.training, pins=asked.pins)
        if not found and pieces and needed_bytes(asked, pieces) <= asked.available_bytes:
            found = [pieces]
    return found


def full_list(question: Question, *, limit: int) -> list[Entry]:
    """The list, from pricing all of them."""
    order = in_order(
        everything(question),
        difference=lambda one, other: difference_fraction(
            one[1], other[1], cluster=question.cluster
        ),
        cluster=question.cluster,
    )
    return listed(order, limit=limit) if order else []
