"""Projects: which sources are one piece of software run by one group.

Runs of one project share code, machine and habits, so an error is only a held-out one where none
of the project's rows were fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdpplan.files.runs.table import MeasuredRun

PROJECT_HEADS = ("mosaicml_llmfoundry", "torchtitan", "nemo_automodel", "nemo")
"""Sources that begin with one of these are that project's; any other is one of its own."""

POORLY_TUNED = "nanotron_ultrascale"
"""The code of this source waits where others overlap; only its plain layouts tell of hardware."""

OWN = "own_h100_cases"
"""The package's own trainer, which the cost model is a model of: its family loses nothing against
what kernels sustain (`StackFamily`)."""

HALF_AUTOCAST = "seed_gpt2_large_h100"
"""One script, whose own profile names an fp32 matmul kernel: not all of it ran in half precision,
and which part is not said. Its rows are shown, and are left out of the band."""


def project_of(source_id: str) -> str:
    """The project that `source_id` belongs to."""
    return next((head for head in PROJECT_HEADS if source_id.startswith(head)), source_id)


def projects_of(runs: Iterable[MeasuredRun]) -> tuple[str, ...]:
    """All projects of `runs`, in the order of their first row."""
    return tuple(dict.fromkeys(project_of(run.source_id) for run in runs))


def is_tuned(run: MeasuredRun) -> bool:
    """Whether the row is of tuned code: of the poorly tuned one only its plain layouts are."""
    return project_of(run.source_id) != POORLY_TUNED or (run.pp == 1 and run.tp <= 8)


def tells_of_hardware(run: MeasuredRun) -> bool:
    """Whether the row's step time may be fitted to: timed, on a named GPU, by tuned code."""
    if not run.is_timed or not run.gpu:
        return False
    return is_tuned(run)
