"""Flight: no more is taken to be in flight than the schedule, played, has there."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.schedule.order import layout_order, microbatches_refusal, moments_of
from fsdpplan.cost.schedule.stages import layout_stage_blocks, pipeline_ranks
from fsdpplan.search.bounds.flight import flights
from fsdpplan.spec.layout import Layout, Schedule
from tests.search.questions import WIDE


@given(
    pp=st.integers(2, 6),
    virtual_stages=st.integers(2, 4),
    number=st.integers(1, 40),
    schedule=st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b")),
    data=st.data(),
)
def test_there_is_a_backward_pass_with_as_much(
    pp: int, virtual_stages: int, number: int, schedule: Schedule, data: st.DataObject
) -> None:
    stages = virtual_stages if schedule == "interleaved_1f1b" else 1
    refused = microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=number)
    assume(pp * stages <= WIDE.layers and (schedule == "1f1b" or not refused))
    rank = data.draw(st.integers(0, pp - 1))
    layout = Layout(pp=pp, num_microbatches=number, schedule=schedule, virtual_stages=stages)
    stage = pipeline_ranks(model=WIDE, layout=layout)[rank]
    blocks = layout_stage_blocks(model=WIDE, layout=layout)
    moments = moments_of(layout_order(layout), rank, blocks)
    for flight in flights(layout, stage, rank):
        graded = stage.blocks if flight.graded == 2 else flight.graded_blocks
        assert any(
            moment.kind == "backward" and moment.alive >= flight.alive and moment.graded >= graded
            for moment in moments
        )


def test_gradients_are_beside_all_that_is_in_flight_from_two_rounds_on() -> None:
    for number, graded in ((4, False), (8, True)):
        layout = Layout(
            pp=4, num_microbatches=number, schedule="interleaved_1f1b", virtual_stages=2
        )
        stage = pipeline_ranks(model=WIDE, layout=layout)[0]
        assert any(one.graded == 2 for one in flights(layout, stage, 0)) == graded
