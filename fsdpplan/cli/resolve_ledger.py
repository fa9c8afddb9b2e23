"""What measured runs say of the question that is asked."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpplan.cli.options import EvidenceOptions, LedgerOptions
from fsdpplan.cli.resolved import Resolved
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger_place import ledger_path
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

if TYPE_CHECKING:
    from fsdpplan.search.learned import Learner
    from fsdpplan.validate.learn.evidence import Told


def ledger_file(options: LedgerOptions) -> Path | None:
    """The ledger to use; None where none is wanted."""
    if options.no_ledger and options.ledger is not None:
        raise SpecError("--ledger and --no-ledger contradict each other: give one of them")
    return None if options.no_ledger else ledger_path(options.ledger)


def resolve_learner(
    options: EvidenceOptions, *, model: Model, cluster: Cluster, training: Training
) -> Resolved[Learner | None]:
    """Who has learned from the ledger's runs and from those that are named; None where there are
    none."""
    kept = _kept(options)
    named = [] if options.runs is None else _named(options.runs)
    runs = [*kept.value, *(Counter(named) - Counter(kept.value)).elements()]
    if not runs:
        return Resolved(value=None, warnings=kept.warnings)
    from fsdpplan.files.learning import load_widths
    from fsdpplan.validate.learn.evidence import asked_software
    from fsdpplan.validate.learn.learner import learner

    software, said = asked_software(runs, training, options.software)
    found = learner(
        runs,
        model=model,
        cluster=cluster,
        training=training,
        software=software,
        widths=load_widths(),
    )
    if found is None:
        return Resolved(value=None, warnings=kept.warnings)
    learned = f"step times as {_counted(found.runs)} say, of {', '.join(found.softwares)}"
    return Resolved(
        value=found,
        assumptions=(f"{learned} (--runs, --no-ledger)", *([said] if said else [])),
        warnings=kept.warnings,
    )


def _kept(options: LedgerOptions) -> Resolved[list[Told]]:
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
    from fsdpplan.validate.learn.evidence import told

    try:
        return Resolved(value=told(read_rows(file)[0]))
    except SpecError as error:
        if options.ledger is not None:
            raise
        return Resolved(value=[], warnings=(f"past runs are not used: {error}",))


def _named(path: Path) -> list[Told]:
    from fsdpplan.run.evidence import rows_at
    from fsdpplan.validate.learn.evidence import told

    found = told(rows_at(path))
    if not found:
        raise SpecError(
            f"no run in {path} has a step time that can be compared: fsdpplan validate says why of "
            "a table, fsdpplan learn of the others"
        )
    return found


def _counted(runs: int) -> str:
    return f"{runs} measured run{'' if runs == 1 else 's'}"
