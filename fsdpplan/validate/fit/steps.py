"""Fit the constants of the step time to tables of measured runs.

    python -m fsdpplan.validate.fit.steps [--check] [--table RUNS.csv] [--date YYYY-MM-DD]

What is fitted: a few constants that every CUDA device shares, the pace of each family of
softwares, and for each device with rows what its kernels sustain. Nothing that ships belongs to a
source, a row or a model: each project has an effect of its own on all its steps, drawn to none
(partial pooling), so that constants answer for what projects have in common; it is thrown away. The
sum of squared log errors is made least, n rows of a project counting as sqrt(n), and far-off rows
with less than a square's (soft L1): a row that the model does not understand should not bend what
it does. The numbers go into `hardware_profiles` with how they were found; `--check` says whether
the profiles hold what a fresh fit gives.

A development tool: it needs SciPy and the repository's own profiles.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import copysign, exp, inf, log, sqrt
from pathlib import Path
from statistics import median

from fsdpplan.files.profiles.catalogue import (
    load_device,
    load_profile,
    profile_names,
    profile_text,
    profiles_folder,
)
from fsdpplan.files.profiles.devices import PHYSICS, PhysicsProfile
from fsdpplan.files.profiles.edit import with_numbers, with_source
from fsdpplan.files.runs.table import MeasuredRun, known_runs, read_runs
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.validate.compare.predict import Fits, Prediction, expected_seconds, predict_row
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request
from fsdpplan.validate.runs.projects import OWN, project_of, tells_of_hardware

SOFT_LOG_ERROR = 0.1
"""Log error past which a row's pull grows only linearly."""

PRIOR_LOG_ERROR = 0.2
"""Weight of what is expected of a constant: as a row that is off by this when the constant is off
by its spread."""

DIGITS = 4
"""Significant digits of a fitted number: more would not change a prediction by 0.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number to fit."""

    name: str
    """A field of DeviceFit."""
    device: str
    """Profile that it belongs to; `physics`: all CUDA devices share it."""
    expected: float
    """What kernels on their own, or the hardware's makers, let one expect."""
    spread: float
    """How far it may well be from that, as a standard deviation of its logarithm."""

    @property
    def key(self) -> str:
        """Profile and field."""
        return f"{self.device}.{self.name}"


SHARED = (
    Constant(name="overlap_slowdown_fraction", device=PHYSICS, expected=0.3, spread=0.5),
    Constant(name="kernel_launch_seconds", device=PHYSICS, expected=6e-6, spread=0.3),
    Constant(name="straggler_fraction", device=PHYSICS, expected=0.01, spread=0.5),
    Constant(name="megatron_pace", device=PHYSICS, expected=1.0, spread=0.1),
    Constant(name="early_megatron_pace", device=PHYSICS, expected=1.0, spread=0.1),
)

PACES = ("megatron_pace", "early_megatron_pace")
"""Families with several projects, beside PyTorch's, whose pace is 1; the mean of the three is taken
for softwares of which one project is known."""

FITTED_DEVICES = ("a100-sxm-80g", "h100-sxm-80g")
"""Devices with rows of several projects; others take their numbers from these."""

OWN_POWER = {"a100-sxm-40g": "a100-sxm-80g"}
"""Devices with rows of several projects that are another one's chip with another memory: what they
sustain under their power limit is their own, the rest that one's."""

OWN_STACK = {"b200-sxm-180g": ("gb200-186g", "b300-sxm-288g", "gb300-288g")}
"""A device of a generation of its own, and its relatives: their kernels are priced as those of the
fitted device that they take their numbers from, but softwares have had less time to follow."""

PROJECT_SPREAD = 0.14
"""Log time by which projects lie apart, robustly, in tables that nothing was fitted to: 28 sources
that were predicted from outside on 2026-11-27, at b06610f1."""


def device_constants(device: str) -> tuple[Constant, ...]:
    """What is fitted for one device. Its matmul ceiling comes from matmuls alone; where its kernels
    were measured on it, so do their rates, and steps tell what it sustains and what softwares of
    others lose."""
    stack = Constant(name="stack_fraction", device=device, expected=0.85, spread=0.15)
    if device in MEASURED_KERNELS:
        return (
            Constant(name="sustained_fraction", device=device, expected=0.95, spread=0.02),
            stack,
        )
    return (
        stack,
        Constant(name="attention_forward_fraction", device=device, expected=0.6, spread=0.15),
        Constant(name="memory_fraction", device=device, expected=0.85, spread=0.05),
    )


MEASURED_KERNELS = ("h100-sxm-80g",)
"""Devices on which the trainer's own kernels were timed, alone and in profiled steps."""

CONSTANTS = (
    *SHARED,
    *(one for device in FITTED_DEVICES for one in device_constants(device)),
    *(
        Constant(name="sustained_fraction", device=device, expected=0.95, spread=0.05)
        for device in OWN_POWER
    ),
    *(
        Constant(name="stack_fraction", device=device, expected=0.75, spread=0.15)
        for device in OWN_STACK
    ),
)
"""All that is fitted here. Matmul ceilings and links have rows of their own (`kernels`)."""

Values = Mapping[str, float]
"""Fitted numbers by `Constant.key`."""


@lru_cache(maxsize=1)
def relatives() -> Mapping[str, str]:
    """Each device profile that takes its numbers from a fitted one, with that one's name."""
    fitted_as = {name: load_device(name).fitted_as for name in profile_names("device")}
    return {name: base for name, base in fitted_as.items() if base in FITTED_DEVICES}


@lru_cache(maxsize=1)
def relative_shares() -> Mapping[str, Mapping[str, float]]:
    """For each fitted device's relatives, what share of its numbers they have, by field.

    1, but where a profile says otherwise: a lower power limit sustains less.
    """
    shares: dict[str, dict[str, float]] = {}
    for name, base in relatives().items():
        own, theirs = load_device(name).device.fit, load_device(base).device.fit
        shares[name] = {
            constant.name: getattr(own, constant.name) / getattr(theirs, constant.name)
            for constant in device_constants(base)
        }
    return shares


def fits_of(values: Values) -> Fits:
    """`values` as the numbers to predict with, also on the fitted devices' relatives."""
    physics = {one.name: values[one.key] for one in CONSTANTS if one.device == PHYSICS}
    physics["other_pace"] = other_pace(physics)
    devices = {
        device: {one.name: values[one.key] for one in device_constants(device)}
        for device in FITTED_DEVICES
    }
    for name, share in relative_shares().items():
        base = devices[relatives()[name]]
        devices[name] = {field: min(1.0, base[field] * share[field]) for field in share}
    for name in OWN_POWER:
        devices[name]["sustained_fraction"] = values[f"{name}.sustained_fraction"]
    for name, others in OWN_STACK.items():
        for one in (name, *others):
            devices[one]["stack_fraction"] = values[f"{name}.stack_fraction"]
    return Fits(physics=physics, devices=devices)


def other_pace(paces: Mapping[str, float]) -> float:
    """Of softwares of a family by themselves: the geometric mean of the families, PyTorch's 1."""
    mean = exp(sum(log(paces[name]) for name in PACES) / (len(PACES) + 1))
    return float(f"{mean:.{DIGITS}g}")


def profile_values() -> dict[str, float]:
    """The constants that the profiles hold now."""
    physics = load_profile(PHYSICS)
    assert isinstance(physics, PhysicsProfile)
    shared = dict(physics.fit)
    owners = (*FITTED_DEVICES, *OWN_POWER, *OWN_STACK)
    fits = {device: load_device(device).device.fit for device in owners}
    return {
        one.key: shared[one.name] if one.device == PHYSICS else getattr(fits[one.device], one.name)
        for one in CONSTANTS
    }


def log_errors(runs: Sequence[MeasuredRun], fits: Fits) -> list[float]:
    """log(predicted / measured) of each row, all of which can be predicted."""
    physics = tuple(fits.physics.items())
    devices = {name: tuple(numbers.items()) for name, numbers in fits.devices.items()}
    errors = []
    for run in runs:
        expressed = express(run)
        assert isinstance(expressed, Expressed)
        assert run.measured_step_seconds is not None
        own = devices.get(load_request(expressed.cluster_request).device.name, ())
        errors.append(log(_seconds(run, physics + own) / run.measured_step_seconds))
    return errors


@lru_cache(maxsize=2**14)
def _seconds(run: MeasuredRun, numbers: tuple[tuple[str, float], ...]) -> float:
    """Predicted step time of `run` with these numbers of its device.

    Remembered, for the constants of one device change nothing in the rows of another.
    """
    expressed = express(run)
    assert isinstance(expressed, Expressed)
    return expected_seconds(expressed, Fits(physics=dict(numbers)))


def usable_rows(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """Rows that can be fitted to: they tell of hardware and can be predicted."""
    rows = (run for run in runs if tells_of_hardware(run))
    return tuple(run for run in rows if isinstance(predict_row(run), Prediction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """How the log errors of rows change with the constants, about one point."""

    rows: tuple[MeasuredRun, ...]
    point: tuple[float, ...]
    errors: tuple[float, ...]
    """At that point."""
    columns: tuple[tuple[float, ...], ...]
    """Of each constant the change of all rows' errors, for one spread."""

    def without(self, project: str) -> Slopes:
        """The same of all other projects' rows."""
        kept = [i for i, run in enumerate(self.rows) if project_of(run.source_id) != project]
        return Slopes(
            rows=tuple(self.rows[i] for i in kept),
            point=self.point,
            errors=tuple(self.errors[i] for i in kept),
            columns=tuple(tuple(column[i] for i in kept) for column in self.columns),
        )


STEP = 0.1
"""Spreads by which a constant is moved for its slope."""

ROUNDS = 3
"""Slopes are taken anew so many times: the errors of rows are nearly straight in the logarithms."""


def fit(runs: Sequence[MeasuredRun], *, start: Values | None = None) -> dict[str, float]:
    """The constants of least error over `runs`, rounded to `DIGITS` digits."""
    return fitted(runs, start=start)[0]


def fitted(
    runs: Sequence[MeasuredRun], *, start: Values | None = None
) -> tuple[dict[str, float], Slopes]:
    """The same, with the slopes of the last round, from which fits to fewer rows follow."""
    rows = usable_rows(runs)
    values = dict(start) if start else {constant.key: constant.expected for constant in CONSTANTS}
    for _ in range(ROUNDS):
        slopes = slopes_at(rows, values)
        values = refitted(slopes)
    return values, slopes


def slopes_at(rows: tuple[MeasuredRun, ...], values: Values) -> Slopes:
    """Those about `values`, by differences."""
    point = _point(values)
    errors = log_errors(rows, fits_of(_at(point)))
    columns = []
    for index in range(len(CONSTANTS)):
        # towards what is less than all, where a share is near that
        step = -STEP if CONSTANTS[index].name.endswith("_fraction") else STEP
        moved = [one + (step if place == index else 0.0) for place, one in enumerate(point)]
        after = log_errors(rows, fits_of(_at(moved)))
        columns.append(tuple((b - a) / step for a, b in zip(errors, after, strict=True)))
    return Slopes(rows=rows, point=point, errors=tuple(errors), columns=tuple(columns))


def refitted(slopes: Slopes) -> dict[str, float]:
    """The constants of least error where errors go on as `slopes` say, with an effect of each
    project."""
    import numpy as np
    from scipy.optimize import least_squares  # a development dependency

    rows, known = slopes.rows, len(CONSTANTS)
    projects = list(dict.fromkeys(project_of(run.source_id) for run in rows))
    of_project = np.array([projects.index(project_of(run.source_id)) for run in rows])
    # what the trainer's own steps are off by is the device's
    has_effect = np.array([project != OWN for project in projects], dtype=float)
    weights, errors = np.array(_weights(rows)), np.array(slopes.errors)
    columns, origin = np.array(slopes.columns).T, np.array(slopes.point)

    def residuals(point: Sequence[float]) -> list[float]:
        moved = np.asarray(point)
        effects = PROJECT_SPREAD * has_effect * (moved[known:] - 1)
        left = errors + columns @ (moved[:known] - origin) - effects[of_project]
        scaled = (left / SOFT_LOG_ERROR) ** 2
        softened = np.sign(left) * np.sqrt(2 * SOFT_LOG_ERROR**2 * (np.sqrt(1 + scaled) - 1))
        both: list[float] = np.concatenate(
            [weights * softened, PRIOR_LOG_ERROR * (moved - 1)]
        ).tolist()
        return both

    lowest = [-inf] * (known + len(projects))
    highest = [_highest(one) for one in CONSTANTS] + [inf] * len(projects)
    begin = np.minimum([*slopes.point, *([1.0] * len(projects))], np.array(highest) - 1e-6)
    found = least_squares(residuals, begin, bounds=(lowest, highest), x_scale=1.0)
    return _values(found.x[:known])


def _highest(constant: Constant) -> float:
    """Where a share is 1."""
    is_share = constant.name.endswith("_fraction")
    return 1 + log(1 / constant.expected) / constant.spread if is_share else inf


def _point(values: Values) -> tuple[float, ...]:
    """1 where a constant is what is expected, 2 one spread above it."""
    return tuple(1 + log(values[one.key] / one.expected) / one.spread for one in CONSTANTS)


def _at(point: Sequence[float]) -> dict[str, float]:
    """Constants at `point`, as they are."""
    return {
        one.key: min(_most(one), one.expected * exp(one.spread * (at - 1)))
        for one, at in zip(CONSTANTS, point, strict=True)
    }


def _most(constant: Constant) -> float:
    return 1.0 if constant.name.endswith("_fraction") else inf


def loss(rows: Sequence[MeasuredRun], values: Values) -> float:
    """What `fit` makes least, at `values` and the best effect of each project."""
    from scipy.optimize import minimize_scalar  # a development dependency

    total = sum(
        (PRIOR_LOG_ERROR * log(values[one.key] / one.expected) / one.spread) ** 2
        for one in CONSTANTS
    )
    weighed: dict[str, list[tuple[float, float]]] = {}
    errors = log_errors(rows, fits_of(values))
    for run, weight, error in zip(rows, _weights(rows), errors, strict=True):
        weighed.setdefault(project_of(run.source_id), []).append((weight, error))
    for project, pairs in weighed.items():

        def of_effect(effect: float, pairs: list[tuple[float, float]] = pairs) -> float:
            own = sum((weight * _softened(error - effect)) ** 2 for weight, error in pairs)
            return own + (PRIOR_LOG_ERROR * effect / PROJECT_SPREAD) ** 2

        total += of_effect(0.0) if project == OWN else float(minimize_scalar(of_effect).fun)
    return total


def _weights(rows: Sequence[MeasuredRun]) -> list[float]:
    """A project's rows share its habits: n of them tell as much as sqrt(n) of as many projects."""
    counts = Counter(project_of(run.source_id) for run in rows)
    return [counts[project_of(run.source_id)] ** -0.25 for run in rows]


def _values(point: Sequence[float]) -> dict[str, float]:
    """Constants at `point`, rounded to `DIGITS`."""
    return {key: float(f"{value:.{DIGITS}g}") for key, value in _at(point).items()}


def _softened(error: float) -> float:
    """A residual whose square is the soft L1 loss of `error`."""
    scaled = (error / SOFT_LOG_ERROR) ** 2
    return copysign(sqrt(2 * SOFT_LOG_ERROR**2 * (sqrt(1 + scaled) - 1)), error)


def new_profiles(values: Values, *, how: str, date: str | None) -> dict[str, str]:
    """Text of each profile with the fitted numbers and how they were found, by name."""
    words = {"how": how, "from": "tests/golden/bench/train_runs.csv and the two beside it"}
    words |= {"date": date} if date else {}
    texts = {}
    places = {name: name for name in (PHYSICS, *FITTED_DEVICES, *OWN_POWER, *OWN_STACK)}
    places |= {one: name for name, others in OWN_STACK.items() for one in others}
    for place, device in places.items():
        numbers = {one.name: values[one.key] for one in CONSTANTS if one.device == device}
        if device == PHYSICS:
            numbers["other_pace"] = other_pace(numbers)
        texts[place] = with_source(with_numbers(profile_text(place), numbers), "step_fit", words)
    return texts


def how_fitted(runs: Sequence[MeasuredRun], values: Values) -> str:
    """A sentence on the fit."""
    rows = usable_rows(runs)
    sizes = [abs(error) for error in log_errors(rows, fits_of(values))]
    projects = len({project_of(run.source_id) for run in rows})
    return (
        f"by fsdpplan.validate.fit.steps: least soft-L1 log error of the step time over "
        f"{len(rows)} rows of {projects} projects, {len(CONSTANTS)} constants at once, each drawn "
        f"to what kernels alone let one expect, and an effect of each project, which is thrown "
        f"away; median error {100 * median(sizes):.1f} %, in-sample"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print the constants, and write the profiles or compare with them."""
    parser = argparse.ArgumentParser(description="Fit the step time's constants of the profiles.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")
    parser.add_argument("--table", type=Path, help="table of runs; the repository's if not given")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    runs = read_runs(options.table) if options.table else known_runs()
    values = fit(runs)
    how = how_fitted(runs, values)
    for constant in CONSTANTS:
        print(f"{constant.key:44} {values[constant.key]:.4g}")
    print(f"fitted: {len(CONSTANTS)} constants; {how}")
    texts = new_profiles(values, how=how, date=options.date)
    stale = [name for name, text in texts.items() if text != profile_text(name)]
    if options.check:
        print(f"stale: {', '.join(stale) or 'none'}")
        return 1 if stale else 0
    for name in stale:
        path = profiles_folder() / f"{name}.toml"
        write_text_atomically(path, texts[name], advice="the profiles of a checkout are written")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
