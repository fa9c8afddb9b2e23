"""Entries for the tests of the order: a layout with a step time and a memory of its own."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fsdpplan.search.order import Difference, Entry
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Interval, TimeBreakdown
from tests.cost.problems import case

ONE = case("llama-3.1-8b", dp_shard=16)
PRICED = ONE.estimate
CLUSTER = ONE.cluster


def uncertain(fraction: float) -> Difference:
    """A difference that is the same for all pairs."""

    def difference(one: Entry, other: Entry) -> float:
        return fraction

    return difference


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


def any_entry() -> st.SearchStrategy[Entry]:
    """Entries of every kind, whose steps are near each other, some of them alike."""
    seconds = st.floats(0.0, 0.3)
    return st.builds(
        entry,
        compute=st.sampled_from([9.7, 10.0, 10.05]),
        exposed=st.one_of(st.just(0.0), seconds),
        bubble=seconds,
        optimizer=st.just(0.1),
        device_bytes=st.sampled_from([10 * 2**30, 70 * 2**30, 72 * 2**30]),
        micro_batch=st.integers(1, 4),
        wrap_blocks=st.sampled_from([1, 2]),
        loss_chunks=st.sampled_from([1, 4]),
        reshard_after_forward=st.sampled_from(["always", "never", 4]),
        activation_checkpointing=st.sampled_from(["none", "op", "full"]),
        dp_shard=st.sampled_from([4, 8, 16]),
        dp_replicate=st.sampled_from([1, 2]),
        cp=st.sampled_from([1, 2]),
        ep=st.sampled_from([1, 2]),
        tp=st.sampled_from([1, 2]),
        sharding=st.sampled_from(["fsdp", "zero1"]),
    )
