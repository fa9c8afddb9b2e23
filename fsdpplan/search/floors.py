"""Floors: the least that a step takes with given degrees, whatever its policies.

What is decided later (micro-batch, schedule, resharding, buckets, the loss in pieces) is taken as
what costs least.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from fsdpplan.cost.least import least_communication_seconds
from fsdpplan.cost.passes import plain_seconds
from fsdpplan.cost.pipeline_gathers import ACTIVE_STAGES
from fsdpplan.cost.shards import Stage, whole_model
from fsdpplan.cost.timing import layout_optimizer_seconds, optimizer_elements
from fsdpplan.search.enumerate import (
    Degrees,
    layout_of,
    micro_batches,
    reshard_policies,
    sync_policies,
)
from fsdpplan.search.question import Question
from fsdpplan.search.room import Room
from fsdpplan.spec.layout import ActivationCheckpointing, Layout, Schedule


@dataclass(slots=True)
class Floors:
    """Floors of one question; what many degrees share is computed once."""

    asked: Question
    room: Room
    works: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Of one micro-batch through the whole model, data parallelism apart."""
    again: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Of one block that is recomputed."""

    def of_spread(self, d: Degrees) -> float:
        """The least of all micro-batches; infinite where nothing fits."""
        layout = self._plainest(d)
        a_rank = self.asked.training.global_batch // d.data_parallel
        best = inf
        for size in self._sizes(d):
            number = max(1, a_rank // size)
            floor = self.at(replace(layout, micro_batch=size, num_microbatches=number))
            best = min(best, floor)
            if floor == inf and number > 1:  # nor does a larger one fit, if several of them do not
                break
        return best

    def at(self, layout: Layout) -> float:
        """With its micro-batch, whatever its other policies: its share of what is to be computed,
        with what must be recomputed, or what FSDP moves; then the optimizer."""
        pp, is_fsdp, pins = layout.pp, layout.sharding == "fsdp", self.asked.pins
        is_flat = pp == 1 or not is_fsdp
        leanest = replace(
            layout,
            reshard_after_forward=pins.reshard_after_forward or ("always" if is_flat else "never"),
            gradient_sync=pins.gradient_sync or ("every" if pp == 1 else "last"),
        )
        blocks = self.room.recomputed(leanest)
        if not blocks:
            return inf
        work = self._work(leanest, layout.micro_batch)
        again = min(
            number and number * self._again(leanest, mode) for mode, number in blocks.items()
        )
        share = (pp - 1) / pp if pp > 1 else 1.0  # the last rank may have few blocks
        least = layout.num_microbatches * (work / pp + share * again)
        if pp > 1:  # the first micro-batch on its way to the last rank, and the last one back
            layers = self.asked.model.layers
            least += (pp - 1) * max(1, layers // (pp * ACTIVE_STAGES) - 1) * work / layers / 2
        if pp == 1 and is_fsdp:
            least = max(least, self._moving_seconds(leanest))
        return least + self._update_seconds(leanest) / pp

    def leanest(self, d: Degrees) -> Layout:
        """The layout with these degrees that needs least, or nearly so."""
        a_rank = self.asked.training.global_batch // d.data_parallel
        size = self._sizes(d)[0]
        return replace(
            self._plainest(d),
            micro_batch=size,
            num_microbatches=max(1, a_rank // size),
            activation_checkpointing=self.asked.modes[-1],
        )

    def _sizes(self, d: Degrees) -> tuple[int, ...]:
        training = self.asked.training
        return micro_batches(training=training, data_parallel=d.data_parallel, pins=self.asked.pins)

    def _plainest(self, d: Degrees) -> Layout:
        asked = self.asked
        schedule: Schedule = "none" if d.pp == 1 else "1f1b"
        number = max(1, asked.training.global_batch // d.data_parallel)
        return layout_of(
            d,
            micro_batch=1,
            num_microbatches=number,
            reshard=reshard_policies(d=d, cluster=asked.cluster, pins=asked.pins)[0],
            sync=sync_policies(d=d, num_microbatches=number, pins=asked.pins)[0],
            schedule=schedule,
            virtual_stages=1,
            compiled=asked.compiled,
            pins=asked.pins,
        )

    def _moving_seconds(self, layout: Layout) -> float:
        """FSDP's gathers and reduce-scatters one after the other, each as seldom as can be."""
        return least_communication_seconds(
            model=self.asked.model,
            cluster=self.asked.cluster,
            training=self.asked.training,
            layout=replace(
                layout,
                wrap_blocks=self.asked.model.layers,
                reshard_after_forward="never",
                gradient_sync="last",
            ),
        )

    def _update_seconds(self, layout: Layout) -> float:
        """The optimizer over the whole model."""
        asked = self.asked
        stage = whole_model(asked.model)
        return layout_optimizer_seconds(
            model=asked.model,
            device=asked.cluster.device,
            layout=layout,
            local_parameters=optimizer_elements(model=asked.model, layout=layout, stage=stage),
            training=asked.training,
            stage=stage,
        )

    def _work(self, layout: Layout, micro_batch: int) -> float:
        key = (*_ways(layout), micro_batch)
        if key not in self.works:
            plain = self._alone(layout, micro_batch)
            pieces = replace(plain, loss_chunks=2) if plain.loss_chunks == 1 else plain
            whole = whole_model(self.asked.model)
            self.works[key] = min(self._seconds(plain, whole), self._seconds(pieces, whole))
        return self.works[key]

    def _again(self, layout: Layout, mode: ActivationCheckpointing) -> float:
        key = (*_ways(layout), layout.micro_batch, mode)
        if key not in self.again:
            plain, model = self._alone(layout, layout.micro_batch), self.asked.model
            mode_on = replace(plain, activation_checkpointing=mode)
            kinds = (0, 1) if model.experts and model.dense_blocks else (0,)
            blocks = [
                Stage(blocks=1, has_embedding=False, has_head=False, dense_blocks=dense)
                for dense in kinds
            ]
            self.again[key] = min(
                self._seconds(mode_on, one) - self._seconds(plain, one) for one in blocks
            )
        return self.again[key]

    def _alone(self, layout: Layout, micro_batch: int) -> Layout:
        """On one stage, keeping everything, with the fewest and best hidden collectives."""
        pins, is_fsdp = self.asked.pins, layout.sharding == "fsdp"
        can_overlap = layout.tp > 1 and pins.async_tp is None
        return replace(
            layout,
            pp=1,
            schedule="none",
            stage_blocks=(),
            virtual_stages=1,
            micro_batch=micro_batch,
            wrap_blocks=pins.wrap_blocks or (self.asked.model.layers if is_fsdp else 1),
            activation_checkpointing="none",
            checkpoint_blocks="all",
            async_tp=can_overlap or layout.async_tp,
        )

    def _seconds(self, layout: Layout, stage: Stage) -> float:
        asked = self.asked
        return sum(
            plain_seconds(
                model=asked.model,
                cluster=asked.cluster,
                training=asked.training,
                layout=layout,
                stage=stage,
            )
        )


def _ways(layout: Layout) -> tuple[object, ...]:
    """What of the degrees decides the work of a micro-batch."""
    ways = (layout.tp, layout.cp, layout.ep, layout.sharding)
    return (*ways, layout.data_parallel > 1, layout.async_tp, layout.loss_chunks)
