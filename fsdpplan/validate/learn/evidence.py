"""Evidence: measured runs, whichever way they came, and the stack of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpplan.files.runs.table import MeasuredRun, run_of_cells
from fsdpplan.spec.ledger import OWN_SOFTWARE, LedgerRow
from fsdpplan.spec.training import Training
from fsdpplan.validate.learn.features import Stack, runtime_family
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request
from fsdpplan.validate.runs.runtimes import software_of
from fsdpplan.validate.runs.skipped import NotExpressed

MeasuredRow: TypeAlias = LedgerRow | MeasuredRun
"""A run of `fsdpplan run`, or one of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One run that may be compared, before it is priced."""

    source: Expressed | LedgerRow
    stack: Stack
    step_seconds: float


def told(rows: Iterable[MeasuredRow]) -> list[Told]:
    """The rows that tell of speed and can be said in the planner's words, in their order."""
    found = (_told(row) for row in rows)
    return [one for one in found if one is not None]


def _told(row: MeasuredRow) -> Told | None:
    if isinstance(row, LedgerRow) and not row.cells:
        seconds = row.observed.step_seconds
        if seconds is None or not row.tells_speed:
            return None
        training, device = row.job.training, row.machines.device
        ours = Stack.of(software=row.software, training=training, device=device)
        return Told(source=row, stack=ours, step_seconds=seconds)
    run = run_of_cells(row.cells) if isinstance(row, LedgerRow) else row
    expressed, measured = express(run), run.measured_step_seconds
    if not isinstance(expressed, Expressed) or measured is None or not run.is_timed:
        return None
    stack = stack_of(run, expressed)
    return None if stack is None else Told(source=expressed, stack=stack, step_seconds=measured)


def stack_of(run: MeasuredRun, expressed: Expressed) -> Stack | None:
    """The stack of a row; None where no profile makes its cluster."""
    try:
        cluster = load_request(expressed.cluster_request)
    except NotExpressed:
        return None
    return Stack.of(
        software=software_name(run), training=expressed.training, device=cluster.device.name
    )


def software_name(run: MeasuredRun) -> str:
    """What trained: a software that is known, else the framework without version and remarks."""
    known = software_of(run)
    named = re.sub(r"\(.*?\)|\bv?\d[\w.]*", " ", run.framework)
    own = " ".join(named.split()).strip(" ,;/")
    return own if known.is_library and own else known.words


def asked_software(
    stacks: Sequence[Stack], training: Training, given: str | None
) -> tuple[str, str | None]:
    """(the software that a plan is for, what was assumed of that).

    `stacks` are those of the runs. It is the one that was named; else fsdpplan's own trainer where
    that has runs; else the one that most runs with that runtime are of: whoever shows his runs
    plans for the same program.
    """
    family = runtime_family(training.runtime)
    counts = Counter(one.software for one in stacks if one.runtime == family)
    if given is not None:
        named = {name.casefold(): name for name in counts}
        return named.get(given.casefold(), given), None
    if not counts or OWN_SOFTWARE in counts:
        return OWN_SOFTWARE, None
    ((most, _),) = counts.most_common(1)
    return most, f"your runs of {most} are of the software that this plan is for (--software)"
