"""What measured runs say of the question that is asked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fsdpplan.cli.options.files import EvidenceOptions, LedgerOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.errors import SpecError
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.spec.cluster import Cluster, LearnedPeaks
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.units import format_percent

if TYPE_CHECKING:
    from fsdpplan.validate.learn.evidence import MeasuredRow
    from fsdpplan.validate.learn.learner import Learner

One = TypeVar("One")
LEAST_SAID = 0.005
"""Of a peak: by less, it is as predicted."""


def ledger_file(options: LedgerOptions) -> Path | None:
    """The ledger to use; None where none is wanted."""
    if options.no_ledger and options.ledger is not None:
        raise SpecError("--ledger and --no-ledger contradict each other: give one of them")
    if options.no_ledger:
        return None
    from fsdpplan.files.ledger import ledger_path

    return ledger_path(options.ledger)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """What the user's runs say."""

    learner: Learner | None = None
    """Of step times; None: nothing."""
    peaks: LearnedPeaks | None = None
    """Of peaks of memory; None: nothing."""


def resolve_runs(
    options: EvidenceOptions, *, model: Model, cluster: Cluster, training: Training
) -> Resolved[OwnRuns]:
    """What is learned from the ledger's runs and from those that are named."""
    if training.precision_switch != "none":
        words = (
            "step times as the cost model has them: runs tell of one precision, and this changes"
        )
        return Resolved(value=OwnRuns(), assumptions=(words,))
    kept = _kept(options)
    named = [] if options.runs is None else _named(options.runs)
    if not kept.value and not named:
        return Resolved(value=OwnRuns(), warnings=kept.warnings)
    asked = Question(model=model, cluster=cluster, training=training, pins=Pins())
    own, said = own_runs(kept.value, named, asked, software=options.software)
    sentences = _learned_words(own)
    return Resolved(
        value=own,
        assumptions=(*sentences, *([said] if said and sentences else [])),
        warnings=kept.warnings,
    )


def own_runs(
    kept: list[MeasuredRow], named: list[MeasuredRow], asked: Question, *, software: str | None
) -> tuple[OwnRuns, str | None]:
    """(what rows of the ledger, and those that are named beside it, say of a question; which
    software they are taken to be of, where that was assumed)."""
    from fsdpplan.files.learning import load_widths
    from fsdpplan.validate.learn.evidence import asked_software, told
    from fsdpplan.validate.learn.features import Stack
    from fsdpplan.validate.learn.learner import learner
    from fsdpplan.validate.learn.peaks import known_peaks, learned_peaks, told_peaks

    rows, cluster, training = [*kept, *named], asked.cluster, asked.training
    runs, peaks = _once(told, rows, len(kept)), _once(told_peaks, rows, len(kept))
    stacks = [one.stack for one in runs or peaks]
    name, said = asked_software(stacks, training, software)
    stack = Stack.of(software=name, training=training, device=cluster.device.name)
    widths = load_widths()
    own = OwnRuns(
        learner=learner(
            runs,
            model=asked.model,
            cluster=cluster,
            training=training,
            software=name,
            widths=widths,
        ),
        peaks=learned_peaks(
            known_peaks(peaks, stack, cluster), stack, fit=cluster.device.fit, widths=widths
        ),
    )
    return own, said


def with_peaks(cluster: Cluster, peaks: LearnedPeaks | None) -> Cluster:
    """`cluster`, whose device holds what runs say of its peaks."""
    return replace(cluster, device=replace(cluster.device, learned_peaks=peaks))


def _once(
    read: Callable[[list[MeasuredRow]], list[One]], rows: list[MeasuredRow], kept: int
) -> list[One]:
    """What `read` makes of `rows`: of those that are named what the ledger, whose rows are the
    first, does not have."""
    ours, named = read(rows[:kept]), read(rows[kept:])
    return [*ours, *(Counter(named) - Counter(ours)).elements()]


def _learned_words(own: OwnRuns) -> list[str]:
    words = []
    if own.learner is not None:
        softwares = ", ".join(own.learner.softwares)
        words.append(f"step times as {_runs_say(own.learner.runs)}, of {softwares}")
    if own.peaks is not None:
        off = exp(own.peaks.shift_log) - 1
        is_far = abs(off) >= LEAST_SAID
        shift = f"{format_percent(abs(off))} {'above' if off > 0 else 'below'}" if is_far else "as"
        words.append(f"peaks of memory {shift} predicted, as {_runs_say(own.peaks.runs)}")
    return [f"{one} (--runs, --no-ledger)" for one in words]


def _kept(options: LedgerOptions) -> Resolved[list[MeasuredRow]]:
    """The ledger's runs, or why there are none."""
    try:
        file = ledger_file(options)
    except SpecError as error:
        if options.ledger is not None:
            raise
        return Resolved(value=[], warnings=(f"past runs are not used: {error}",))
    if file is None:
        return Resolved(value=[])
    if not os.path.exists(file):
        if options.ledger is not None:
            raise SpecError(
                f"there is no ledger {file}: fsdpplan run makes it, and fsdpplan learn; leave "
                "--ledger out to plan without one"
            )
        return Resolved(value=[])
    from fsdpplan.files.ledger import read_rows

    try:
        return Resolved(value=[*read_rows(file)[0]])
    except SpecError as error:
        if options.ledger is not None:
            raise
        return Resolved(value=[], warnings=(f"past runs are not used: {error}",))


def kept_rows(options: LedgerOptions) -> list[MeasuredRow]:
    """The ledger's runs; none where there are none, or they cannot be read."""
    return _kept(options).value


def _named(path: Path) -> list[MeasuredRow]:
    from fsdpplan.run.evidence import rows_at
    from fsdpplan.validate.learn.evidence import told
    from fsdpplan.validate.learn.peaks import told_peaks

    rows = rows_at(path)
    if not told(rows) and not told_peaks(rows):
        raise SpecError(
            f"no run in {path} has a step time or a peak of memory that can be compared: fsdpplan "
            "validate says why of a table, fsdpplan learn of the others"
        )
    return rows


def _runs_say(runs: int) -> str:
    return f"{runs} measured run{' says' if runs == 1 else 's say'}"
