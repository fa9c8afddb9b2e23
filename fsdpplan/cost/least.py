"""Least: what a step takes at the least, for a search that prices as little as it can.

The bounds cost a tenth of an estimate, or less, and are below it: tests hold them to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.kernels.optimizer import layout_optimizer_seconds
from fsdpplan.cost.model.shards import Stage, gradient_syncs
from fsdpplan.cost.network.placement import pp_group
from fsdpplan.cost.play.pipeline import played_pipeline
from fsdpplan.cost.read.passes import host_additions
from fsdpplan.cost.schedule.order import layout_order
from fsdpplan.cost.schedule.stages import layout_rank_stages, pipeline_ranks
from fsdpplan.cost.step.pipeline import WAITING_SCHEDULES, Pair, PipelineStep, fsdp_gathering
from fsdpplan.cost.traffic.calls import group_seconds
from fsdpplan.cost.traffic.fsdp import Units, fsdp_units
from fsdpplan.cost.traffic.rank import message_bytes
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.plan import Case


class Rounds(NamedTuple):
    """How often a step without a pipeline does what FSDP moves."""

    gathers: int
    scatters: int
    reduces: int
    """All-reduces over copies of shards."""
    additions: int = 0
    """By the host."""


def rounds(layout: Layout) -> Rounds:
    """In each micro-batch, and as its policy reduces."""
    syncs = gradient_syncs(layout)
    return Rounds(
        gathers=layout.num_microbatches,
        scatters=syncs,
        reduces=syncs if layout.gradient_sync == "every" else 1,
        additions=host_additions(layout),
    )


def least_fsdp_seconds(
    moves: Units,
    *,
    ends: Units,
    cluster: Cluster,
    often: Rounds,
    late: float,
    computed: float,
    waiting: float,
    gradients: float,
) -> float:
    """All of a step without a pipeline but the optimizer, from what a micro-batch computes and
    waits for inside its blocks, and what `gradients` cost in a step; the slowest device computes
    `late` times as long. `ends` are the moves, maybe of smaller units, that nothing can hide.

    All that the compute stream has to do is known without playing FSDP's streams, and what
    certainly waits: each micro-batch for the gathers of the root and of its first unit, or for that
    of the embedding's, the step for the reduction of the last of them; the communicator's queue for
    itself, and that of copies from the host; and the host for what it adds. What can be hidden
    still slows kernels down.

        T >= late * (C + f * (D - d e)) + e + m * waiting
        e >= max(m * (first gathers) + last reductions, queues - (C + m * waiting), additions)

    C: the compute stream's work; D: what disturbs kernels if all of it is hidden, at a rate of at
    most d; f: what they lose to it. It grows with e, as long as late * f * d < 1.
    """
    number, syncs, reduces, additions = often
    all_units = moves.total
    first, last = ends.first_gathers, ends.last_reduction
    busy = number * (computed + moves.copied) + syncs * moves.copied_in
    queue = number * (all_units.gather + all_units.regather) + syncs * all_units.reduce_scatter
    exposed = number * first + syncs * last.reduce_scatter + last.all_reduce
    queue = max(queue, number * moves.uploaded)
    added = additions * all_units.adding
    exposed = max(exposed, queue - busy - number * waiting, added)
    busy += gradients
    device = cluster.device
    lost = device.fit.overlap_slowdown_fraction
    if late * lost < 1:
        of = moves.disturbing
        hidden = number * (of.gather + of.regather) + syncs * of.reduce_scatter
        hidden += reduces * of.all_reduce
        busy += min(busy, lost * max(0.0, hidden - exposed))
    return late * busy + exposed + number * waiting


def queued_seconds(moves: Units, often: Rounds) -> float:
    """What queues on one communicator, or what comes from the host: a step takes no less.

    T >= max(m * (gathers + regathers) + syncs * reduce-scatters, m * uploads)
    """
    total = moves.total
    queue = often.gathers * (total.gather + total.regather) + often.scatters * total.reduce_scatter
    return max(queue, often.gathers * moves.uploaded)


def moved_seconds(moves: Units, often: Rounds) -> dict[str, float]:
    """What FSDP sends in a step without a pipeline over each level of the network."""
    passing: dict[str, float] = {}
    for level, of in moves.links:
        seconds = often.gathers * (of.gather + of.regather) + often.scatters * of.reduce_scatter
        passing[level] = passing.get(level, 0.0) + seconds + often.reduces * of.all_reduce
    return passing


def first_forward_ends(
    layout: Layout, *, passes: Sequence[Pair], gathers: Sequence[float], send: float
) -> tuple[float, ...]:
    """When each stage's first forward pass ends at the earliest, as FSDP gathers them.

        end of s = end of s - 1 + message + max(forward, gather)              of one stage a rank
        end of s = max(end of s - 1 + message, gathers of the rank up to s) + forward   of several

    There is no message between two stages of one rank.
    """
    ends, arrived = list[float](), 0.0
    if layout.schedule in WAITING_SCHEDULES:
        for (forward, _), gather in zip(passes, gathers, strict=True):
            ends.append(arrived + max(forward, gather))
            arrived = ends[-1] + send
        return tuple(ends)
    gathered, turns = [0.0] * len(passes), set[int]()
    for held in layout_rank_stages(layout):
        for stage, moment in zip(held, accumulate(gathers[one] for one in held), strict=True):
            gathered[stage] = moment
        turns |= {stage for stage in held if stage + 1 in held}
    for stage, ((forward, _), moment) in enumerate(zip(passes, gathered, strict=True)):
        ends.append(max(arrived, moment) + forward)
        arrived = ends[-1] + (0.0 if stage in turns else send)
    return tuple(ends)


def least_way_seconds(
    layout: Layout, *, passes: Sequence[Pair], gathers: Sequence[float], send: float
) -> float:
    """A lower bound of all micro-batches through a pipeline, from (forward, backward) of each stage
    and the time that FSDP gathers it.

        T >= max over ranks r, stages s and e of r (first forward of s ends + m * work of r - what r
             has done by then - what r does behind its last backward of e + way back from e)

    The way to a stage goes through those before it, with FSDP's gathers (`first_forward_ends`), and
    a message to the next; back where backward passes are not split. Before the first forward of a
    rank's next stage it sends a round of micro-batches through those before it, and behind the last
    backward of a stage it does as much of those before it.
    """
    is_split = layout.schedule in SPLIT_BACKWARD_SCHEDULES
    arrived = first_forward_ends(layout, passes=passes, gathers=gathers, send=send)
    back = list(accumulate((0.0 if is_split else one[1] + send for one in passes), initial=0.0))
    number, least = layout.num_microbatches, 0.0
    a_round = layout_order(layout).round_size
    for held in layout_rank_stages(layout):
        work = number * sum(sum(passes[index]) for index in held)
        begins = ends = done = left = 0.0
        for index in held[:1] if is_split else held:
            forward, backward = passes[index]
            begins = max(begins, arrived[index] - forward - done)
            ends = max(ends, back[index] - left)
            done += a_round * forward
            left += a_round * backward
        least = max(least, begins + work + ends)
    return least


def played_seconds(
    layout: Layout, *, passes: Sequence[Pair], gathers: Sequence[float], send: float
) -> float:
    """The same by playing the schedule, for those that do not split the backward pass."""
    step = PipelineStep(
        order=layout_order(layout),
        passes=tuple(passes),
        send=send,
        gathering=fsdp_gathering(layout.schedule),
        gathers=tuple(gathers),
    )
    return played_pipeline(step).total_seconds


def message_seconds(case: Case) -> float:
    """A message from one stage of the pipeline to the next."""
    size = message_bytes(case)
    return group_seconds(case.cluster, pp_group(case.layout), "send_recv", size)


def stage_waits(case: Case, stage: Stage) -> Pair:
    """(gathers with their copies, reductions) of a stage under FSDP; none otherwise, where they may
    be hidden."""
    if case.layout.sharding != "fsdp":
        return 0.0, 0.0
    moves = fsdp_units(case, stage)
    total = moves.total
    return total.gather + total.copy_out, max(total.reduce_scatter, total.all_reduce)


def least_update_seconds(case: Case) -> float:
    """What gradients cost beside the passes, and the optimizer: each of the rank where it takes
    longest. They come on top of what the others here bound."""
    held = dict.fromkeys(pipeline_ranks(model=case.model, layout=case.layout))
    gradients = (gradient_seconds(case, stage) for stage in held)
    updates = (layout_optimizer_seconds(case, stage) for stage in held)
    return max(gradients) + max(updates)
