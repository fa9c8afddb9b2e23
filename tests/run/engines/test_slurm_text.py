from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.engines.slurm_text import (
    parse_accounting,
    parse_completion,
    parse_job,
    reason_words,
    refusal,
)
from tests.run.commands import recorded


def state_of(name: str) -> JobState:
    state = parse_job(recorded(name))
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "words", "shell_code", "ended"),
    [
        ("pending", "PENDING (Resources: waiting for nodes to become free)", 1, False),
        ("running", "RUNNING on node[1-2]", 1, False),
        ("completed", "COMPLETED", 0, True),
        ("failed", "FAILED (NonZeroExitCode: its script ended with an error)", 7, True),
        ("cancelled", "CANCELLED", 143, True),
    ],
)
def test_what_the_controller_says_is_read(
    name: str, words: str, shell_code: int, ended: bool
) -> None:
    state = state_of(name)
    assert (state.words, state.shell_code, state.ended) == (words, shell_code, ended)


def test_a_job_that_waits_is_expected_at_a_time() -> None:
    assert state_of("pending").expected_start == "2027-11-20 11:57:47"
    assert state_of("running").expected_start == ""


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY"])
def test_only_a_completed_job_succeeds(state: str) -> None:
    # Ended before it could say anything: never a success.
    text = recorded("completed").replace("JobState=COMPLETED", f"JobState={state}")
    ended = parse_job(text)
    assert ended is not None
    assert (ended.succeeded, ended.shell_code) == (False, 1)


@pytest.mark.parametrize("state", ["POWER_UP_NODE", "RESIZING", "REQUEUE_HOLD", "A_NEWER_ONE"])
def test_a_job_ends_in_a_state_that_ends_it(state: str) -> None:
    passing = parse_job(recorded("running").replace("JobState=RUNNING", f"JobState={state}"))
    assert passing is not None
    assert not passing.ended
    assert parse_accounting("1||0:0|n1\n") is None


def test_a_job_named_like_an_answer_deceives_nobody() -> None:
    # The recorded job has the name "JobState=FAILED Reason=None ExitCode=9:9".
    assert "JobName=JobState=FAILED" in recorded("completed")
    assert state_of("completed").exit_code == 0


def test_a_log_with_blanks_in_its_path_is_found() -> None:
    assert state_of("running").log == Path("/var/tmp/my job/a b-1.out")


def test_the_pattern_of_a_logs_name_is_filled_in() -> None:
    text = recorded("running").replace("b-1.out", "b-%j.out")
    job_id = text.partition("JobId=")[2].split()[0]
    state = parse_job(text)
    assert state is not None
    assert state.log == Path(f"/var/tmp/my job/a b-{job_id}.out")


def test_a_job_without_nodes_is_nowhere() -> None:
    assert state_of("pending").nodes == ""
    text = recorded("pending").replace("   NodeList=\n", "   NodeList=(null)\n")
    state = parse_job(text)
    assert state is not None
    assert state.nodes == ""


def test_starts_after_the_first_are_counted() -> None:
    state = parse_job(recorded("running").replace("Restarts=0", "Restarts=3"))
    assert state is not None
    assert state.restarts == 3


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "\n\n"])
def test_no_answer_is_no_state(text: str) -> None:
    assert parse_job(text) is None
    assert parse_accounting(text) is None
    assert parse_completion(text) is None


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("None", ""),
        ("Priority", "Priority: jobs of higher priority come first"),
        ("AssocGrpGRES", "AssocGrpGRES: your account as a whole is at its limit"),
        (
            "ReqNodeNotAvail,_UnavailableNodes:node[1-2]",
            "ReqNodeNotAvail, UnavailableNodes:node[1-2]: a node that it asks for is down, "
            "reserved or in use",
        ),
        (
            "launch_failed_requeued_held",
            "launch failed requeued held: a node could not launch it; scontrol release sets it "
            "free",
        ),
        ("Something_New", "Something New"),
    ],
)
def test_why_a_job_waits_is_said_in_words(word: str, words: str) -> None:
    assert reason_words(word) == words


def test_who_was_not_answered_looks_first_whether_there_is_a_job() -> None:
    said = refusal("sbatch: error: Batch job submission failed: Socket timed out on send/recv")
    assert "squeue --me" in said
    assert "--partition" not in said


@given(st.text())
def test_whatever_slurm_says_is_read_or_passed_over(text: str) -> None:
    parse_job(text)
    parse_accounting(text)
    parse_completion(text)
    assert "\n" not in refusal(text)
