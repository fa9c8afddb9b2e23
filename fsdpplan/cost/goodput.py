"""Goodput: the share of a run's time that goes into steps which are kept, where machines fail.

Failures come at a constant rate, and one ends the job:

    failures a second = GPUs / MTBF of a GPU + nodes / MTBF of a node

A run saves each `interval` of training. Saving stops it for `blocking` seconds, and what was saved
counts once it is published, `writing` seconds later, while training goes on; one save is under way
at most, so the next one waits for it:

    cycle = max(interval, writing) + blocking

From a restart on, the first save is published behind `first = interval + blocking + writing`, and
each other one a cycle behind it: so many intervals are kept as the job lives to see. The sum of
these chances is exp(-rate * first) / (1 - exp(-rate * cycle)); a life and its restart take
exp(rate * restart) / rate, since failures come while it restarts, too; and so

    goodput = rate * interval * exp(-rate * (restart + first)) / (1 - exp(-rate * cycle))

Without `writing` that is the complete model of J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps" (Future Generation Computer Systems 22, 2006), equation 20.
Its best interval is where rate * interval = 1 - exp(-rate * (interval + blocking)), which for
short blocking is J. W. Young's sqrt(2 * blocking / rate) (Communications of the ACM 17, 1974).

Assumed away: failures that come in clusters, steps that are slower while a save is written, and
failures that others than machines cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, expm1, hypot, inf, log

from fsdpplan.cost.kernels.optimizer import link_bytes_per_second
from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.reshard import checkpoint_bytes
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Case, Estimate, Interval
from fsdpplan.spec.values import require_positive

NEWTON_STEPS = 60
"""More than it takes: each squares the error."""
MOST_SPARES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How often a cluster fails, and what saving and starting again take there.

    A factor is the 80 % band of a number: it may be so many times as large, or as small.
    """

    gpu_mtbf_seconds: float
    """Mean time between failures of one GPU; infinite: it never fails."""
    node_mtbf_seconds: float
    """Of one node, for what is not its GPUs': host, network, software."""
    mtbf_factor: float = 1.0
    write_bytes_per_second: float
    """What all ranks of the job together write to its storage."""
    read_bytes_per_second: float
    storage_factor: float = 1.0
    save_seconds: float = 0.0
    """In which a save in the background holds all ranks, beside the copy to CPU memory."""
    save_factor: float = 1.0
    restart_seconds: float
    """From a failure until the next start reads its checkpoint."""
    restart_factor: float = 1.0
    requeue_seconds: float = 0.0
    """Part of that in which it waits for another node; a spare one has no such wait."""
    in_background: bool = True
    """Whether checkpoints are written while training goes on."""

    def __post_init__(self) -> None:
        for name in ("gpu_mtbf_seconds", "node_mtbf_seconds"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be above 0, not {getattr(self, name)!r}")
        require_positive(
            write_bytes_per_second=self.write_bytes_per_second,
            read_bytes_per_second=self.read_bytes_per_second,
        )
        for name in ("mtbf_factor", "storage_factor", "save_factor", "restart_factor"):
            if not 1 <= getattr(self, name) < inf:
                raise SpecError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("save_seconds", "restart_seconds", "requeue_seconds"):
            if not 0 <= getattr(self, name) < inf:
                raise SpecError(f"{name} must be at least 0, not {getattr(self, name)!r}")
        if self.requeue_seconds > self.restart_seconds:
            raise SpecError(
                f"the wait for a node, {self.requeue_seconds:g} s, is part of a restart, which "
                f"takes {self.restart_seconds:g} s: raise the restart, or lower the wait"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """What a run meets: how often it fails, and what each save and restart take of it."""

    failures_per_second: float
    blocking_seconds: float
    """In which a save stops training."""
    writing_seconds: float
    """From there until it is published, while training goes on."""
    restart_seconds: float
    """From a failure until training goes on from what was published."""

    def cycle_seconds(self, interval_seconds: float) -> float:
        """From one save to the next."""
        return max(interval_seconds, self.writing_seconds) + self.blocking_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the time goes; the parts add up to 1."""

    kept: float
    """Steps that count: the goodput."""
    saving: float
    """Training waits for a save."""
    redone: float
    """What a failure took: steps, and their saves, since what was published."""
    restarting: float
    """From failures until training goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What failures leave of one plan's time."""

    fraction: Interval
    """Of the time that goes into steps which are kept."""
    every_steps: int
    """Steps between saves."""
    interval_seconds: float
    """The same, of training."""
    shares: Shares
    """Where the time goes."""
    mtbf_seconds: float
    """Between failures of the job; infinite: there are none."""
    checkpoint_bytes: int
    """Of one checkpoint, over all ranks."""
    blocking_seconds: float
    """In which a save stops training."""
    writing_seconds: float
    """From there until it is published, while training goes on."""
    restart_seconds: float
    """From a failure until training goes on from what was published."""
    spares: int | None = None
    """Nodes more in the allocation that are worth their price; None: nobody said how long it waits
    for another node."""
    spares_gain_fraction: float = 0.0
    """Kept steps for each node of the allocation: more than without spares, over it."""


def failures_per_second(reliability: Reliability, *, gpus: int, nodes: int) -> float:
    """Of a job that any of its GPUs and nodes ends."""
    return gpus / reliability.gpu_mtbf_seconds + nodes / reliability.node_mtbf_seconds


def time_shares(run: Interruptions, interval_seconds: float) -> Shares:
    """Where the time goes of a run that saves each `interval_seconds` of training."""
    cycle, rate = run.cycle_seconds(interval_seconds), run.failures_per_second
    if rate == 0:
        return Shares(
            kept=interval_seconds / cycle,
            saving=1 - interval_seconds / cycle,
            redone=0.0,
            restarting=0.0,
        )
    first = interval_seconds + run.blocking_seconds + run.writing_seconds
    sees_first = rate * exp(-rate * (run.restart_seconds + first))
    cycles = sees_first / -expm1(-rate * cycle)
    stopped = cycle - interval_seconds
    kept = cycles * interval_seconds
    # no save is under way when the first one begins
    saving = cycles * stopped - sees_first * (stopped - run.blocking_seconds)
    restarting = -expm1(-rate * run.restart_seconds)
    return Shares(
        kept=kept,
        saving=saving,
        redone=max(0.0, 1 - kept - saving - restarting),
        restarting=restarting,
    )


def goodput_fraction(run: Interruptions, interval_seconds: float) -> float:
    """Share of the time that goes into steps which are kept."""
    return time_shares(run, interval_seconds).kept


def best_interval_seconds(run: Interruptions) -> float:
    """The interval of most goodput; infinite without failures.

    Not shorter than a save is written, where the next one would wait for it, unless failures come
    faster than saves are written.
    """
    rate = run.failures_per_second
    if rate == 0:
        return inf
    blocked = rate * run.blocking_seconds
    # x + exp(-(x + blocked)) - 1 grows with x, and so does its slope: Newton comes from above
    grown = 1.0
    for _ in range(NEWTON_STEPS):
        slope = -expm1(-(grown + blocked))
        if slope <= 0:
            break
        grown = max(0.0, grown - (grown + expm1(-(grown + blocked))) / slope)
    return max(grown / rate, min(run.writing_seconds, 1 / rate))


def best_every_steps(run: Interruptions, step_seconds: float, *, most: int = 10**9) -> int:
    """The number of steps between saves of most goodput, at most `most`."""
    steps = best_interval_seconds(run) / step_seconds
    below = most if steps >= most else max(1, int(steps))
    return max((below, min(most, below + 1)), key=lambda n: goodput_fraction(run, n * step_seconds))


def rank_checkpoint_bytes(case: Case) -> int:
    """What the fullest rank holds of it."""
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    states = (rank_state(case, stage) for stage in stages)
    return max(each.parameters + each.optimizer for each in states)


def read_bytes(case: Case) -> int:
    """What all ranks together read at a restart: the checkpoint once, for its checksums, then each
    rank its own part.

    Source: fsdpplan.trainer.checkpoint.runs, `Checkpoints.begin`.
    """
    return checkpoint_bytes(case) + case.layout.world * rank_checkpoint_bytes(case)


def interruptions(case: Case, reliability: Reliability) -> Interruptions:
    """What a run of `case` meets. Saved in the background, ranks wait for the copy of their parts
    to CPU memory, and for each other; otherwise for all of the writing."""
    writing = checkpoint_bytes(case) / reliability.write_bytes_per_second
    copying = rank_checkpoint_bytes(case) / link_bytes_per_second(case.cluster)
    in_background = reliability.in_background
    return Interruptions(
        failures_per_second=failures_per_second(
            reliability, gpus=case.cluster.gpus, nodes=case.cluster.nodes
        ),
        blocking_seconds=copying + reliability.save_seconds if in_background else writing,
        writing_seconds=writing if in_background else 0.0,
        restart_seconds=reliability.restart_seconds
        + read_bytes(case) / reliability.read_bytes_per_second,
    )


def goodput(
    case: Case, estimate: Estimate, reliability: Reliability, *, every_steps: int | None = None
) -> Goodput:
    """What failures leave of a run of `case`, which saves each `every_steps`; None: as is best.

    The band takes what is not known one by one, and adds up in squares what it does to the loss.
    """
    run, step = interruptions(case, reliability), estimate.step_seconds.expected
    every = best_every_steps(run, step) if every_steps is None else every_steps
    interval = every * step
    shares = time_shares(run, interval)
    loss = max(1 - shares.kept, 1e-12)
    worse, better = 0.0, 0.0
    for lower, upper in _otherwise(reliability):
        low = 1 - goodput_fraction(interruptions(case, lower), interval)
        high = 1 - goodput_fraction(interruptions(case, upper), interval)
        worse = hypot(worse, max(0.0, log(max(low, 1e-12) / loss)))
        better = hypot(better, max(0.0, log(loss / max(high, 1e-12))))
    rate = run.failures_per_second
    spares, gain = None, 0.0
    if reliability.requeue_seconds and rate:
        spares, gain = worthwhile_spares(
            run, interval, nodes=case.cluster.nodes, requeue_seconds=reliability.requeue_seconds
        )
    return Goodput(
        fraction=Interval(
            lower=max(0.0, 1 - min(1.0, loss * exp(worse))),
            expected=shares.kept,
            upper=max(shares.kept, 1 - loss * exp(-better)),
        ),
        every_steps=every,
        interval_seconds=interval,
        shares=shares,
        mtbf_seconds=inf if rate == 0 else 1 / rate,
        checkpoint_bytes=checkpoint_bytes(case),
        blocking_seconds=run.blocking_seconds,
        writing_seconds=run.writing_seconds,
        restart_seconds=run.restart_seconds,
        spares=spares,
        spares_gain_fraction=gain,
    )


def _otherwise(known: Reliability) -> Iterator[tuple[Reliability, Reliability]]:
    """(worse, better) for each number that is not known."""
    for names, factor in (
        (("gpu_mtbf_seconds", "node_mtbf_seconds"), known.mtbf_factor),
        (("write_bytes_per_second", "read_bytes_per_second"), known.storage_factor),
        (("save_seconds",), 1 / known.save_factor),
        (("restart_seconds",), 1 / known.restart_factor),
    ):
        worse = {name: getattr(known, name) / factor for name in names}
        better = {name: getattr(known, name) * factor for name in names}
        if "restart_seconds" in names:
            better["requeue_seconds"] = min(known.requeue_seconds, better["restart_seconds"])
        yield replace(known, **worse), replace(known, **better)


DAY_SECONDS = 86_400.0


def worthwhile_spares(
    run: Interruptions,
    interval_seconds: float,
    *,
    nodes: int,
    requeue_seconds: float,
    allocation_seconds: float = DAY_SECONDS,
) -> tuple[int, float]:
    """(spare nodes of an allocation that keep most steps a node, how much more than none keep).

    Of the failures in an allocation the first ones take a spare node each and do not wait; those
    behind them do. With s spares

        waiting share = E[max(failures - s, 0)] / E[failures]

    Assumes that a failed node does not come back within the allocation.
    """
    expected = run.failures_per_second * allocation_seconds

    def kept_a_node(spares: int) -> float:
        waiting = _expected_beyond(spares, expected) / expected
        restart = run.restart_seconds - (1 - waiting) * requeue_seconds
        faster = replace(run, restart_seconds=restart)
        return goodput_fraction(faster, interval_seconds) * nodes / (nodes + spares)

    none, best = kept_a_node(0), max(range(MOST_SPARES + 1), key=kept_a_node)
    return best, 0.0 if none == 0 else kept_a_node(best) / none - 1


def _expected_beyond(spares: int, expected: float) -> float:
    """E[max(N - spares, 0)] of N failures, Poisson with this mean: the mean, less the chances to
    have more than 0, 1, .. `spares` - 1 of them."""
    chance, at_most, left = exp(-expected), 0.0, expected
    for number in range(spares):
        at_most += chance
        left -= max(0.0, 1 - at_most)
        chance *= expected / (number + 1)
    return max(0.0, left)
