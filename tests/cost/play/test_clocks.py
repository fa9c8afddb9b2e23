"""Clocks: leaving out what goes as before gives what playing all of it gives."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.play.clocks import Clocks, Played, played
from fsdpplan.cost.step.fsdp import MicroBatch, UnitSeconds, fsdp_step
from fsdpplan.cost.step.program import Op, Program, Repeat, Run, Wait, operations

NAMES = [one.name for one in fields(UnitSeconds)]
REDUCTION = ("reduce_scatter", "all_reduce", "copy_in", "download", "adding")


def drawn_unit(random: Random, *, scale: float, offloads: bool) -> UnitSeconds:
    """Seconds of any kind; some collectives are not there."""
    seconds = {name: random.random() for name in NAMES}
    for name in ("gather", "regather", "reduce_scatter", "all_reduce"):
        seconds[name] *= scale * (random.random() < 0.8)
    if not offloads:
        seconds |= dict.fromkeys(("upload", "download", "adding"), 0.0)
    if not seconds["reduce_scatter"]:
        seconds |= dict.fromkeys(REDUCTION, 0.0)
    return UnitSeconds(**seconds)


def drawn_step(seed: int) -> Program:
    """A step of up to 200 units and 40 micro-batches, from no communication to nothing else."""
    random = Random(seed)
    scale, offloads = random.choice((0.1, 0.5, 1, 2)), random.random() < 0.2

    def one() -> UnitSeconds:
        return drawn_unit(random, scale=scale, offloads=offloads)

    runs = tuple(
        (one(), random.choice((1, 2, 3, 8, 40, 126))) for _ in range(random.choice((1, 2)))
    )
    last = MicroBatch(
        runs=runs,
        root=replace(one(), regather=0.0),
        links_shared=random.random() < 0.5,
        is_flat=random.random() < 0.2,
    )
    silent = dict.fromkeys(REDUCTION, 0.0) if random.random() < 0.5 else {}
    early = replace(
        last,
        runs=tuple((replace(unit, **silent), number) for unit, number in runs),
        root=replace(last.root, **silent),
    )
    return fsdp_step(early=early, last=last, num_microbatches=random.choice((1, 2, 3, 5, 12, 40)))


def plainly(program: Program) -> Played:
    """Each operation by itself."""
    clocks = Clocks()
    for part in program:
        runs, times = (part.of, part.times) if isinstance(part, Repeat) else ((part,), 1)
        for _ in range(times):
            for op in operations(runs):
                clocks.do(op)
    return Played(clocks.compute, clocks.waited)


@given(st.integers(0, 2**32))
def test_what_is_left_out_goes_as_before(seed: int) -> None:
    program = drawn_step(seed)
    short, whole = played(program), plainly(program)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-10)
    for cause, seconds in whole.waited.items():
        assert short.waited[cause] == pytest.approx(seconds, rel=1e-9, abs=1e-10 * whole.seconds)


def test_a_queue_that_fills_up_is_played_on_where_it_is_waited_for() -> None:
    """Each round a link gets a tenth more to carry than it can, and what waits for its last message
    but one waits from some round on."""
    ops = (
        Op("copy_out", "compute", 1.0, (Wait("gather", "all_gather"),)),
        Op("gather", "shard", 1.1, (Wait("copy_out"),)),
        Op("forward", "compute", 0.5),
    )
    late = (Op("backward", "compute", 1.0), Op("reduce_scatter", "shard", 1.1))
    for times in (1, 5, 50, 1000):
        program = (
            Run(ops),
            Run(late, times),
            Run((Op("update", "compute", 0.0, (Wait("shard"),)),)),
        )
        assert played(program).seconds == pytest.approx(plainly(program).seconds, rel=1e-12)


def test_few_operations_are_played_of_many() -> None:
    unit = UnitSeconds(forward=1.0, backward=2.0, gather=0.4, regather=0.4, reduce_scatter=0.3)
    batch = MicroBatch(runs=((unit, 126),), root=UnitSeconds(gather=0.1), links_shared=False)
    done: list[Op] = []

    class Counting(Clocks):
        def do(self, *ops: Op) -> None:
            done.extend(ops)
            super().do(*ops)

    Counting().play(fsdp_step(early=batch, last=batch, num_microbatches=64))
    assert len(done) < 200 < 64 * 126
