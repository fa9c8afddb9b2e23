"""How a cluster fails and saves: what was said, what own runs say, and what was published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpplan.cli.options.failures import FailureOptions, GoodputOptions, given_failures
from fsdpplan.cli.options.files import LedgerOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.cost.goodput import Goodput, Reliability, goodput
from fsdpplan.run.known import known_reliability
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.spec.plan import Case, Estimate, Failures

if TYPE_CHECKING:
    from fsdpplan.validate.learn.saves import MeasuredSaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What failures leave of a layout's time, and from which numbers that follows."""

    goodput: Goodput
    reliability: Resolved[Reliability]
    gpus: int
    nodes: int
    is_given: bool
    """Whether somebody said how often to save."""


def reliability_of(
    cluster: Cluster,
    failures: Failures | None,
    *,
    in_background: bool = True,
    ledger: LedgerOptions | None = None,
) -> Resolved[Reliability]:
    """How `cluster` fails and saves. Raises SpecError where nobody knows."""
    measured = None if ledger is None else runs_of(ledger)(cluster)
    known = known_reliability(cluster, failures, in_background=in_background, measured=measured)
    return Resolved(value=known.value, sources=known.sources)


def runs_of(ledger: LedgerOptions) -> Callable[[Cluster], MeasuredSaves | None]:
    """What asks the user's own runs how they saved on such machines."""

    def measured(cluster: Cluster) -> MeasuredSaves | None:
        from fsdpplan.cli.resolve.evidence import kept_rows

        rows = [row for row in kept_rows(ledger) if isinstance(row, LedgerRow)]
        if not rows:
            return None
        from fsdpplan.validate.learn.saves import measured_saves

        return measured_saves(rows, cluster)

    return measured


def outlook(
    case: Case,
    estimate: Estimate,
    failures: Failures | None,
    options: FailureOptions,
    *,
    ledger: LedgerOptions | None = None,
) -> Outlook:
    """What failures leave of one layout's time; what was typed lies over `failures`."""
    saves = options if isinstance(options, GoodputOptions) else GoodputOptions()
    reliability = reliability_of(
        case.cluster,
        given_failures(options, known=failures),
        in_background=saves.checkpoint_async is not False,
        ledger=ledger,
    )
    return Outlook(
        goodput=goodput(case, estimate, reliability.value, every_steps=saves.checkpoint_every),
        reliability=reliability,
        gpus=case.cluster.gpus,
        nodes=case.cluster.nodes,
        is_given=saves.checkpoint_every is not None,
    )
