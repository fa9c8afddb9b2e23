"""Write a job folder: the script, the plan and a copy of the trainer's source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.emit.folder import job_folder_files
from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.header import job_plan
from fsdpplan.emit.slurm.node import TRAINER_NAME
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import carried_json
from fsdpplan.files.table import path_text
from fsdpplan.files.writing import write_folder_at_once
from fsdpplan.run.launch import job_in_time
from fsdpplan.spec.plan import Plan


def write_job_folder(folder: Path, *, plan: Plan, job: Job) -> list[Path]:
    """Make `folder` with all that the job needs but torch; the files in it.

    All of it appears at once, or nothing does. A folder with anything in it is left alone: the
    trainer in it may have been changed by its owner.
    """
    folder = folder.absolute()
    if os.path.lexists(folder) and not _is_empty_folder(folder):
        raise SpecError(
            f"{path_text(folder)} exists already: choose another --out, or remove it first"
        )
    carried = job_plan(plan)
    texts = job_folder_files(
        plan=carried,
        plan_json=carried_json(carried),
        job=job_in_time(plan, job),
        version=__version__,
        folder=str(folder),
    )
    texts |= {f"{TRAINER_NAME}/{name}": text for name, text in trainer_sources().items()}
    write_folder_at_once(folder, texts, advice="choose another --out")
    return [folder / name for name in texts]


def _is_empty_folder(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:
        return False


def trainer_sources() -> dict[str, str]:
    """Path in the trainer's folder -> text, of the trainer that is installed, with the modules that
    it shares with the planner (`trainer/shared.py`)."""
    package = files("fsdpplan")
    names = ("__init__", "conventions", "trainer_options")
    shared = tuple(f"spec/{name}.py" for name in names)
    own = dict(_sources(package / "trainer"))
    return own | {name: (package / name).read_text(encoding="utf-8") for name in shared}


def _sources(folder: Traversable, place: str = "") -> Iterator[tuple[str, str]]:
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.is_dir():
            yield from _sources(file, f"{place}{file.name}/")
        elif file.name.endswith(".py"):
            yield f"{place}{file.name}", file.read_text(encoding="utf-8")
