"""What finished runs say of the cluster that was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpplan.cli.options import LedgerOptions
from fsdpplan.cli.resolved import Resolved
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger_place import ledger_path
from fsdpplan.spec.corrected import corrected

if TYPE_CHECKING:
    from fsdpplan.files.clusters import LoadedCluster
    from fsdpplan.spec.correction import Correction
    from fsdpplan.validate.learned import Learned


def ledger_file(options: LedgerOptions) -> Path | None:
    """The ledger to use; None where none is wanted."""
    if options.no_ledger and options.ledger is not None:
        raise SpecError("--ledger and --no-ledger contradict each other: give one of them")
    return None if options.no_ledger else ledger_path(options.ledger)


def with_learned(
    cluster: Resolved[LoadedCluster], options: LedgerOptions
) -> Resolved[LoadedCluster]:
    """`cluster`, corrected where enough runs on it have ended."""
    file = ledger_file(options)
    if file is None:
        return cluster
    if not file.exists():
        if options.ledger is not None:
            raise SpecError(
                f"there is no ledger {file}: fsdpplan run makes it; leave --ledger out to plan "
                "without one"
            )
        return cluster
    from fsdpplan.run.learned import learned_of

    try:
        learned = learned_of(cluster.value.cluster, file)
    except SpecError as error:
        if options.ledger is not None:
            raise
        return replace(cluster, warnings=(*cluster.warnings, f"past runs are not used: {error}"))
    return cluster if learned is None else _with(cluster, learned)


def _with(cluster: Resolved[LoadedCluster], learned: Learned) -> Resolved[LoadedCluster]:
    loaded = cluster.value
    value = replace(
        loaded,
        cluster=corrected(loaded.cluster, learned.correction, learned.error),
        parts=tuple(corrected(part, learned.correction, learned.error) for part in loaded.parts),
    )
    said = f"{correction_words(learned.correction)} (--no-ledger)"
    return replace(cluster, value=value, assumptions=(*cluster.assumptions, said))


def correction_words(correction: Correction) -> str:
    """What the runs changed, in one clause."""
    jobs = f" of {correction.jobs} jobs" if correction.jobs < correction.runs else ""
    return (
        f"from {correction.runs} runs{jobs} on this cluster: steps take "
        f"{100 * (correction.step_factor - 1):+.0f} % of the profile's time, 80 % band "
        f"{100 * correction.half_width_fraction:.0f} % either way"
    )
