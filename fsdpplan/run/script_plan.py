"""The plan that a job script runs: inside the script, or a file of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsdpplan.emit.slurm.header import (
    MAX_PLAN_BYTES,
    PLAN_NAME,
    plan_digest,
    read_header,
    read_job_folder,
    read_plan_json,
)
from fsdpplan.files.table import text_of


def plan_text(script: str, path: Path) -> str | None:
    """The JSON text of the plan that the script at `path` runs; None where there is none.

    `script` is its text. The script of a job folder names that folder; the folder may have been
    moved, and a run keeps a copy of script and plan, so what lies beside `path` counts first where
    it is the plan of the script's header.
    """
    inside, header = read_plan_json(script), read_header(script)
    if inside is not None or header is None or read_job_folder(script) is None:
        return inside
    found = list(_beside(script, path))
    whole = (text for text in found if plan_digest(text) == header.digest)
    return next(whole, found[0] if found else None)


def _beside(script: str, path: Path) -> Iterator[str]:
    for folder in (path.parent, Path(read_job_folder(script) or "")):
        if (folder / PLAN_NAME).is_file():
            yield text_of(folder / PLAN_NAME, limit_bytes=10 * MAX_PLAN_BYTES).rstrip("\n")
