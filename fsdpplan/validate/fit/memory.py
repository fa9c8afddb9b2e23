"""Fit what the allocator and NCCL take beyond what is allocated to measured peaks.

    python -m fsdpplan.validate.fit.memory [--check] [--table FILE] [--date YYYY-MM-DD]

Two constants that all CUDA devices share: the fragments of torch's allocator, from rows whose
memory is what it reserved, as the median of reserved over what is allocated and kept in its pools;
and the buffers of one communicator, from rows of nvidia-smi, as the median of what is left beside
those and the context, over the number of groups. The context is held at what an empty one takes.
Two more say how far the peaks that come of it are off (`fit_peaks`).
`--check` says whether the profile holds what a fresh fit gives, and exits with 1 if not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fsdpplan.cost.memory.peak import communicators
from fsdpplan.files.profiles.catalogue import profile_text, profiles_folder
from fsdpplan.files.profiles.edit import with_numbers, with_source
from fsdpplan.files.runs.table import MeasuredRun, MemoryKind, bundled_runs, read_runs
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.training import Training
from fsdpplan.validate.compare.predict import Fits, Prediction, predict_row
from fsdpplan.validate.fit.peaks import fit_peak_errors, how_fitted, peaks_of
from fsdpplan.validate.runs.express import express
from fsdpplan.validate.runs.skipped import Skipped

PHYSICS = "physics"
CONTEXT_BYTES = 512 * 2**20
"""CUDA's context with the libraries' kernels, before any tensor; not fitted."""
FRAGMENTS = ("fragmentation_fraction", "growing_fragmentation_fraction")
"""In the tables no setting is said: what is fitted is of all."""
STEP_BYTES = 2**24
"""Communicators are fitted to this."""

Row = tuple[MeasuredRun, Prediction, Training]


def rows_of(runs: Sequence[MeasuredRun], kind: MemoryKind, *, fragments: float) -> list[Row]:
    """Rows of that kind of memory, priced without context and communicators."""
    nothing = {"context_bytes": 0, "communicator_bytes": 0} | dict.fromkeys(FRAGMENTS, fragments)
    rows = []
    for run in runs:
        if run.memory_kind != kind or not run.peak_memory_bytes or run.outcome != "n":
            continue
        expressed, priced = express(run), predict_row(run, Fits(physics=nothing))
        if not isinstance(expressed, Skipped) and not isinstance(priced, Skipped):
            rows.append((run, priced, expressed.training))
    return rows


def fit_fragmentation(runs: Sequence[MeasuredRun]) -> float:
    """Reserved over allocated and pooled, less 1, to a hundredth."""
    ratios = [
        (run.peak_memory_bytes or 0) / priced.memory.peak_reserved_bytes
        for run, priced, _ in rows_of(runs, "reserved", fragments=0.0)
    ]
    return round(median(ratios) - 1, 2)


def fit_communicator_bytes(runs: Sequence[MeasuredRun], *, fragments: float) -> int:
    """What is left of nvidia-smi's figure, for each group."""
    each = []
    for run, priced, training in rows_of(runs, "nvidia-smi", fragments=fragments):
        left = (run.peak_memory_bytes or 0) - priced.memory.peak_reserved_bytes - CONTEXT_BYTES
        each.append(left / communicators(priced.layout, training.traits))
    return round(median(each) / STEP_BYTES) * STEP_BYTES


def new_profile(runs: Sequence[MeasuredRun], *, date: str | None) -> str:
    """Text of the profile `physics` with the numbers and how they were found."""
    fragments = fit_fragmentation(runs)
    communicator = fit_communicator_bytes(runs, fragments=fragments)
    words = {
        "how": f"by fsdpplan.validate.fit.memory: fragments are the median of reserved over "
        f"allocated and pooled memory of {len(rows_of(runs, 'reserved', fragments=0.0))} rows, "
        f"communicators the median of what is left of nvidia-smi's figure of "
        f"{len(rows_of(runs, 'nvidia-smi', fragments=0.0))} rows beside a context of 512 MiB",
        "from": "tests/golden/bench/train_runs.csv",
    }
    constants = {"fragmentation_fraction": fragments, "communicator_bytes": communicator}
    peaks = peaks_of(runs, constants | {"context_bytes": CONTEXT_BYTES})
    errors = fit_peak_errors(peaks)
    text = with_numbers(
        profile_text(PHYSICS),
        {
            "fragmentation_fraction": fragments,
            "peak_memory_stack_fraction": errors.stack_fraction,
            "peak_memory_base_fraction": errors.base_fraction,
        },
    )
    dated = {"date": date} if date else {}
    of_peaks = {"how": how_fitted(peaks, errors), "from": words["from"]}
    text = with_source(text, "peak_fit", of_peaks | dated)
    for key, value in (("context_bytes", CONTEXT_BYTES), ("communicator_bytes", communicator)):
        text = re.sub(rf"^({key} = {{ value = )[^,]+", rf"\g<1>{value:_}", text, flags=re.M)
    return with_source(text, "reserved_fit", words | dated)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, and write the profile or compare with it."""
    parser = argparse.ArgumentParser(description="Fit the memory's constants of the profiles.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")
    parser.add_argument("--table", type=Path, help="table of runs; the repository's if not given")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    text = new_profile(read_runs(options.table or bundled_runs()), date=options.date)
    is_stale = text != profile_text(PHYSICS)
    print("fitted: 4 shared constants of memory;", "stale" if is_stale else "up to date")
    if is_stale and not options.check:
        path = profiles_folder() / f"{PHYSICS}.toml"
        write_text_atomically(path, text, advice="the profiles of a checkout are written")
    return int(is_stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
