"""Entries for the tests of the order: a layout with a step time and a memory of its own."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.search.order import Entry
from fsdpplan.spec.estimate import Interval, TimeBreakdown
from fsdpplan.spec.layout import Layout
from tests.cost.problems import case

ONE = case("llama-3.1-8b", dp_shard=16)
PRICED = ONE.estimate


def entry(
    *,
    compute: float = 10.0,
    exposed: float = 0.0,
    bubble: float = 0.0,
    optimizer: float = 0.0,
    device_bytes: int = 40 * 2**30,
    **layout: object,
) -> Entry:
    """A layout whose step takes the sum of what is given."""
    time = TimeBreakdown(
        compute_seconds=compute,
        exposed_communication_seconds=exposed,
        bubble_seconds=bubble,
        optimizer_seconds=optimizer,
    )
    seconds = time.total_seconds
    parts = {name: 0 for name in PARTS}
    memory = replace(
        PRICED.memory, **parts, activations_bytes=device_bytes, stage_peak_device_bytes=()
    )
    result = replace(
        PRICED,
        step_seconds=Interval(lower=seconds, expected=seconds, upper=seconds),
        time=time,
        memory=memory,
    )
    changed: Layout = replace(ONE.layout, **layout)  # type: ignore[arg-type]
    return changed, result


PARTS = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "unsharded_parameters_bytes",
    "unsharded_gradients_bytes",
    "logits_bytes",
    "temporaries_bytes",
    "reserved_overhead_bytes",
    "context_bytes",
)
