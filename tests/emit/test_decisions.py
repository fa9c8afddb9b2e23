from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from tests.emit.bench import ALLOCATION, JOB_FOLDER, Ran, emit, emit_folder, make_bench, run
from tests.emit.plans import make_plan

TWO = make_plan("cuda", nodes=2)
SPARE = {**ALLOCATION, "SLURM_JOB_NUM_NODES": "3", "NODES": "n1 n2 n3"}
FAILS = "[ $SLURMD_NODENAME != n1 ] || exit 7"
COUNTS = "echo >>starts; "
"""Each node adds a line when its ranks are started: two a start."""
SAVES = "mkdir -p saved; echo step-0000000$(wc -l <starts) >saved/latest; "


@pytest.fixture(params=["one file", "folder"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A job lives by the same rules wherever they stand."""
    bench = make_bench(tmp_path)
    if request.param == "folder":
        (bench / JOB_FOLDER).mkdir()
    return bench


def script_of(bench: Path, job: Job) -> str:
    return emit_folder(bench, TWO, job) if (bench / JOB_FOLDER).exists() else emit(TWO, job)


def saving(**survival: int | bool) -> Job:
    return Job(program=Trainer(checkpoint_dir="saved"), survival=Survival(**survival))  # type: ignore[arg-type]


def played(bench: Path, job: Job, do: str, **values: str) -> Ran:
    return run(bench, script_of(bench, job), **{**ALLOCATION, **values}, DO=COUNTS + do)


def nexts(ran: Ran) -> list[str]:
    return [note["next"] for note in ran.notes if note["event"] == "attempt_ended"]


def as_batch_script(script: str) -> str:
    """A batch script knows itself by its process id."""
    return script.replace("set -euo pipefail", "SLURM_TASK_PID=$$; set -euo pipefail", 1)


def test_each_start_and_its_end_is_noted(bench: Path) -> None:
    ran = played(bench, saving(), "true")
    begun, ended = ran.notes
    assert begun["nodes"] == ["n1", "n2"]
    assert (begun["attempt"], begun["restart"], begun["most"]) == (1, 0, 4)
    assert (ended["attempt"], ended["exit_code"], ended["next"]) == (1, 0, "end")
    assert (bench / "run/bad-nodes").read_text() == ""


def test_a_run_folder_that_cannot_be_made_is_no_reason_to_end(bench: Path) -> None:
    (bench / "run").touch()
    ran = run(bench, script_of(bench, saving()), **ALLOCATION)
    assert (ran.code, len(ran.torchrun)) == (0, 2), ran.said


def test_a_fault_before_anything_was_saved_ends_the_job_at_once(bench: Path) -> None:
    ran = played(bench, saving(), FAILS)
    assert (ran.code, nexts(ran)) == (7, ["end"])
    assert "and nothing was saved since it began: it is not started again" in ran.said


def test_a_fault_that_comes_back_is_tried_once_more_after_a_save(bench: Path) -> None:
    once = "mkdir -p saved; echo step-00000001 >saved/latest; "
    ran = played(bench, saving(), once + FAILS)
    assert (ran.code, nexts(ran)) == (7, ["retry", "end"])
    assert len(ran.torchrun) == 4


def test_saves_without_end_do_not_mean_starts_without_end(bench: Path) -> None:
    ran = played(bench, saving(retries=2), SAVES + FAILS)
    assert (ran.code, nexts(ran)) == (7, ["retry", "retry", "end"])
    assert "no further start is allowed (--retries)" in ran.said


def test_a_program_of_ones_own_is_not_started_again_for_its_own_faults(bench: Path) -> None:
    (bench / "t.py").write_text("")
    script = emit(TWO, Job(program=UserProgram(script="t.py")))
    ran = run(bench, script, **ALLOCATION, DO=COUNTS + SAVES + FAILS)
    assert (ran.code, nexts(ran)) == (7, ["end"])


def test_a_spare_takes_the_place_of_a_node_that_slurm_took(bench: Path) -> None:
    fails = "[ $SLURMD_NODENAME != n2 ] || exit 9"
    ran = played(bench, saving(spares=1), fails, **SPARE, LEFT="n1,n3")
    assert ran.code == 0, ran.said
    assert [note["nodes"] for note in ran.notes if note["event"] == "attempt"] == [
        ["n1", "n2"],
        ["n1", "n3"],
    ]
    assert (bench / "run/bad-nodes").read_text() == "n2\tfailed, says Slurm\n"


def test_a_node_that_does_not_answer_is_not_used_again(bench: Path) -> None:
    ran = played(bench, saving(spares=1), "true", **SPARE, DEAD="n2")
    assert ran.code == 0, ran.said
    assert "n2: does not answer" in ran.said
    assert nexts(ran) == ["retry", "end"]


def test_a_node_that_a_check_named_is_excluded_as_the_job_goes_back(bench: Path) -> None:
    names = "printf 'n2\\tno adapter\\n' >>run/bad-nodes; exit 5"
    ran = played(bench, saving(), names, JOB="   ReqNodeList=(null) ExcNodeList=n9")
    assert (ran.code, nexts(ran)) == (0, ["requeue"])
    assert ran.asked == ["requeue 12345", "update JobId=12345 ExcNodeList=n9,n2"]


def test_a_job_that_may_not_be_requeued_ends_with_its_code(bench: Path) -> None:
    names = "printf 'n2\\tno adapter\\n' >>run/bad-nodes; exit 5"
    ran = played(bench, saving(requeue=False), names)
    assert (ran.code, ran.asked, nexts(ran)) == (5, [], ["end"])
    assert "n2 will not be used again, and the job may not be requeued (--no-requeue)" in ran.said


def test_a_job_told_before_its_ranks_were_started_goes_back_into_the_queue(bench: Path) -> None:
    limit = (
        "   JobState=RUNNING Reason=None\n   StartTime=x EndTime=2020-01-01T00:00:00 Deadline=N/A"
    )
    script = script_of(bench, Job(program=Trainer(checkpoint_dir="saved"), time="1:00:00"))
    script = script.replace("run_attempt() {", "run_attempt() {\n  kill -USR1 $$", 1)
    ran = run(bench, script, **ALLOCATION, JOB=limit)
    assert (ran.code, nexts(ran), ran.torchrun) == (0, ["requeue"], [])
    assert ran.asked == ["requeue 12345"]
    assert ran.notes[-1]["used"] == 1


def test_a_line_without_its_numbers_is_no_reason_to_end(bench: Path) -> None:
    (bench / "run").mkdir()
    (bench / "run/attempts.jsonl").write_text('{"event": "attempt", "job": "12345"}\n')
    ran = run(
        bench, as_batch_script(script_of(bench, saving())), **ALLOCATION, SLURM_RESTART_COUNT="1"
    )
    assert ran.code == 0, ran.said
    assert (ran.notes[1]["attempt"], ran.notes[1]["used"]) == (2, 1)


def test_a_job_that_slurm_has_ended_is_not_started_again(bench: Path) -> None:
    state = "   JobState=COMPLETING Reason=None\n   Requeue=1 Restarts=1 BatchFlag=1"
    ran = played(bench, saving(), SAVES + FAILS, JOB=state)
    assert (ran.code, nexts(ran)) == (143, ["requeue"])


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "RESIZING"])
def test_a_job_that_goes_on_is_started_again(bench: Path, state: str) -> None:
    said = f"   JobState={state} Reason=None\n   Requeue=1 Restarts=0 BatchFlag=1"
    once = "mkdir -p saved; echo step-00000001 >saved/latest; "
    assert nexts(played(bench, saving(), once + FAILS, JOB=said)) == ["retry", "end"]


def test_a_job_name_is_not_taken_for_what_slurm_says(bench: Path) -> None:
    state = "JobId=1 JobName=x JobState=FAILED y\n   JobState=RUNNING Reason=None"
    once = "mkdir -p saved; echo step-00000001 >saved/latest; "
    assert nexts(played(bench, saving(), once + FAILS, JOB=state)) == ["retry", "end"]


@pytest.mark.parametrize(("saved", "used"), [("step-00000002", 0), ("step-00000001", 1)])
def test_what_slurm_starts_again_counts_where_nothing_was_saved(
    bench: Path, saved: str, used: int
) -> None:
    for folder in ("saved", "run"):
        (bench / folder).mkdir()
    (bench / "saved/latest").write_text(f"{saved}\n")
    (bench / "run/attempts.jsonl").write_text(
        '{"event": "attempt", "job": "12345", "attempt": 1, "used": 0, "restart": 0, "most": 4, '
        '"nodes": ["n1"], "checkpoint": "step-00000001"}\n'
    )
    script = as_batch_script(script_of(bench, saving()))
    ran = run(bench, script, **ALLOCATION, SLURM_RESTART_COUNT="1", DO=COUNTS)
    begun = ran.notes[1]
    assert (begun["attempt"], begun["restart"], begun["used"]) == (2, 1, used)


def test_what_was_saved_counts_where_its_folder_is_not_seen(bench: Path) -> None:
    saves = """echo '{"checkpoint": "step-00000001", "folder": "/saved"}' >>run/saves.jsonl; """
    ran = played(bench, saving(), saves + FAILS)
    assert (ran.code, nexts(ran)) == (7, ["retry", "end"])
    begun = [note["checkpoint"] for note in ran.notes if note["event"] == "attempt"]
    assert begun == ["", "step-00000001"]
    assert all(f"--run-folder={bench}/run" in words for words in ran.torchrun)


def test_a_job_that_comes_back_to_a_node_without_its_disks_says_so(bench: Path) -> None:
    nowhere = {"SLURM_RESTART_COUNT": "1", "SLURM_SUBMIT_DIR": str(bench / "not mounted")}
    ran = played(bench, saving(), "true", **nowhere)
    assert (ran.code, ran.torchrun) == (5, [])
    assert "came back, and neither" in ran.said
    assert "submit it again" in ran.said
    assert not (bench / "run").exists()
    assert played(bench, Job(), "true", **nowhere).code == 0
    assert played(bench, saving(), "true", **nowhere | {"SLURM_RESTART_COUNT": "0"}).code == 0


ONCE = {"retries": 0, "requeue": False}


def test_a_job_that_starts_once_ends_with_the_code_of_its_ranks(bench: Path) -> None:
    ran = played(bench, saving(**ONCE), "true")
    assert (ran.code, nexts(ran), len(ran.torchrun)) == (0, ["end"], 2), ran.said
    ran = played(bench, saving(**ONCE), SAVES + FAILS)
    assert (ran.code, nexts(ran)[1:], len(ran.torchrun)) == (7, ["end"], 2), ran.said
    ran = played(bench, Job(survival=Survival(retries=0, requeue=False)), FAILS, DEAD="n2")
    assert ran.code == 1
    assert (bench / "run/bad-nodes").read_text() == "n2\tdoes not answer\n"
    ran = played(bench, saving(**ONCE), "true")
    assert (ran.code, ran.torchrun) == (5, [])
    assert "only 1 of the 2 nodes that are needed are good" in ran.said
