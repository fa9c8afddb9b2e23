"""Heap: what is held, by the parts of a phase and the pools of its streams."""

from __future__ import annotations

from fsdpplan.cost.play.heap import Heap


def test_a_phase_is_what_is_held_at_its_moment() -> None:
    heap = Heap(gathers_in_place=False)
    heap.hold("unit", 10)
    heap.hold("buffer", 3)
    heap.hold("saved", 5)
    heap.hold("saved", 7)
    before = heap.moment("forward")
    heap.free("unit", "buffer", "logits")
    after = heap.moment("loss")
    assert (before.unsharded_parameters_bytes, before.activations_bytes) == (13, 7)
    assert (before.total_bytes, after.total_bytes) == (20, 7)
    assert (before.name, after.name) == ("forward", "loss")


def test_what_is_gathered_in_place_is_of_the_gathers_stream() -> None:
    for in_place, gathered in ((True, 13), (False, 3)):
        heap = Heap(gathers_in_place=in_place)
        heap.hold("unit", 10)
        heap.hold("buffer", 3)
        heap.hold("casts", 2)
        assert heap.moment("forward").gathers_bytes == gathered
