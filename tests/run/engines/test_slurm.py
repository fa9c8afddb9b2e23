from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.run.engines.engine import Forgotten
from fsdpplan.run.engines.slurm import Slurm, require_plain_id
from tests.run.commands import Commands, recorded

RECORD = 'printf "%s\\n" "$@" >>"$0.args"\n'


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


@pytest.fixture
def submit(commands: Commands, tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --exclude=n7,n8\n")

    def submitted(*, after: str | None = None, **environment: str) -> str:
        return Slurm().submit(
            script=tmp_path / "job.sbatch",
            folder=tmp_path,
            environment={**os.environ, **environment},
            after=after,
        )

    return submitted


def test_a_job_is_submitted_with_its_environment(
    commands: Commands, submit: Callable[..., str]
) -> None:
    commands.make("sbatch", RECORD + 'echo "$SBATCH_EXPORT" >>"$0.args"; echo "77;cluster"')
    assert submit() == "77"
    options = commands.arguments("sbatch")
    assert (options[0], options[-1]) == ("--parsable", "ALL")
    assert len(options) == 3


def test_a_job_of_a_chain_waits_for_the_one_before_it(
    commands: Commands, submit: Callable[..., str]
) -> None:
    commands.make("sbatch", RECORD + "echo 78")
    submit(after="77")
    assert "--dependency=afterany:77" in commands.arguments("sbatch")


def test_nodes_that_were_found_bad_are_left_out_beside_those_of_the_script(
    commands: Commands, submit: Callable[..., str], tmp_path: Path
) -> None:
    commands.make("sbatch", RECORD + "echo 78")
    (tmp_path / "bad-nodes").write_text("n3\tits link is slow\nn4\tno GPU\n")
    submit(FSDPPLAN_RUN_FOLDER=str(tmp_path))
    assert "--exclude=n7,n8,n3,n4" in commands.arguments("sbatch")


def test_quotes_of_the_scripts_own_line_are_not_part_of_a_node_name(
    commands: Commands, submit: Callable[..., str], tmp_path: Path
) -> None:
    commands.make("sbatch", RECORD + "echo 78")
    (tmp_path / "job.sbatch").write_text('#!/bin/bash\n#SBATCH --exclude="n03,n[17-19]"\n')
    (tmp_path / "bad-nodes").write_text("n4\tno GPU\n")
    submit(FSDPPLAN_RUN_FOLDER=str(tmp_path))
    assert "--exclude=n03,n[17-19],n4" in commands.arguments("sbatch")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "sbatch: error: invalid partition specified: nowhere\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "--partition",
        ),
        ("sbatch: error: Invalid account or account/partition combination specified", "--account"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "--qos"),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission "
            "failed: Job violates accounting/QOS policy (job submit limit, user's size and/or "
            "time limits)",
            "wait for one of yours to end",
        ),
        (
            "sbatch: error: Requested time limit is invalid (missing or exceeds some limit)",
            "--time",
        ),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("error: a\n  b", "change the job's options"),
        ("", "no reason given"),
    ],
)
def test_why_sbatch_refuses_is_one_line_and_says_what_to_do(
    said: str, advice: str, commands: Commands, submit: Callable[..., str]
) -> None:
    commands.make("sbatch", f"cat >&2 <<'EOF'\n{said}\nEOF\nexit 1")
    with pytest.raises(LaunchError, match="sbatch refused the job") as refused:
        submit()
    assert "\n" not in str(refused.value)
    assert advice in str(refused.value)
    assert "sbatch: error:" not in str(refused.value)


def test_a_full_queue_is_said_at_once_where_sbatch_would_try_for_minutes(
    commands: Commands, submit: Callable[..., str]
) -> None:
    commands.make(
        "sbatch",
        "echo 'sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying' >&2\n"
        "exec sleep 300",
    )
    with pytest.raises(LaunchError, match="queue is full"):
        submit()


@pytest.mark.parametrize("option", ["--array=1-4", "-a 1", "hetjob"])
def test_an_array_is_refused_before_it_is_submitted(
    option: str, submit: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\n#SBATCH {option}\n")
    with pytest.raises(LaunchError, match="leave --array"):
        submit()


def test_an_array_of_the_environment_is_refused_too(submit: Callable[..., str]) -> None:
    with pytest.raises(LaunchError, match="SBATCH_ARRAY_INX"):
        submit(SBATCH_ARRAY_INX="1-4")


@pytest.mark.parametrize("part", ["12_3", "12+0", "12_[1-4]"])
def test_parts_of_jobs_are_refused(part: str) -> None:
    with pytest.raises(SpecError, match="part of a job array"):
        require_plain_id(part)


def test_a_host_without_slurm_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text("")
    with pytest.raises(LaunchError, match="sbatch is not on PATH"):
        Slurm().submit(
            script=tmp_path / "job.sbatch", folder=tmp_path, environment={"PATH": str(tmp_path)}
        )
    with pytest.raises(LaunchError, match="scontrol is not on PATH"):
        Slurm(environment={"PATH": str(tmp_path)}).state("1")


def test_a_controller_that_does_not_answer_is_no_state(commands: Commands) -> None:
    commands.make("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert Slurm().state("1") is None


def forgets(commands: Commands) -> None:
    commands.make("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")


def test_a_forgotten_job_is_asked_of_the_accounting(commands: Commands) -> None:
    forgets(commands)
    commands.make("sacct", "echo '1|NODE_FAIL|1:0|node[1-2]'; echo '1|CANCELLED by 0|0:15|node3'")
    state = Slurm().state("1")
    assert state is not None
    assert (state.state, state.ended, state.shell_code, state.nodes) == (
        "CANCELLED",
        True,
        143,
        "node3",
    )


def test_without_accounting_the_completion_log_is_asked(commands: Commands) -> None:
    forgets(commands)
    commands.make(
        "sacct",
        'case "$*" in *-c*) echo "1|COMPLETED|node[1-2]";; '
        '*) echo "Slurm accounting storage is disabled" >&2; exit 1;; esac',
    )
    state = Slurm().state("1")
    assert state is not None
    assert (state.state, state.shell_code) == ("COMPLETED", 0)


def test_a_job_that_nobody_knows_is_said_to_be_forgotten(commands: Commands) -> None:
    forgets(commands)
    commands.make("sacct", "exit 1")
    with pytest.raises(Forgotten, match="forgotten job 1"):
        Slurm().state("1")


def test_signals_and_an_end_go_to_the_job_by_its_id(commands: Commands) -> None:
    commands.make("scancel", RECORD)
    Slurm().save_and_leave("5")
    assert Slurm().cancel("5")
    assert commands.arguments("scancel") == ["--batch", "--signal=USR1", "5", "5"]
    commands.make("scancel", "exit 1")
    assert not Slurm().cancel("5")


def test_the_log_of_a_job_is_a_file(commands: Commands) -> None:
    commands.make("scontrol", f"cat <<'EOF'\n{recorded('running')}\nEOF")
    state = Slurm().state("1")
    assert state is not None
    assert state.log == Path("/var/tmp/my job/a b-1.out")
    assert Slurm().log_lines("1") == []
