"""What the ledger says of a cluster: worked out once for each new run, and kept beside the runs."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import newest_row, read_learned, read_rows, write_learned
from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.correction import Correction
from fsdpplan.validate.finished_jobs import finished_jobs
from fsdpplan.validate.learned import Learned, learned


def learned_of(cluster: Cluster, ledger: Path) -> Learned | None:
    """What the ledger's runs say of `cluster`; None where they say nothing yet.

    A cluster that is corrected already is one of an old plan: the profile is what is corrected.
    """
    if cluster.correction is not None:
        return None
    newest = newest_row(ledger, device=cluster.device.name)
    if not newest:
        return None
    basis = _basis(cluster, newest)
    kept = read_learned(ledger, basis=basis)
    if kept is not None:
        return _from_document(kept)
    rows, _ = read_rows(ledger, device=cluster.device.name)
    found = learned(finished_jobs(rows, cluster), cluster)
    document = {} if found is None else asdict(found)
    with suppress(SpecError):  # a ledger that may only be read can be learned from
        write_learned(
            ledger,
            basis=basis,
            device=cluster.device.name,
            cluster=cluster.name,
            newest=newest,
            document=document,
        )
    return found


def _basis(cluster: Cluster, newest: int) -> str:
    """All that a correction follows from, in short: the runs, the profile's numbers, the program.

    How many GPUs are asked for, and the cluster's name, are no part of it.
    """
    levels = [asdict(level) | {"domain_gpus": None} for level in cluster.levels]
    parts = (__version__, newest, asdict(cluster.device), levels, bool(cluster.weak))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _from_document(document: dict[str, object]) -> Learned | None:
    try:
        return Learned(
            correction=Correction(**document["correction"]),  # type: ignore[arg-type]
            error=StepError(**document["error"]),  # type: ignore[arg-type]
        )
    except (KeyError, TypeError, ValueError):
        return None
