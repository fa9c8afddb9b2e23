"""Pipeline: the order in which each rank works through its micro-batches, and the time it takes.

A stage is a slice of the model; rank r of p holds stages r, r + p, r + 2p, ... (`virtual_stages`
of them), and works in the order of `pipeline_order`. The simulation charges each hand-over between
ranks `send_seconds` of delay and otherwise lets it overlap with compute; a rank does one thing at
a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.pipeline_order import (
    Action,
    peak_in_flight,
    rank_actions,
    require_simulated,
    steady_microbatches,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule

_EXACT_ROUNDS = 8
"""Rounds of p micro-batches past which the steady state is extended instead of simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """One pass of all micro-batches through a pipeline."""

    total_seconds: float
    """From the first forward pass to the last backward pass."""
    busy_seconds: tuple[float, ...]
    """Compute of each rank."""
    peak_in_flight: tuple[tuple[int, ...], ...]
    """For each rank, the micro-batches alive in each of its stages when it holds most."""

    @property
    def bubble_seconds(self) -> float:
        """What the busiest rank waits."""
        return max(0.0, self.total_seconds - max(self.busy_seconds))

    @property
    def bubble_fraction(self) -> float:
        """The same as a share of the whole."""
        return self.bubble_seconds / self.total_seconds if self.total_seconds else 0.0


def ideal_bubble_fraction(*, pp: int, num_microbatches: int, virtual_stages: int) -> float:
    """Share of time that a rank idles with even stages and free hand-over.

        (p - 1) / (v m + p - 1)

    The same for GPipe and 1F1B (v = 1). Source: the simulation below reduces to it; for
    interleaving commonly credited to Narayanan et al. (arXiv 2104.04473), as a share of the ideal
    time there.
    """
    return (pp - 1) / (virtual_stages * num_microbatches + pp - 1)


def stage_blocks(*, layers: int, stages: int) -> tuple[int, ...]:
    """Transformer blocks of each stage, as even as can be.

    Blocks left over go one each to the stages after the first, in order, then to the first: it
    also holds the embedding, and the last stage, which never gets one, the output head.
    """
    if stages > layers:
        raise SpecError(
            f"{layers} blocks do not fill {stages} pipeline stages: use --pp and "
            f"--virtual-stages whose product is at most {layers}"
        )
    even, left = divmod(layers, stages)
    takers = [*range(1, stages - 1), 0][:left]
    return tuple(even + (stage in takers) for stage in range(stages))


def simulate_pipeline(
    *,
    schedule: Schedule,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    virtual_stages: int,
    send_seconds: float,
) -> PipelineTiming:
    """Time of all micro-batches through a pipeline whose stages may be uneven.

    `forward_seconds` and `backward_seconds` are of one micro-batch in each stage, first to last.
    Long runs are simulated up to the steady state, which is then extended by whole rounds:
    within two percent, as stages that differ little take long to settle. GPipe has a closed form.
    """
    stages = len(forward_seconds)
    if len(backward_seconds) != stages or stages % virtual_stages:
        raise SpecError(
            f"{stages} forward and {len(backward_seconds)} backward times do not fill ranks with "
            f"{virtual_stages} stages each"
        )
    pp = stages // virtual_stages
    require_simulated(
        schedule=schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    work = [f + b for f, b in zip(forward_seconds, backward_seconds, strict=True)]
    if schedule == "gpipe":
        total = _gpipe_seconds(forward_seconds, backward_seconds, num_microbatches, send_seconds)
    else:
        total = _extended_seconds(
            schedule, forward_seconds, backward_seconds, num_microbatches, pp, send_seconds
        )
    return PipelineTiming(
        total_seconds=total,
        busy_seconds=tuple(num_microbatches * sum(work[rank::pp]) for rank in range(pp)),
        peak_in_flight=peak_in_flight(
            schedule=schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        ),
    )


def _gpipe_seconds(
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    send_seconds: float,
) -> float:
    """All forwards, then all backwards: each a flow shop paced by its slowest stage."""
    once = sum(forward_seconds) + sum(backward_seconds)
    again = max(forward_seconds) + max(backward_seconds)
    hops = 2 * (len(forward_seconds) - 1)
    return once + (num_microbatches - 1) * again + hops * send_seconds


def _extended_seconds(
    schedule: Schedule,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    pp: int,
    send_seconds: float,
) -> float:
    def seconds(count: int) -> float:
        actions = rank_actions(
            schedule=schedule,
            pp=pp,
            num_microbatches=count,
            virtual_stages=len(forward_seconds) // pp,
        )
        return _makespan_seconds(actions, forward_seconds, backward_seconds, count, send_seconds)

    short = steady_microbatches(
        schedule=schedule, pp=pp, num_microbatches=num_microbatches, rounds=_EXACT_ROUNDS
    )
    if short == num_microbatches or schedule == "looped_bfs":
        return seconds(num_microbatches)
    first, second = seconds(short), seconds(short + pp)
    return second + (second - first) * ((num_microbatches - short) // pp - 1)


def _makespan_seconds(
    actions: tuple[tuple[Action, ...], ...],
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    send_seconds: float,
) -> float:
    """Plays the ranks' action lists: each action starts when its rank and its input are ready."""
    stages, ranks = len(forward_seconds), len(actions)
    hop = send_seconds if ranks > 1 else 0.0
    # arrival[backward][stage][micro-batch]: when its input is there; -1: not yet known
    arrival = [[[-1.0] * num_microbatches for _ in range(stages + 1)] for _ in range(2)]
    arrival[0][0] = [0.0] * num_microbatches
    arrival[1][stages - 1] = [0.0] * num_microbatches
    clock = [0.0] * ranks
    position = [0] * ranks
    waiting = True
    while waiting:
        waiting = False
        for rank, todo in enumerate(actions):
            now, at = clock[rank], position[rank]
            while at < len(todo):
                stage, index, backward = todo[at]
                ready = arrival[backward][stage][index]
                if ready < 0:
                    waiting = True
                    break
                now = ready if ready > now else now
                if backward:
                    now += backward_seconds[stage]
                    arrival[1][stage - 1][index] = now + hop
                else:
                    now += forward_seconds[stage]
                    arrival[0][stage + 1][index] = now + hop
                at += 1
            clock[rank], position[rank] = now, at
    return max(clock)
