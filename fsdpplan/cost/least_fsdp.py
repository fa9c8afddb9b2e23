"""Least under FSDP: a step without a pipeline, but for waiting that only playing its streams shows.

All that the compute stream has to do is known without playing them, and what certainly waits: each
micro-batch for the gathers of the root and of its first unit, the step for the root's reduction;
and the communicator's queue for itself. What can be hidden still slows kernels down.
"""

from __future__ import annotations

from fsdpplan.cost.model.shards import gradient_syncs
from fsdpplan.cost.overlap.fsdp_timing import Moves
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout


def least_fsdp_seconds(
    moves: Moves,
    *,
    cluster: Cluster,
    layout: Layout,
    late: float,
    computed: float,
    waiting: float,
    gradients: float,
) -> float:
    """All but the optimizer, from what a micro-batch computes and waits for inside its blocks, and
    what `gradients` cost in a step; the slowest device computes `late` times as long.

        T >= late * (C + f * (D - d e)) + e + m * waiting
        e >= max(m * (first gathers) + last reductions, queue - (C + m * waiting))

    C: the compute stream's work; D: what disturbs kernels if all of it is hidden, at a rate of at
    most d; f: what they lose to it. It grows with e, as long as late * f * d < 1.
    """
    number, syncs = layout.num_microbatches, gradient_syncs(layout)
    all_units, root = moves.total, moves.root
    busy = number * (computed + moves.copied) + syncs * moves.copied_in
    queue = number * (all_units.gather + all_units.regather) + syncs * all_units.reduce_scatter
    exposed = number * (root.gather + moves.first_gather)
    exposed += syncs * root.reduce_scatter + root.all_reduce
    exposed = max(exposed, queue - busy - number * waiting)
    busy += gradients
    device = cluster.device
    lost = device.fit.overlap_slowdown_fraction
    if late * lost < 1 and layout.offload == "none":
        of = moves.disturbing
        hidden = number * (of.gather + of.regather) + syncs * of.reduce_scatter
        hidden += (syncs if layout.gradient_sync == "every" else 1) * of.all_reduce
        busy += min(busy, lost * max(0.0, hidden - exposed))
    return late * busy + exposed + number * waiting
