"""Fitting: what is left out by a bound would not have fitted, or is no better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from fsdpplan.cost.step import estimate
from fsdpplan.search.enumerate import degrees
from fsdpplan.search.fitting import (
    CHECKPOINTING,
    Question,
    Tally,
    fitting,
    needed_bytes,
)
from fsdpplan.search.pieces import in_pieces
from fsdpplan.search.pins import Pins
from fsdpplan.spec.layout import Layout
from tests.cost.problems import Case, cases
from tests.search.questions import WIDE, policies, question


def asked(drawn: Case) -> Question:
    """The question that a case answers."""
    return Question(model=drawn.model, cluster=drawn.cluster, training=drawn.training, pins=Pins())


@settings(max_examples=80, deadline=None)
@given(cases())
def test_the_search_sees_the_memory_that_the_estimate_has(drawn: Case) -> None:
    found = estimate(
        model=drawn.model, cluster=drawn.cluster, training=drawn.training, layout=drawn.layout
    )
    assert needed_bytes(asked(drawn), drawn.layout) == found.memory.peak_device_bytes


@settings(max_examples=80, deadline=None)
@given(cases(data_parallel_only=True))
def test_keeping_parameters_never_needs_less(drawn: Case) -> None:
    if drawn.layout.sharding != "fsdp":
        return
    resharded = replace(drawn.layout, reshard_after_forward="always")
    kept = replace(drawn.layout, reshard_after_forward="never")
    assert needed_bytes(asked(drawn), resharded) <= needed_bytes(asked(drawn), kept)
    if isinstance(drawn.layout.reshard_after_forward, int):
        between = needed_bytes(asked(drawn), drawn.layout)
        assert needed_bytes(asked(drawn), resharded) <= between


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_larger_micro_batch_never_needs_less(drawn: Case) -> None:
    if drawn.layout.num_microbatches == 1 or drawn.layout.pp > 1:
        return
    larger = drawn.with_layout(micro_batch=2 * drawn.layout.micro_batch)
    assert needed_bytes(asked(drawn), drawn.layout) <= needed_bytes(asked(larger), larger.layout)


TIGHT = {
    "8 GPUs of 40 GB": question(WIDE, 8, "dgx-a100-40g-hdr", global_batch=16),
    "16 GPUs": question("llama-3.1-8b", 16, "dgx-a100-40g-hdr", global_batch=64, tp=1, pp=1),
    "replicas": question("llama-3.1-8b", 32, "dgx-a100-40g-hdr", global_batch=64, dp_replicate=2),
}


@pytest.mark.parametrize("name", TIGHT)
def test_all_that_fits_is_found_with_the_least_recomputation_that_fits(name: str) -> None:
    wanted = TIGHT[name]
    every = degrees(
        model=wanted.model, cluster=wanted.cluster, training=wanted.training, pins=wanted.pins
    )
    innermost = wanted.cluster.levels[0].domain_gpus
    tally = Tally()
    found = {
        layout for d in every if d.tp <= innermost for layout in fitting(wanted.asked, d, tally)
    }

    def fits(layout: Layout | None) -> bool:
        available = wanted.asked.available_bytes
        return layout is not None and needed_bytes(wanted.asked, layout) <= available

    def in_them(layout: Layout) -> Layout | None:
        return in_pieces(layout, training=wanted.training, pins=wanted.pins)

    expected: set[Layout] = set()
    layouts = 0
    for layout in policies(wanted):
        case = Case(
            model=wanted.model, cluster=wanted.cluster, training=wanted.training, layout=layout
        )
        if case.problem is not None:
            continue
        modes = [replace(layout, activation_checkpointing=mode) for mode in CHECKPOINTING]
        whole = next((at for at, mode in enumerate(modes) if fits(mode)), None)
        cut = [piece for mode in modes[:whole] if (piece := in_them(mode)) and fits(piece)][:1]
        expected |= {*cut, *([] if whole is None else [modes[whole]])}
        layouts += bool(cut or whole is not None)
    assert found == expected
    assert tally.feasible == len(CHECKPOINTING) * layouts
