"""Likeness: the covariance of log(measured / predicted) of two jobs, before anything is measured.

What a stack does beyond the model is shared by its runs, by the parts that a step is made of, by
seconds that every step and micro-batch takes, and more by jobs that are near to each other:

    k(a, b) = ρ(a, b) · [stack² + Σ_k s_a,k s_b,k part_k² + log(1 + c/T_a) log(1 + c/T_b)
              + log(1 + m n_a/T_a) log(1 + m n_b/T_b) + near² exp(-½ Σ_p d_p² / reach_p²)]
              + job² [a and b are one job]

ρ is 1 within a stack; each of another software, number format or device multiplies it. A sum and a
product of kernels is one: Rasmussen and Williams 2006, *Gaussian Processes for Machine Learning*,
section 4.2.4.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import TYPE_CHECKING

from fsdpplan.spec.ledger import Widths
from fsdpplan.validate.learn.features import HOST_LOGS, KINDS, PLACES, Features

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Several jobs as columns."""

    features: tuple[Features, ...]

    @cached_property
    def seconds(self) -> Numbers:
        import numpy as np

        return np.array([one.seconds for one in self.features])

    @cached_property
    def micro_batches(self) -> Numbers:
        import numpy as np

        return np.array([float(one.num_microbatches) for one in self.features])

    @cached_property
    def shares(self) -> Numbers:
        import numpy as np

        return np.array([one.shares for one in self.features])

    @cached_property
    def delays(self) -> Numbers:
        import numpy as np

        return np.array([one.delays for one in self.features])

    @cached_property
    def places(self) -> tuple[Numbers, ...]:
        import numpy as np

        return tuple(
            np.array([one.places[group] for one in self.features]) for group in range(len(PLACES))
        )

    def named(self, name: str) -> tuple[Hashable, ...]:
        """What each is, of `software`, `precision`, `device` and `job`."""
        if name == "job":
            return tuple(one.job for one in self.features)
        if name == "software":
            return tuple((one.stack.software, one.stack.runtime) for one in self.features)
        return tuple(getattr(one.stack, name) for one in self.features)


def jobs_of(features: Sequence[Features]) -> Jobs:
    """Those jobs."""
    return Jobs(features=tuple(features))


def likeness(one: Jobs, other: Jobs, widths: Widths) -> Numbers:
    """Covariance of each of `one` with each of `other`; what only one run has is left out."""
    import numpy as np

    shared = widths.stack**2 + _near(one, other, widths)
    shared = shared + np.outer(_step(one, widths), _step(other, widths))
    shared = shared + np.outer(_micro(one, widths), _micro(other, widths))
    parts = np.array([getattr(widths, kind) ** 2 for kind in KINDS])
    shared = shared + (one.shares * parts) @ other.shares.T
    own = widths.job**2 * _same(one, other, "job")
    found: Numbers = stack_correlation(one, other, widths) * shared + own
    return found


def own_likeness(jobs: Jobs, widths: Widths) -> Numbers:
    """Variance of each job: the diagonal of `likeness`."""
    import numpy as np

    parts = np.array([getattr(widths, kind) ** 2 for kind in KINDS])
    shared = widths.stack**2 + widths.near**2 + jobs.shares**2 @ parts + widths.job**2
    found: Numbers = shared + _step(jobs, widths) ** 2 + _micro(jobs, widths) ** 2
    return found


def slopes(jobs: Jobs, widths: Widths) -> dict[str, Numbers]:
    """How `likeness` among jobs of one stack grows with the logarithm of each width."""
    import numpy as np

    found: dict[str, Numbers] = {
        "stack": np.full((len(jobs.features),) * 2, 2 * widths.stack**2),
        "job": 2 * widths.job**2 * _same(jobs, jobs, "job"),
    }
    for column, kind in zip(jobs.shares.T, KINDS, strict=True):
        found[kind] = 2 * getattr(widths, kind) ** 2 * np.outer(column, column)
    near = _near(jobs, jobs, widths)
    found["near"] = 2 * near
    for place, at in zip(PLACES, jobs.places, strict=True):
        name = f"{place}_reach"
        found[name] = near * _squares(at, at) / getattr(widths, name) ** 2
    for name, fixed in (("step_seconds", _step), ("micro_batch_seconds", _micro)):
        weight = fixed(jobs, widths)
        one = np.outer(weight, -np.expm1(-weight))  # x / (1 + x) of log(1 + x)
        found[name] = one + one.T
    return found


def host_chances(widths: Widths) -> Numbers:
    """Of each of `HOST_LOGS`, before anything is measured: log-normal, they add up to 1."""
    import numpy as np

    chances = np.exp(-(_off_middle(widths) ** 2) / 2)
    found: Numbers = chances / chances.sum()
    return found


def host_slopes(widths: Widths) -> dict[str, Numbers]:
    """How the logs of `host_chances` grow with the logarithm of each width that they have."""
    chances, off = host_chances(widths), _off_middle(widths)
    return {
        "host": off**2 - float(chances @ off**2),
        "host_factor": (off - float(chances @ off)) / widths.host,
    }


def _off_middle(widths: Widths) -> Numbers:
    """Of `HOST_LOGS`, in deviations."""
    import numpy as np

    off: Numbers = (np.array(HOST_LOGS) - log(widths.host_factor)) / widths.host
    return off


def stack_correlation(one: Jobs, other: Jobs, widths: Widths) -> Numbers:
    """ρ: 1 within a stack."""

    def factor(name: str, share: float) -> Numbers:
        return share + (1 - share) * _same(one, other, name)

    software = factor("software", widths.other_software)
    precision = factor("precision", widths.other_precision)
    return software * precision * factor("device", widths.other_device)


def _near(one: Jobs, other: Jobs, widths: Widths) -> Numbers:
    import numpy as np

    distance = np.zeros((len(one.features), len(other.features)))
    for place, a, b in zip(PLACES, one.places, other.places, strict=True):
        reach = getattr(widths, f"{place}_reach")
        distance += _squares(a, b) / reach**2
    found: Numbers = widths.near**2 * np.exp(-0.5 * distance)
    return found


def _squares(one: Numbers, other: Numbers) -> Numbers:
    """Squared distance of each of `one` from each of `other`."""
    found: Numbers = ((one[:, None, :] - other[None]) ** 2).sum(-1)
    return found


def _step(jobs: Jobs, widths: Widths) -> Numbers:
    import numpy as np

    found: Numbers = np.log1p(widths.step_seconds / jobs.seconds)
    return found


def _micro(jobs: Jobs, widths: Widths) -> Numbers:
    import numpy as np

    found: Numbers = np.log1p(widths.micro_batch_seconds * jobs.micro_batches / jobs.seconds)
    return found


def _same(one: Jobs, other: Jobs, name: str) -> Numbers:
    """1 where the two are the same in `name`."""
    import numpy as np

    codes: dict[Hashable, int] = {}
    a, b = (
        np.array([codes.setdefault(value, len(codes)) for value in side.named(name)])
        for side in (one, other)
    )
    found: Numbers = (a[:, None] == b[None]).astype(float)
    return found
