from __future__ import annotations

import pytest

from fsdpplan.emit.folder import job_folder_files
from fsdpplan.emit.header import read_plan_json
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from tests.emit.plans import make_plan


def folder_files(folder: str, job: Job | None = None) -> dict[str, str]:
    plan = make_plan("cuda", nodes=2)
    return job_folder_files(
        plan=plan, plan_json=plan_json(plan), job=job or Job(), version="1.2.3", folder=folder
    )


def test_a_job_folder_holds_the_script_the_plan_and_a_word_on_both() -> None:
    texts = folder_files("/shared/my job")
    assert set(texts) == {"job.sbatch", "fsdpplan.json", "alerts.yml", "README.md"}
    assert read_plan_json(texts["job.sbatch"]) == texts["fsdpplan.json"].rstrip("\n")
    assert "cd '/shared/my job'" in texts["README.md"]


def test_its_script_names_the_trainer_by_its_full_path() -> None:
    # Slurm runs a copy of the script out of its spool folder.
    assert "'/shared/my job/trainer/__main__.py'" in folder_files("/shared/my job/")["job.sbatch"]


def test_a_relative_folder_or_a_program_of_ones_own_is_refused() -> None:
    with pytest.raises(SpecError, match="absolute"):
        folder_files("job")
    with pytest.raises(SpecError, match="--script"):
        folder_files("/job", Job(program=UserProgram(script="t.py")))
