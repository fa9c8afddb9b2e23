"""Exposed: whose waiting it is, and what the bottleneck is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.read.exposed import (
    ExposedSeconds,
    bottleneck,
    collective_costs,
    own_waiting,
    slowdown_seconds,
)
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.plan import CollectiveCost, TimeBreakdown
from tests.cost.problems import Case, case
from tests.search.questions import Question, question

SECONDS = st.floats(0, 10)
NAMES = ("all_gather", "reduce_scatter", "all_reduce")


def time(**seconds: float) -> TimeBreakdown:
    """A step that takes nothing but what is given."""
    names = TimeBreakdown.__dataclass_fields__
    return TimeBreakdown(**{**dict.fromkeys(names, 0.0), **seconds})


def rows(case: Case, exposed: ExposedSeconds) -> tuple[CollectiveCost, ...]:
    """The rows of an estimate."""
    calls = step_calls(case, pipeline_ranks(model=case.model, layout=case.layout)[-1])
    return collective_costs(calls, cluster=case.cluster, exposed=exposed)


@given(st.tuples(SECONDS, SECONDS, SECONDS), st.tuples(SECONDS, SECONDS, SECONDS))
def test_no_collective_is_waited_for_longer_than_it_takes(
    waited: tuple[float, ...], taken: tuple[float, ...]
) -> None:
    exposed = ExposedSeconds(**dict(zip(NAMES, waited, strict=True)))
    totals = dict(zip(NAMES, taken, strict=True))
    waiting = own_waiting(exposed, totals)
    for name in NAMES:
        assert waiting[name] <= totals[name] + 1e-9
    assert sum(waiting.values()) == pytest.approx(min(sum(waited), sum(taken)))


def test_waiting_behind_another_collective_is_the_other_ones() -> None:
    waiting = own_waiting(
        ExposedSeconds(all_gather=3.0), {"all_gather": 1.0, "reduce_scatter": 5.0}
    )
    assert waiting == {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 0.0}


def test_rows_of_one_collective_share_its_waiting_by_their_time() -> None:
    exposed = ExposedSeconds(all_gather=1e-4)
    gathers = [
        row
        for row in rows(case(dp_shard=16, reshard_after_forward=8), exposed)
        if row.collective == "all_gather"
    ]
    assert len(gathers) == 2
    assert sum(row.exposed_seconds for row in gathers) == pytest.approx(1e-4)
    slow, fast = sorted(gathers, key=lambda row: row.seconds, reverse=True)
    assert slow.exposed_seconds > fast.exposed_seconds


def test_the_bottleneck_is_the_largest_part_of_the_step() -> None:
    assert bottleneck(time(compute_seconds=9.5, bubble_seconds=0.5), ()) == "compute"
    assert bottleneck(time(compute_seconds=5, bubble_seconds=2, optimizer_seconds=1), ()) == (
        "compute"
    )
    assert bottleneck(time(compute_seconds=2, optimizer_seconds=5), ()) == "optimizer"
    assert bottleneck(time(compute_seconds=2, host_seconds=5), ()) == "host copies"
    found = rows(case(dp_shard=16), ExposedSeconds(reduce_scatter=1e-3))
    step = time(compute_seconds=2e-4, exposed_communication_seconds=1e-3, bubble_seconds=1e-6)
    assert bottleneck(step, found) == "reduce_scatter over dp_shard (infiniband)"


PRICED = {
    "inside a node": question("llama-3.1-8b", 8),
    "a slow network": question("llama-3.1-8b", 16, "oci-bm-gpu-a10-4", seq_len=1024),
    "on the host": question("qwen3-14b", 4, "pcie-8xrtx4090"),
    "a pipeline": question("llama-3.1-8b", 16, pp=4, global_batch=16),
    "few sequences": question("llama-3.1-8b", 16, "dgx-a100-80g-hdr1", global_batch=16),
}


@pytest.mark.parametrize("asked", PRICED.values(), ids=PRICED)
def test_the_bottleneck_is_the_largest_share_of_its_own_table(asked: Question) -> None:
    for _, found in asked.answer(limit=4).explored:
        terms = found.time.terms
        largest = max(terms, key=lambda name: terms[name])
        if largest != "communication":
            assert found.bottleneck == largest
            continue
        waits: dict[str, float] = {}
        for row in found.communication:
            name = f"{row.collective} over {row.axis} ({row.level})"
            waits[name] = waits.get(name, 0.0) + row.exposed_seconds
        assert waits[found.bottleneck] == max(waits.values())


def test_slow_collectives_disturb_kernels_less() -> None:
    """As many bytes over a slower link take longer, and as much from what runs beside them."""
    inside = rows(case(dp_replicate=8, dp_shard=8), ExposedSeconds())
    fast = [row for row in inside if row.level == "nvlink" and row.collective != "all_reduce"]
    slow = [row for row in inside if row.axis == "dp_replicate"]
    device = case(dp_shard=8).cluster.device
    per_second = [
        slowdown_seconds(tuple(part), device) / sum(row.seconds for row in part)
        for part in (fast, slow)
    ]
    fraction = device.fit.overlap_slowdown_fraction
    assert per_second[1] < 0.3 * fraction < 0.6 * fraction < per_second[0] <= fraction


def test_what_is_waited_for_disturbs_nothing() -> None:
    run = case(dp_shard=16)
    everything = ExposedSeconds(all_gather=1e3, reduce_scatter=1e3, all_reduce=1e3)
    assert slowdown_seconds(rows(run, everything), run.cluster.device) == pytest.approx(0)
    assert slowdown_seconds(rows(run, ExposedSeconds()), run.cluster.device) > 0
