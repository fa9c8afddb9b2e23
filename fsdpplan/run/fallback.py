"""After a run that ran out of memory: the next layout to try, and trying it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdpplan.emit.job import Job
from fsdpplan.run.launch import Launch, emit_script, program_problem
from fsdpplan.run.ledger import ran_out_of_memory
from fsdpplan.run.outcome import Outcome
from fsdpplan.search.advice.ladder import Rung, leaner_layouts
from fsdpplan.spec.plan import Plan, assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of several."""

    launch: Launch
    outcome: Outcome
    next_layout: Rung | None
    """What to try after it; None where memory did not run out, or nothing leaner is left."""


def run_with_fallback(
    launch: Launch,
    *,
    job: Job | None,
    most: int,
    run: Callable[[Launch], Outcome],
    say: Callable[[str], None],
) -> tuple[Attempt, ...]:
    """Run `launch`; where memory runs out, run leaner layouts, `most` of them, as the same `job`.

    The global batch stays. With a checkpoint folder among the job's options each attempt goes on
    from the newest checkpoint, which is resharded as it is read.
    """
    attempts = [attempted(launch, run(launch), job)]
    while len(attempts) <= most and (rung := attempts[-1].next_layout) is not None:
        assert job is not None
        leaner = with_layout(attempts[-1].launch, rung, job)
        say(f"out of memory; attempt {len(attempts) + 1} of at most {most + 1}: {rung.words}")
        attempts.append(attempted(leaner, run(leaner), job))
    return tuple(attempts)


def attempted(launch: Launch, outcome: Outcome, job: Job | None) -> Attempt:
    """A run that has ended, with what to try next."""
    rung = next_layout(launch.plan, outcome, job)
    return Attempt(launch=launch, outcome=outcome, next_layout=rung)


def next_layout(plan: Plan, outcome: Outcome, job: Job | None) -> Rung | None:
    """The fastest layout that is predicted to need less than what there is, and that the job's
    program can run."""
    if not outcome.ended or not ran_out_of_memory(outcome):
        return None
    event = outcome.measured.out_of_memory
    rungs = leaner_layouts(plan, needed_bytes=None if event is None else event.needed_bytes)
    runs = (
        rung for rung in rungs if job is None or program_problem(rung.layout, plan, job) is None
    )
    return next(runs, None)


def with_layout(launch: Launch, rung: Rung, job: Job) -> Launch:
    """The same job in another layout."""
    said = assumed(launch.plan.assumptions, model=launch.plan.model, layout=rung.layout)
    plan = replace(
        launch.plan,
        layout=rung.layout,
        estimate=rung.estimate,
        alternatives=(),
        assumptions=said,
    )
    origin = f"{launch.origin}, with {rung.words}"
    return Launch(script=emit_script(plan, job), plan=plan, origin=origin)
