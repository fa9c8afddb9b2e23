"""`srun` is a script of the test here; tests/slurm has a real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpplan.errors import ProbeError
from fsdpplan.files.machines import machine_document
from fsdpplan.run.detect_node import lines_of
from fsdpplan.run.engines.allocation import survey_of_allocation
from fsdpplan.spec.machine import Machine
from tests.refusals import check_one_line
from tests.topology.found import machine, with_gpus

Srun = Callable[[str], Path]


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Srun:
    """Puts a script on PATH as `srun`, in an allocation of n01 and n02."""

    def install(body: str) -> Path:
        path = tmp_path / "srun"
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return tmp_path

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-02]")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    return install


def answers(folder: Path, **machines: Machine) -> str:
    """A line of shell that prints what these nodes say."""
    lines = [
        line
        for node, each in machines.items()
        for line in lines_of(node, json.dumps(machine_document(each)))
    ]
    (folder / "answers").write_text("\n".join(lines) + "\n")
    return f"cat {folder}/answers"


def test_outside_of_an_allocation_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ProbeError, match="salloc --nodes=4") as refusal:
        survey_of_allocation()
    check_one_line(refusal.value)


def test_without_srun_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-02]")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match="by srun, which is not on PATH"):
        survey_of_allocation()


def test_nodes_are_called_what_slurm_calls_them(srun: Srun, tmp_path: Path) -> None:
    srun(answers(tmp_path, n02=machine("dgx-h100"), n01=machine("dgx-h100")))
    survey = survey_of_allocation()
    assert [each.host.name for each in survey.machines] == ["n01", "n02"]
    assert survey.findings == ()


def test_a_node_that_does_not_answer_is_named_with_srun_s_reason(
    srun: Srun, tmp_path: Path
) -> None:
    said = "echo 'srun: error: n02: task 1: Exited with exit code 1' >&2"
    srun(f"{answers(tmp_path, n01=machine('dgx-h100'))}\n{said}\nexit 1")
    survey = survey_of_allocation()
    assert [each.host.name for each in survey.machines] == ["n01"]
    (found,) = survey.findings
    assert (found.kind, found.host, found.severity) == ("node_unread", "n02", "broken")
    assert "n02: task 1: Exited with exit code 1" in found.text
    assert "--exclude n02" in (found.remedy or "")


def test_a_node_of_another_version_is_named_and_the_others_are_read(
    srun: Srun, tmp_path: Path
) -> None:
    line = answers(tmp_path, n01=machine("dgx-h100"))
    (other,) = lines_of("n02", json.dumps({"schema_version": 2}))
    srun(f"{line}\necho '{other}'")
    (found,) = survey_of_allocation().findings
    assert found.host == "n02"
    assert "schema_version" in found.text


def test_when_no_node_answers_the_reason_is_said_once(srun: Srun) -> None:
    srun("echo 'srun: error: Unable to confirm allocation for job 7' >&2; exit 1")
    with pytest.raises(ProbeError, match="none of the 2 nodes could be read") as refusal:
        survey_of_allocation()
    check_one_line(refusal.value)
    assert "Unable to confirm allocation" in str(refusal.value)
    assert "detect_node to see why" in str(refusal.value)


def test_a_node_that_hangs_is_left_behind(srun: Srun, tmp_path: Path) -> None:
    line = answers(tmp_path, n01=with_gpus(machine("dgx-h100"), ecc_enabled=True))
    srun(
        f"{line}\ntrap 'echo Terminated >&2; exit 143' TERM\nwhile :; do read -rt 0.1 <> <(:); done"
    )
    survey = survey_of_allocation(seconds=10)
    assert [each.host.name for each in survey.machines] == ["n01"]
    assert "no answer within 10 s" in survey.findings[0].text


def test_what_a_job_says_of_its_own_tasks_is_not_for_these(
    srun: Srun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_LABELIO", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    srun(f"env >{tmp_path}/env; printf '%s\\n' \"$@\" >{tmp_path}/words; exit 1")
    with pytest.raises(ProbeError):
        survey_of_allocation()
    names = [line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()]
    assert "SLURM_JOB_ID" in names
    assert not {"SLURM_GPUS_PER_TASK", "SLURM_LABELIO"} & set(names)
    words = (tmp_path / "words").read_text().splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(words)
    assert words[-4:] == [sys.executable, "-P", "-m", "fsdpplan.run.detect_node"]


@pytest.mark.parametrize("step", [False, True])
def test_inside_a_step_cores_are_shared_with_it(
    step: bool, srun: Srun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step:
        monkeypatch.setenv("SLURM_STEP_ID", "0")
    srun(f"printf '%s\\n' \"$@\" >{tmp_path}/words; exit 1")
    with pytest.raises(ProbeError):
        survey_of_allocation()
    assert ("--overlap" in (tmp_path / "words").read_text().splitlines()) == step
