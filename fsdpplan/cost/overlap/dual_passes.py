"""Dual passes: DualPipe's forward and backward pass of two micro-batches side by side.

A rank computes with one of them while tokens of the other are on their way to their experts or
back. Both together take what is longer, the computation of both or the exchanges of both:

    T = max((cf + cb) * M / (M - e), wf + wb),  at most f + b

cf, cb: what forward and backward compute; wf, wb: what they would wait for exchanges; M: the
device's multiprocessors, of which the exchanges' kernels hold e as long as the pair runs.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1 and figure 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpplan.cost.model.shards import Stage, block_cases
from fsdpplan.cost.overlap.block_times import block_times
from fsdpplan.cost.schedule.stages import StageKinds, layout_rank_stages
from fsdpplan.cost.schedule.times import paired_passes
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Device

Pair = tuple[float, float]
"""Seconds of one micro-batch in one stage: (forward, backward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPasses:
    """What passes take side by side."""

    seconds: tuple[Pair, ...] = ()
    """Of each stage, beside a pass of the rank's other one; empty: as long as alone."""
    saved_seconds: tuple[float, ...]
    """Of each rank in a step: by how much its passes are shorter."""
    hidden_seconds: tuple[float, ...]
    """Of each rank in a step: exchanges that nobody waits for."""


def dual_passes(case: Case, stages: StageKinds, times: Sequence[Pair]) -> DualPasses:
    """Those of a case: nothing is saved where its software or schedule has none, or its blocks
    exchange nothing."""
    layout = case.layout
    none = DualPasses(saved_seconds=(0.0,) * layout.pp, hidden_seconds=(0.0,) * layout.pp)
    if layout.schedule != "dualpipev" or not case.training.traits.overlaps_passes:
        return none
    waits = stages.each([exchange_seconds(case, stage) for stage in stages.kinds])
    if not any(map(any, waits)):
        return none
    busy_multiprocessors = case.training.traits.exchange_multiprocessors
    seconds = [*times]
    saved, hidden = [], []
    counts = paired_passes(pp=layout.pp, num_microbatches=layout.num_microbatches)
    for held, numbers in zip(layout_rank_stages(layout), counts, strict=True):
        of_rank = hidden_of_rank = 0.0
        for forward, backward, number in zip(held, held[::-1], numbers, strict=True):
            alone = times[forward][0] + times[backward][1]
            waiting = waits[forward][0] + waits[backward][1]
            both = side_by_side_seconds(
                computed=alone - waiting,
                exchanged=waiting,
                device=case.cluster.device,
                busy_multiprocessors=busy_multiprocessors,
            )
            left = both / alone
            seconds[forward] = (left * times[forward][0], seconds[forward][1])
            seconds[backward] = (seconds[backward][0], left * times[backward][1])
            of_rank += number * (alone - both)
            hidden_of_rank += number * min(waiting, alone - both)
        saved.append(of_rank)
        hidden.append(hidden_of_rank)
    return DualPasses(
        seconds=tuple(seconds), saved_seconds=tuple(saved), hidden_seconds=tuple(hidden)
    )


def side_by_side_seconds(
    *, computed: float, exchanged: float, device: Device, busy_multiprocessors: int
) -> float:
    """A forward and a backward pass side by side, from what both compute and exchange alone."""
    left = max(1, device.multiprocessors - busy_multiprocessors)
    slower = computed * device.multiprocessors / left
    return min(computed + exchanged, max(slower, exchanged))


def exchange_seconds(case: Case, stage: Stage) -> Pair:
    """What one micro-batch waits in a stage for the ranks of experts to exchange tokens."""
    forward = backward = 0.0
    for own, blocks in block_cases(case, stage):
        waiting = block_times(own).waiting
        forward += blocks * sum(s for axis, s in waiting.forward_by_axis if axis == "ep")
        backward += blocks * sum(s for axis, s in waiting.backward_by_axis if axis == "ep")
    return forward, backward
