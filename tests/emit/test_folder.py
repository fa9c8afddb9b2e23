from __future__ import annotations

import re

import pytest

from fsdpplan.emit.folder import job_folder_files
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.header import plan_digest, read_job_folder, read_plan_json, script_digest
from fsdpplan.emit.slurm.parts import part_text
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from tests.emit.plans import make_plan

SAVING = Trainer(checkpoint_dir="ck")
JOBS = (
    Job(program=SAVING, time="8:00:00", survival=Survival(spares=1)),
    Job(program=SAVING),
    Job(survival=Survival(retries=0, requeue=False, preflight=False)),
)
"""With all that there is, with what comes by itself, with nothing."""


def folder_files(folder: str, job: Job | None = None) -> dict[str, str]:
    plan = make_plan("cuda", nodes=2)
    return job_folder_files(
        plan=plan, plan_json=plan_json(plan), job=job or Job(), version="1.2.3", folder=folder
    )


def test_a_job_folder_holds_the_script_the_plan_and_a_word_on_both() -> None:
    texts = folder_files("/shared/my job")
    beside = {"job.sbatch", "fsdpplan.json", "alerts.yml", "README.md"}
    assert beside == {name for name in texts if not name.startswith("parts/")}
    assert read_plan_json(texts["job.sbatch"]) is None
    assert script_digest(texts["job.sbatch"]) == plan_digest(texts["fsdpplan.json"])
    assert read_job_folder(texts["job.sbatch"]) == "/shared/my job"
    assert "cd '/shared/my job'" in texts["README.md"]


def test_its_script_says_once_where_it_is() -> None:
    # Slurm runs a copy of the script out of its spool folder.
    script = folder_files("/shared/my job/")["job.sbatch"]
    assert script.count("/shared/my job") == 1


def test_it_has_the_parts_that_its_script_calls_and_no_others() -> None:
    for job in JOBS:
        texts = folder_files("/job", job)
        called = re.findall(r'^\. "\$parts/(\w+\.sh)"', texts["job.sbatch"], re.M)
        called += re.findall(r'/parts/(\w+\.py)"', texts["job.sbatch"])
        parts = [name.removeprefix("parts/") for name in texts if name.startswith("parts/")]
        assert sorted(called) == sorted(parts)
        for name in parts:
            if name.endswith(".sh"):
                assert texts[f"parts/{name}"] == part_text(name.removesuffix(".sh"))


def test_what_is_switched_off_is_absent() -> None:
    on, default, off = (set(folder_files("/job", job)) for job in JOBS)
    assert on - default == {"parts/watch.sh"}
    assert default - off == {"parts/again.sh", "parts/requeue.sh", "parts/limit.sh"}
    assert off - default == {"parts/once.sh"}
    assert off == set(folder_files("/job"))


def test_a_relative_folder_or_a_program_of_ones_own_is_refused() -> None:
    with pytest.raises(SpecError, match="absolute"):
        folder_files("job")
    with pytest.raises(SpecError, match="--script"):
        folder_files("/job", Job(program=UserProgram(script="t.py")))
