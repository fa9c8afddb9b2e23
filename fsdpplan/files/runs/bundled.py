"""Tables of measured runs that come with the repository, and not with a wheel."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.errors import SpecError

BENCH = Path("tests") / "golden" / "bench"


def bundled_runs(checkout: Path | None = None) -> Path:
    """The table of published runs in a clone; raises SpecError where only a wheel is installed.

    `checkout` is where to look instead of beside the package.
    """
    root = Path(__file__).resolve().parents[3] if checkout is None else checkout
    path = root / BENCH / "train_runs.csv"
    if not path.is_file():
        raise SpecError(
            "the tables of published runs come with the repository, not with the installed "
            f"package: type `fsdpplan validate {BENCH / 'train_runs.csv'}` in a clone, or "
            "`fsdpplan validate RUNS.csv` with runs of your own (docs/reference/runs.md)"
        )
    return path
