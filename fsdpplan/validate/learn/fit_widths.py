"""Fit the widths of learning to held-back residuals.

    python -m fsdpplan.validate.learn.fit_widths [--date YYYY-MM-DD]

Each row of `held_out.json` was predicted with constants fitted without its project, as a stranger's
run would be. Their log(measured / predicted) are, project by project, draws of the process: the
widths are those under which they are likeliest, with a wide prior around a start (a factor of 2.2
either way), since a dozen projects cannot tell every width. n rows of a project weigh n^0.7: sweeps
of hundreds of layouts of one code are not hundreds of stacks.

Two are not fitted. Software: projects of different software have residuals that tell nothing of
each other (the likelihood is flat from 0 to 0.1 and falls above), so the share stands at 0.1. What
one run shares with no other of its job: half of the pairs of rows that say the same of themselves
differ by less than 2 %, which is 0.02; the tail is of rows that differ in what no column says.

Needs scipy, as the development environment has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp, lgamma, log, pi
from typing import TYPE_CHECKING

from fsdpplan.files.bundled import bundled_runs
from fsdpplan.files.learning import write_widths
from fsdpplan.files.runs import MeasuredRun, read_runs
from fsdpplan.spec.learning import Widths
from fsdpplan.spec.ledger import Job
from fsdpplan.validate.express import Expressed, express
from fsdpplan.validate.fabric import load_request
from fsdpplan.validate.held_out import HELD_OUT, HeldOutRow, read_held_out
from fsdpplan.validate.learn.evidence import stack_of
from fsdpplan.validate.learn.known import PricedRun, as_priced, jobs_among
from fsdpplan.validate.learn.likeness import Jobs, jobs_of, likeness
from fsdpplan.validate.predict import Prediction, predict
from fsdpplan.validate.projects import tells_of_hardware

if TYPE_CHECKING:
    from fsdpplan.validate.learn.likeness import Numbers

START = Widths(
    stack=0.12,
    matmul=0.1,
    attention=0.2,
    element_wise=0.2,
    launch=0.3,
    inside=0.3,
    across=0.4,
    bubble=0.3,
    step_seconds=0.005,
    micro_batch_seconds=0.002,
    near=0.1,
    gpus_reach=1.5,
    degrees_reach=1.0,
    batch_reach=1.5,
    model_reach=1.0,
    policy_reach=1.0,
    job=0.04,
    run=0.02,
    other_software=0.1,
    other_precision=0.7,
    other_device=0.7,
    degrees_of_freedom=7.0,
)
"""Where the fit begins, and the middle of its prior."""

SHARES = ("other_precision", "other_device")
"""Fitted by their log odds."""
KEPT = ("other_software", "run")
"""Held, not fitted: the likelihood is flat in the first up to 0.1 (nanotron and LiBai apart, which
share a bias), and few ran one job twice."""
LEAST_DEGREES = 2.05
"""Of freedom: below 2 a Student t has no variance."""
PRIOR = 0.8
"""Standard deviation of the logarithm of a width around its start."""
ROWS_POWER = 0.7
MOST_ROWS = 80
"""Of a project, evenly over its rows; more cost time and hardly change the fit."""
MOST_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """One run beside its prediction by constants that its project had no part in."""

    project: str
    run: PricedRun


def held_back(rows: Iterable[HeldOutRow], runs: Sequence[MeasuredRun]) -> list[HeldBack]:
    """The held-out rows as the learner sees them; poorly tuned layouts are left out."""
    found = []
    for row in rows:
        run = runs[row.row]
        expressed = express(run)
        if not tells_of_hardware(run) or not isinstance(expressed, Expressed):
            continue
        predicted, stack = predict(expressed), stack_of(run, expressed)
        if not isinstance(predicted, Prediction) or stack is None:
            continue
        gpus = load_request(expressed.cluster_request).gpus
        job = Job(model=expressed.model, training=expressed.training, layout=predicted.layout)
        seconds = row.measured_step_seconds
        one = as_priced(job, gpus=gpus, time=row.time, stack=stack, step_seconds=seconds)
        found.append(HeldBack(project=row.project, run=one))
    return found


def bundled_held_back() -> list[HeldBack]:
    """Those of the published runs that come with the repository."""
    table = bundled_runs()
    return held_back(read_held_out(table.parent / HELD_OUT).rows, read_runs(table))


def loss(widths: Widths, projects: Mapping[str, Sequence[HeldBack]]) -> float:
    """Minus the logarithm of the likelihood, weighed, and of the prior; least is best."""
    blocks = {name: _block(rows) for name, rows in projects.items()}
    return _loss(widths, blocks)


def by_project(rows: Iterable[HeldBack]) -> dict[str, list[HeldBack]]:
    """At most `MOST_ROWS` of each project."""
    found: dict[str, list[HeldBack]] = {}
    for row in rows:
        found.setdefault(row.project, []).append(row)
    return {name: some[:: -(-len(some) // MOST_ROWS)] for name, some in found.items()}


def fit(projects: Mapping[str, Sequence[HeldBack]]) -> Widths:
    """The likeliest widths."""
    from scipy import optimize

    blocks = {name: _block(rows) for name, rows in projects.items()}
    start = _point(START)
    best = optimize.minimize(
        lambda point: _loss(_widths(point), blocks),
        start,
        method="L-BFGS-B",
        options={"maxiter": MOST_ROUNDS},
    )
    return _widths(list(best.x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One project."""

    jobs: Jobs
    measured: Numbers
    """log(measured / predicted) of each job."""
    runs: Numbers


def _block(rows: Sequence[HeldBack]) -> Block:
    import numpy as np

    jobs = jobs_among([row.run for row in rows])
    return Block(
        jobs=jobs_of([job.features for job in jobs]),
        measured=np.array([job.log_ratio for job in jobs]),
        runs=np.array([float(job.runs) for job in jobs]),
    )


def _loss(widths: Widths, blocks: Mapping[str, Block]) -> float:
    total = 0.0
    for block in blocks.values():
        total += _surprise(block, widths) * float(len(block.measured)) ** (ROWS_POWER - 1)
    pairs = zip(_point(widths), _point(START), strict=True)
    return total + sum(((one - start) / PRIOR) ** 2 for one, start in pairs) / 2


def _surprise(block: Block, widths: Widths) -> float:
    """Minus the log density of a multivariate Student t (Shah et al. 2014, equation 4)."""
    import numpy as np

    rows, degrees = len(block.measured), widths.degrees_of_freedom
    covariance = likeness(block.jobs, block.jobs, widths) + np.diag(widths.run**2 / block.runs)
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(rows))
    white = np.linalg.solve(root, block.measured)
    far = float(np.log1p(white @ white / (degrees - 2)))
    return (
        lgamma(degrees / 2)
        - lgamma((degrees + rows) / 2)
        + rows / 2 * log((degrees - 2) * pi)
        + float(np.log(np.diag(root)).sum())
        + (degrees + rows) / 2 * far
    )


def _point(widths: Widths) -> list[float]:
    """The fitted widths on scales without ends."""
    return [_scaled(name, getattr(widths, name)) for name in _fitted()]


def _widths(point: Sequence[float]) -> Widths:
    values = {name: _unscaled(name, value) for name, value in zip(_fitted(), point, strict=True)}
    kept = {name: getattr(START, name) for name in KEPT}
    return Widths(**values, **kept)


def _fitted() -> list[str]:
    return [field.name for field in fields(Widths) if field.name not in KEPT]


def _scaled(name: str, value: float) -> float:
    if name in SHARES:
        return log(value / (1 - value))
    return log(value - (LEAST_DEGREES if name == "degrees_of_freedom" else 0.0))


def _unscaled(name: str, value: float) -> float:
    if name in SHARES:
        return 1 / (1 + exp(-value))
    return exp(value) + (LEAST_DEGREES if name == "degrees_of_freedom" else 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the widths, and write them."""
    parser = argparse.ArgumentParser(description="Fit the widths of learning.")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    rows = bundled_held_back()
    projects = by_project(rows)
    widths = fit(projects)
    values = {field.name: getattr(widths, field.name) for field in fields(Widths)}
    source = (
        f"by fsdpplan.validate.learn.fit_widths: {len(rows)} held-back rows of {len(projects)} "
        f"projects, loss {loss(widths, projects):.1f}; held are {' and '.join(KEPT)}"
    )
    write_widths(values, source=source, date=options.date)
    print(f"wrote learning.toml: {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
