from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdpplan.errors import LaunchError
from fsdpplan.run import slurm
from fsdpplan.run.follow import Follower
from fsdpplan.run.slurm import Detached, JobState, follow_job, parse_job, submit
from tests.run.displays import Remembers

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"


def recorded(name: str) -> str:
    text = (RECORDINGS / f"scontrol_show_job_{name}.txt").read_text()
    return text.partition("\n")[2]


def state_of(name: str) -> JobState:
    state = parse_job(recorded(name))
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "words", "exit_code", "ended"),
    [
        ("pending", "PENDING (Resources)", 0, False),
        ("running", "RUNNING on node[1-2]", 0, False),
        ("completed", "COMPLETED", 0, True),
        ("failed", "FAILED", 7, True),
        ("cancelled", "CANCELLED", 143, True),
    ],
)
def test_what_the_controller_says_is_read(
    name: str, words: str, exit_code: int, ended: bool
) -> None:
    state = state_of(name)
    assert (state.words, state.exit_code, state.ended) == (words, exit_code, ended)


def test_a_job_named_like_an_answer_deceives_nobody() -> None:
    # The recorded job has the name "JobState=FAILED Reason=None ExitCode=9:9".
    assert "JobName=JobState=FAILED" in recorded("completed")
    assert state_of("completed").exit_code == 0


def test_a_log_with_blanks_in_its_path_is_found() -> None:
    assert state_of("running").log == Path("/var/tmp/my job/a b-1.out")


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "\n\n"])
def test_no_answer_is_no_state(text: str) -> None:
    assert parse_job(text) is None


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins: `scontrol` prints the files 1, 2, ... in turn, and the last one ever
    after; `sbatch` and `scancel` write down their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scontrol = f"""#!/bin/bash
n=$(cat {tmp_path}/asked 2>/dev/null || echo 0); n=$((n + 1)); echo $n >{tmp_path}/asked
while [ $n -gt 1 ] && [ ! -e {tmp_path}/$n ]; do n=$((n - 1)); done
cat {tmp_path}/$n
"""
    record = f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/args\n'
    sbatch = f"{record}echo SBATCH_EXPORT=$SBATCH_EXPORT >>{tmp_path}/args\necho '77;cluster'\n"
    for name, text in (("scontrol", scontrol), ("sbatch", sbatch), ("scancel", record)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "FIRST_ASK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "LAST_ASK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.02)
    return tmp_path


def answers(commands: Path, *texts: str) -> None:
    for number, text in enumerate(texts, 1):
        (commands / str(number)).write_text(text)


def follow(commands: Path) -> tuple[int, Remembers]:
    display = Remembers()
    follower = Follower(metrics=commands / "metrics.jsonl", display=display)
    code = follow_job("1", environment=os.environ, follower=follower, display=display)
    return code, display


def test_a_job_is_submitted_with_its_environment(commands: Path) -> None:
    job_id = submit(script=Path("job.sbatch"), folder=commands, environment=os.environ)
    assert job_id == "77"
    assert (commands / "args").read_text().split() == [
        "--parsable",
        "job.sbatch",
        "SBATCH_EXPORT=ALL",
    ]


def test_a_job_is_followed_through_its_states(commands: Path) -> None:
    log = commands / "a log"
    running = recorded("running").replace("/var/tmp/my job/a b-1.out", str(log))
    done = recorded("completed").replace("/var/tmp/my job/a b-1.out", str(log))
    answers(commands, recorded("pending"), running, running, done)
    log.write_text("")
    code, display = follow(commands)
    assert code == 0
    assert display.states == [
        "job 1: PENDING (Resources)",
        "job 1: RUNNING on node[1-2]",
        "job 1: COMPLETED",
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (recorded("failed"), 7),
        (recorded("cancelled"), 143),
        # Ended by its limit before it could say anything: never a success.
        (recorded("completed").replace("JobState=COMPLETED", "JobState=TIMEOUT"), 1),
        (recorded("completed").replace("JobState=COMPLETED", "JobState=NODE_FAIL"), 1),
    ],
)
def test_only_a_completed_job_succeeds(commands: Path, text: str, code: int) -> None:
    answers(commands, text)
    assert follow(commands)[0] == code


def test_a_silent_controller_is_given_some_time(commands: Path) -> None:
    answers(commands, "", "", "", recorded("completed"))
    assert follow(commands)[0] == 0


def test_a_controller_that_stays_silent_is_reported(commands: Path) -> None:
    answers(commands, "")
    with pytest.raises(LaunchError, match="sacct -j 1"):
        follow(commands)


def test_sbatchs_own_words_reach_the_user_in_one_line(commands: Path) -> None:
    (commands / "bin/sbatch").write_text("#!/bin/bash\nprintf 'error: a\\n  b\\n' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="refused the job: error: a b"):
        submit(script=Path("job.sbatch"), folder=commands, environment=os.environ)


def test_a_host_without_slurm_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="sbatch is not on PATH"):
        submit(script=Path("job.sbatch"), folder=tmp_path, environment={"PATH": str(tmp_path)})


def test_a_job_that_has_to_end_is_cancelled_by_its_id(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "verdict", "it does what it should not")
    cancels = f'#!/bin/bash\nprintf "%s\\n" "$@" >>{commands}/args; echo 1000 >{commands}/asked\n'
    (commands / "bin/scancel").write_text(cancels)
    running = recorded("running")
    answers(commands, running, running, running, recorded("cancelled"))
    code, display = follow(commands)
    assert code == 143
    assert (commands / "args").read_text().split() == ["1"]
    assert "ending job 1: it does what it should not" in display.states
    assert display.states[-1] == "job 1: CANCELLED"


def test_an_interrupt_detaches_and_usr1_goes_to_the_job(commands: Path) -> None:
    answers(commands, recorded("running"))
    me = os.getpid()
    poke = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            f"import os, time; time.sleep(0.5); os.kill({me}, {int(signal.SIGUSR1)}); "
            f"time.sleep(0.7); os.kill({me}, {int(signal.SIGINT)})",
        ]
    )
    before = time.monotonic()
    with pytest.raises(Detached):
        follow(commands)
    poke.wait()
    assert time.monotonic() - before < 20
    assert (commands / "args").read_text().split() == ["--batch", "--signal=USR1", "1"]
