"""Timelines: their sums are the estimate's, and the events of a stream follow one another."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.model.mixers import indexer_tensors, mixer_tensors
from fsdpplan.cost.read.exposed import ExposedSeconds, collective_costs
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.timeline.events import COMPUTE, Timeline
from fsdpplan.cost.timeline.pieces import block_pieces, own_blocks
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.cost.problems import DELTA, SMALL, STATES, Case, case, cases
from tests.cost.wide import wide_cases

DETAILS = st.sampled_from(["kernels", "blocks", "passes"])


def holds(case: Case, timeline: Timeline) -> None:
    """What is true of every timeline."""
    time = step_time(case).time
    whole = time.total_seconds
    assert timeline.step_seconds == whole
    terms = timeline.term_seconds()
    for term, seconds in (
        ("compute", time.compute_seconds),
        ("exposed", time.exposed_communication_seconds),
        ("bubble", time.bubble_seconds),
        ("host", time.host_seconds),
        ("optimizer", time.optimizer_seconds),
    ):
        assert terms.get(term, 0.0) == pytest.approx(seconds, rel=1e-9, abs=1e-9 * whole), (
            term,
            terms,
            time,
        )
    own = [
        (rank, stream, events)
        for rank in range(case.layout.pp)
        for stream, events in timeline.streams(rank).items()
    ]
    assert sum(len(events) for _, _, events in own) == len(timeline.events)
    for rank, stream, events in own:
        for one, other in pairwise(events):
            assert other.start_seconds >= one.end_seconds - 1e-9 * whole, (rank, stream)
        assert events[0].start_seconds >= -1e-9 * whole, (rank, stream)
        assert events[-1].end_seconds <= whole * (1 + 1e-9)
        if stream == COMPUTE:
            assert events[0].start_seconds == 0
            assert events[-1].end_seconds == pytest.approx(whole, rel=1e-9)
            assert sum(event.seconds for event in events) == pytest.approx(whole, rel=1e-9)
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    in_flight = in_flight_blocks(model=case.model, layout=case.layout)
    for rank, stage in enumerate(stages):
        line = [point for point in timeline.memory if point.rank == rank]
        assert all(one.start_seconds <= other.start_seconds for one, other in pairwise(line))
        assert 0 <= line[0].start_seconds <= line[-1].start_seconds <= whole
        memory = stage_memory(case, stage, in_flight_blocks=in_flight[rank])
        highest = max(line, key=lambda point: point.allocated_bytes)
        assert highest.allocated_bytes == memory.peak_allocated_bytes
        rows = collective_costs(
            step_calls(case, stage), cluster=case.cluster, exposed=ExposedSeconds()
        )
        found: dict[object, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for event in timeline.events:
            if event.rank == rank and event.traffic is not None:
                sums = found[event.traffic.row]
                sums[0] += event.traffic.count
                sums[1] += event.traffic.bytes
                sums[2] += event.seconds
        expected = {
            (row.collective, row.axis, row.ranks, row.dtype): [row.count, row.bytes, row.seconds]
            for row in rows
        }
        assert {key: sums[:2] for key, sums in found.items()} == {
            key: sums[:2] for key, sums in expected.items()
        }
        for key, sums in expected.items():
            assert found[key][2] == pytest.approx(sums[2], rel=1e-9)


@given(case=wide_cases(), detail=DETAILS, detailed=st.integers(0, 5))
def test_sums_are_the_estimates(case: Case, detail: str, detailed: int) -> None:
    holds(case, step_timeline(case, detail=detail, detailed=detailed))  # type: ignore[arg-type]


@given(case=cases(), detail=DETAILS, detailed=st.integers(0, 5))
def test_sums_are_the_estimates_of_what_is_searched(case: Case, detail: str, detailed: int) -> None:
    holds(case, step_timeline(case, detail=detail, detailed=detailed))  # type: ignore[arg-type]


INDEXED = "deepseek-v3.2"


@pytest.mark.parametrize("model", [SMALL, DELTA, STATES, load_model(INDEXED)], ids=lambda m: m.name)
def test_what_mixes_tokens_comes_between_its_projections(model: Model) -> None:
    of = case(model, dp_shard=8)
    (stage,) = pipeline_ranks(model=of.model, layout=of.layout)
    for own in dict.fromkeys(own_blocks(of, stage)):
        forward = [piece.name for piece in block_pieces(own).forward]
        backward = [piece.name.split(" ")[0] for piece in block_pieces(own).backward]
        if "attention" not in forward:
            continue
        into = projections_in(own.model) & {*forward}
        assert into
        for names, before in ((forward, into), (backward, {"wo"})):
            at = names.index("attention")
            assert before == {*names[:at]} & ({"wo"} | into)
            assert {*names[at:]} >= ({"wo"} | into) - before


def projections_in(model: Model) -> set[str]:
    """Matrices that are read before what mixes tokens in a block."""
    if model.mixer in "DM":
        tensors = mixer_tensors(model)
    else:
        tensors = []
        if model.latent and model.latent.indexer:
            tensors = indexer_tensors(model.hidden, model.latent, model.latent.indexer)
    names = {tensor.name.removesuffix(".weight") for tensor in tensors if tensor.is_matrix}
    return (names | {"wq", "wk", "wv", "wq_a", "wq_b", "wkv_a", "wkv_b"}) - {"wo"}
