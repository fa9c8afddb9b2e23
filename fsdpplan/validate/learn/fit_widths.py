"""Fit the widths of learning to held-back residuals.

    python -m fsdpplan.validate.learn.fit_widths [--date YYYY-MM-DD]

Each row of `held_out.json` was predicted with constants fitted without its project, as a stranger's
run would be. The widths are those under which rows of a stack are least surprising after 1, 3 and
10 others of it (`surprise.py`): that is what they are used for, and how the learner is judged. A
fit to the likelihood of all rows of a project at once asks more what a hundred runs would tell, and
gave bands half as wide again and errors larger by 0.3 points. Every stack counts alike,
as `STACK_ROWS` rows at each k, with a wide prior around a start (a factor of 2.2 either way), since
two dozen stacks cannot tell every width.

Six are not fitted. Software: projects of different software have residuals that tell nothing of
each other (their likelihood is flat from 0 to 0.1 and falls above), so the share stands at 0.1.
Number format and device: the likelihood of whole projects, those with several, was highest at 0.72
and 0.74; few have several, so 0.7. What one run shares with no other of its job: half of the pairs
of rows that say the same of themselves differ by less than 2 %, which is 0.02; the tail is of rows
that differ in what no column says. What runs of one job share with no other job: of 14 stacks that
were predicted from outside, the next job was off by 11 % in the median after any number of others,
where a band of noise alone held 60 %: no run of another job tells of it. A fit to the known tables
gives a fifth of that, for their sweeps are of jobs that are all alike. How far programs' hosts lie
apart: one project tells much of its own, and one cannot tell a spread; a factor of two either way,
as in the cost model.

Needs scipy, as the development environment has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log

from fsdpplan.cost.estimate import HOST_LOG_ERROR
from fsdpplan.files.learning import write_widths
from fsdpplan.files.runs.table import MeasuredRun, bundled_runs, known_runs
from fsdpplan.spec.ledger import Widths, Workload
from fsdpplan.validate.compare.predict import Prediction, predict
from fsdpplan.validate.fit.held_out import HELD_OUT, HeldOutRow, read_held_out
from fsdpplan.validate.learn.evidence import stack_of
from fsdpplan.validate.learn.features import Stack
from fsdpplan.validate.learn.known import PricedRun, as_priced
from fsdpplan.validate.learn.surprise import Drawn, drawn, surprise
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request
from fsdpplan.validate.runs.projects import HALF_AUTOCAST, tells_of_hardware

AFTER = (1, 3, 10)
"""Runs that are known."""
LEAST_TESTS = 4
"""Rows that must be left to predict."""

START = Widths(
    stack=0.12,
    matmul=0.1,
    attention=0.2,
    element_wise=0.2,
    launch=0.3,
    host=HOST_LOG_ERROR,
    host_factor=2.0,
    inside=0.3,
    across=0.4,
    bubble=0.3,
    step_seconds=0.01,
    micro_batch_seconds=0.002,
    near=0.1,
    gpus_reach=1.5,
    degrees_reach=1.0,
    batch_reach=1.5,
    model_reach=1.0,
    policy_reach=1.0,
    job=0.08,
    run=0.02,
    other_software=0.1,
    other_precision=0.7,
    other_device=0.7,
    degrees_of_freedom=7.0,
)
"""Where the fit begins, and the middle of its prior. A step reads its batch, logs and synchronizes
beside what is predicted, ten milliseconds or so; a micro-batch less. A program's host does what is
counted (`cost/kernels/compute.py`) and more: hooks, checks and kernels that Python starts are left
out there; as much again."""

KEPT = ("other_software", "other_precision", "other_device", "run", "host", "job")
"""Held, not fitted."""
LEAST_DEGREES = 2.05
"""Of freedom: below 2 a Student t has no variance."""
PRIOR = 0.8
"""Standard deviation of the logarithm of a width around its start."""
STACK_ROWS = 3.0
"""Rows that a stack counts for at each k: rows of one stack err together."""
MOST_ROWS = 60
"""Of a stack, evenly over its rows; more cost time and hardly change the fit."""
DRAWS = 6
"""Repeats with other known rows."""
MOST_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """One run beside its prediction by constants that its project had no part in."""

    project: str
    run: PricedRun


def held_back(rows: Iterable[HeldOutRow], runs: Sequence[MeasuredRun]) -> list[HeldBack]:
    """The held-out rows as the learner sees them; poorly tuned layouts are left out, and the script
    of which it is not said what ran in which number format.

    Which passes may wait for their host is by today's constants.
    """
    found = []
    for row in rows:
        run = runs[row.row]
        if row.project == HALF_AUTOCAST or not tells_of_hardware(run):
            continue
        expressed = express(run)
        if not isinstance(expressed, Expressed):
            continue
        predicted, stack = predict(expressed), stack_of(run, expressed)
        if not isinstance(predicted, Prediction) or stack is None:
            continue
        gpus = load_request(expressed.cluster_request).gpus
        job = Workload(model=expressed.model, training=expressed.training, layout=predicted.layout)
        seconds = row.measured_step_seconds
        today = predicted.time
        chance = today.launch_chance_seconds
        time = replace(row.time, launch_chance_seconds=chance, passes=today.passes)
        one = as_priced(job, gpus=gpus, time=time, stack=stack, step_seconds=seconds)
        found.append(HeldBack(project=row.project, run=one))
    return found


def bundled_held_back() -> list[HeldBack]:
    """Those of the published runs that come with the repository."""
    return held_back(read_held_out(bundled_runs().parent / HELD_OUT).rows, known_runs())


def by_stack(rows: Iterable[HeldBack]) -> dict[tuple[str, Stack], list[HeldBack]]:
    """The rows of each stack of each project."""
    found: dict[tuple[str, Stack], list[HeldBack]] = {}
    for row in rows:
        found.setdefault((row.project, row.run.features.stack), []).append(row)
    return found


def draws_of(rows: Iterable[HeldBack]) -> list[Drawn]:
    """What the fit goes by: each stack with enough rows, at most `MOST_ROWS` of it."""
    found = []
    for some in by_stack(rows).values():
        kept = [row.run for row in some[:: -(-len(some) // MOST_ROWS)]]
        ratios = [(run.features, log(run.step_seconds / run.features.seconds)) for run in kept]
        stack = drawn(ratios, draws=DRAWS, after=AFTER, least_tests=LEAST_TESTS)
        if stack.after:
            found.append(stack)
    return found


def loss(widths: Widths, stacks: Sequence[Drawn]) -> float:
    """Surprise of all stacks, and of the widths under their prior; least is best."""
    return _loss(_point(widths), stacks)[0]


def fit(stacks: Sequence[Drawn], start: Widths = START) -> Widths:
    """The widths under which `stacks` are least surprising, searched for from `start`."""
    from scipy import optimize

    best = optimize.minimize(
        lambda point: _loss(point, stacks),
        _point(start),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": MOST_ROUNDS},
    )
    return _widths(list(best.x))


def _loss(point: Sequence[float], stacks: Sequence[Drawn]) -> tuple[float, list[float]]:
    """(Loss, its slopes), at a point on scales without ends."""
    widths, names = _widths(point), _fitted()
    away = [one - middle for one, middle in zip(point, _point(START), strict=True)]
    total = sum((one / PRIOR) ** 2 for one in away) / 2
    slopes = [one / PRIOR**2 for one in away]
    for stack in stacks:
        value, by_width = surprise(stack, widths)
        total += STACK_ROWS * value
        for place, name in enumerate(names):
            scale = exp(point[place]) if name == "degrees_of_freedom" else 1.0
            slopes[place] += STACK_ROWS * scale * by_width[name]
    return total, slopes


def _point(widths: Widths) -> list[float]:
    """Logarithms of the fitted widths; of the degrees of freedom above their least number."""
    return [log(getattr(widths, name) - _least(name)) for name in _fitted()]


def _widths(point: Sequence[float]) -> Widths:
    values = {name: exp(value) + _least(name) for name, value in zip(_fitted(), point, strict=True)}
    kept = {name: getattr(START, name) for name in KEPT}
    return Widths(**values, **kept)


def _fitted() -> list[str]:
    return [field.name for field in fields(Widths) if field.name not in KEPT]


def _least(name: str) -> float:
    return LEAST_DEGREES if name == "degrees_of_freedom" else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the widths, and write them."""
    parser = argparse.ArgumentParser(description="Fit the widths of learning.")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    rows = bundled_held_back()
    stacks = draws_of(rows)
    widths = fit(stacks)
    values = {field.name: getattr(widths, field.name) for field in fields(Widths)}
    source = (
        f"by fsdpplan.validate.learn.fit_widths: {len(rows)} held-back rows, {len(stacks)} stacks, "
        f"loss {loss(widths, stacks):.1f}; held are {', '.join(KEPT)}"
    )
    write_widths(values, source=source, date=options.date)
    print(f"wrote learning.toml: {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
