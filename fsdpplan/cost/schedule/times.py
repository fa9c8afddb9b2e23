"""Pipeline: the time of all micro-batches through all stages, and when each rank is done.

A stage is a slice of the model; ranks hold stages as in `rank_stages` and work in the order of
`rank_actions`. Under GPipe and 1F1B a rank waits for each message: torch issues the receive behind
the compute before it and waits for it, and under 1F1B sends the rank's own message in the same
call (torch 2.13 torch/distributed/pipelining/schedules.py, `_step_microbatches` of ScheduleGPipe
and Schedule1F1B; Megatron Core's forward_backward_pipelining_without_interleaving does as well).
Under the others messages travel beside compute, and only what is not there in time is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.schedule.actions import FORWARD, overlapped_pairs, rank_stages
from fsdpplan.cost.schedule.order import peak_in_flight, rank_actions, require_simulated
from fsdpplan.cost.schedule.simulation import Run, run_ends
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Schedule

WAITING_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""A rank waits for each message when it needs it, not before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """One pass of all micro-batches through a pipeline."""

    total_seconds: float
    """From the first forward pass to the last backward pass."""
    busy_seconds: tuple[float, ...]
    """Compute of each rank."""
    peak_in_flight: tuple[tuple[int, ...], ...]
    """For each rank, the micro-batches alive in each of its stages when it holds most."""
    end_seconds: tuple[float, ...]
    """When each rank's last action ends: then it can reduce what it has not reduced yet."""
    stage_end_seconds: tuple[float, ...]
    """When each stage's last backward pass ends, first stage first."""

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """What each rank waits, up to the end of all."""
        return tuple(max(0.0, self.total_seconds - busy) for busy in self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """What the busiest rank waits."""
        return min(self.idle_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The same as a share of the whole."""
        return self.bubble_seconds / self.total_seconds if self.total_seconds else 0.0


def simulate_pipeline(
    *,
    schedule: Schedule,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    virtual_stages: int,
    send_seconds: float,
    backward_weight_seconds: tuple[float, ...] = (),
    gathered_seconds: tuple[float, ...] = (),
    paired_seconds: tuple[tuple[float, float], ...] = (),
    regathers: bool = False,
) -> PipelineTiming:
    """Time of all micro-batches through a pipeline whose stages may be uneven.

    All seconds are of one micro-batch in each stage, first to last. `backward_weight_seconds` is
    the part of `backward_seconds` that makes the weights' gradients: schedules that split the
    backward pass need it. `gathered_seconds`: before this moment, from the start of the step, a
    stage's first forward pass cannot end, as its parameters are still being gathered.
    `paired_seconds`: what (forward, backward) of a stage take where DualPipeV has each of them side
    by side with one of the rank's other stage; empty: as long as alone. With `regathers`, what
    they take behind a forward pass of their stage, which left its parameters resharded.
    """
    run = pipeline_run(
        schedule=schedule,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        send_seconds=send_seconds,
        backward_weight_seconds=backward_weight_seconds,
        gathered_seconds=gathered_seconds,
        paired_seconds=paired_seconds,
        regathers=regathers,
    )
    pp, ends = run.pp, run_ends(run)
    work = [f + b for f, b in zip(forward_seconds, backward_seconds, strict=True)]
    held = [
        rank_stages(schedule=schedule, pp=pp, virtual_stages=virtual_stages, rank=rank)
        for rank in range(pp)
    ]
    return PipelineTiming(
        total_seconds=max(ends.ranks),
        busy_seconds=tuple(num_microbatches * sum(work[s] for s in stages) for stages in held),
        peak_in_flight=peak_in_flight(
            schedule=schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        ),
        end_seconds=ends.ranks,
        stage_end_seconds=ends.stages,
    )


def pipeline_run(
    *,
    schedule: Schedule,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    num_microbatches: int,
    virtual_stages: int,
    send_seconds: float,
    backward_weight_seconds: tuple[float, ...] = (),
    gathered_seconds: tuple[float, ...] = (),
    paired_seconds: tuple[tuple[float, float], ...] = (),
    regathers: bool = False,
) -> Run:
    """What there is to play, from the same as `simulate_pipeline`."""
    _require_lengths(
        schedule,
        virtual_stages,
        forward_seconds,
        backward_seconds,
        backward_weight_seconds,
        gathered_seconds,
    )
    pp = len(forward_seconds) // virtual_stages
    require_simulated(
        schedule=schedule, pp=pp, num_microbatches=num_microbatches, virtual_stages=virtual_stages
    )
    waits = send_seconds if schedule in WAITING_SCHEDULES and pp > 1 else 0.0
    weights = backward_weight_seconds or (0.0,) * len(backward_seconds)
    # the first stage has no input to differentiate by: its weights' half is all of it
    weights = (backward_seconds[0], *weights[1:])
    return Run(
        schedule=schedule,
        pp=pp,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        seconds=(
            *_with_receives(forward_seconds, backward_seconds, waits),
            tuple(b - w for b, w in zip(backward_seconds, weights, strict=True)),
            weights,
            *_with_receives(*_paired(forward_seconds, backward_seconds, paired_seconds), waits),
        ),
        send_seconds=0.0 if waits else send_seconds,
        gathered_seconds=gathered_seconds,
        regathers=regathers,
    )


def _with_receives(
    forward: tuple[float, ...], backward: tuple[float, ...], seconds: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(forward, backward) of each stage with what it waits for its input."""
    return (
        (forward[0], *(one + seconds for one in forward[1:])),
        (*(one + seconds for one in backward[:-1]), backward[-1]),
    )


def _paired(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    paired: tuple[tuple[float, float], ...],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not paired:
        return forward, backward
    return tuple(one for one, _ in paired), tuple(other for _, other in paired)


def paired_passes(*, pp: int, num_microbatches: int) -> tuple[tuple[int, int], ...]:
    """For each rank of DualPipeV, how many forward passes of its (first, second) stage are side by
    side with a backward pass of the other one."""
    lists = rank_actions(
        schedule="dualpipev", pp=pp, num_microbatches=num_microbatches, virtual_stages=2
    )
    found = []
    for rank, actions in enumerate(lists):
        pairs = overlapped_pairs(schedule="dualpipev", rank=rank, pp=pp, actions=actions)
        first = [actions[at][0] for at in pairs if actions[at][2] == FORWARD]
        found.append((first.count(rank), first.count(2 * pp - 1 - rank)))
    return tuple(found)


def _require_lengths(
    schedule: Schedule,
    virtual_stages: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    weights: tuple[float, ...],
    gathered: tuple[float, ...],
) -> None:
    stages = len(forward)
    if len(backward) != stages or stages % virtual_stages:
        raise SpecError(
            f"{stages} forward and {len(backward)} backward times do not fill ranks with "
            f"{virtual_stages} stages each: give as many of both, a multiple of that"
        )
    if len(weights) not in (0, stages) or len(gathered) not in (0, stages):
        raise SpecError(
            f"{len(weights)} weight and {len(gathered)} gather times do not go with {stages} "
            "stages: give one a stage, or none"
        )
    if schedule in SPLIT_BACKWARD_SCHEDULES and not weights:
        raise SpecError(
            f"schedule {schedule} splits the backward pass: say how much of it makes the weights' "
            "gradients (backward_weight_seconds)"
        )
    if any(w > b for b, w in zip(backward, weights, strict=False)):
        raise SpecError(
            "the weights' half of a backward pass cannot take longer than the whole: give a part "
            "of each backward time"
        )


def reduced_seconds(
    *,
    timing: PipelineTiming,
    rank_stage_indices: tuple[tuple[int, ...], ...],
    reduce_seconds: tuple[float, ...],
    hidden_seconds: tuple[float, ...] = (),
    at_the_end: bool = False,
) -> tuple[float, ...]:
    """When each rank has reduced its gradients, from the start of the step.

    A stage's reduction takes `reduce_seconds` from the end of its last backward pass, or
    `hidden_seconds` earlier where it runs beside that; a rank reduces its stages one after
    another, in the order in which they end, or `at_the_end` of all of its passes. So of several
    stages a rank all but the one that ends last are reduced behind passes of others. The step ends
    with the latest rank: the first ranks end last, and the reductions of the others hide in their
    wait.
    """
    hidden = hidden_seconds or (0.0,) * len(reduce_seconds)
    ends = []
    for rank, stages in enumerate(rank_stage_indices):
        clock = timing.end_seconds[rank] if at_the_end else 0.0
        for stage in sorted(stages, key=lambda stage: timing.stage_end_seconds[stage]):
            start = timing.stage_end_seconds[stage] - hidden[stage]
            clock = max(clock, start) + reduce_seconds[stage]
        ends.append(max(clock, timing.end_seconds[rank]))
    return tuple(ends)
