"""`recommend --from-slurm`: for what is idle now, within the limits of the partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from tests.cli.small import answer, on_a_machine_without_gpus, words

RECORDED = Path(__file__).parents[2] / "recordings" / "slurm"
QUESTION = (
    "recommend --from-slurm --model llama-3.2-1b --cp 1 --pp 1 --tp 1 --micro-batch 1 --no-ledger"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Slurm that says what a real one said, as far as it is not said otherwise."""
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def says(**replaced: str) -> None:
        for what in ("node", "partition"):
            text = (RECORDED / f"show_{what}.txt").read_text()
            for old, new in replaced.items():
                text = text.replace(f"{old}=", f"{old}={new} Was=")
            (tools / what).write_text(text)
        (tools / "scontrol").write_text(f'#!/bin/sh\nexec cat "{tools}/$2"\n')
        (tools / "squeue").write_text("#!/bin/sh\necho 7\necho 8\n")
        for name in ("scontrol", "squeue"):
            (tools / name).chmod(0o755)

    return says


def test_it_plans_for_the_idle_nodes(slurm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(Gres="gpu:h100:4")
    found = answer(capsys, *words(QUESTION))
    assert (found["cluster"]["gpus"], found["cluster"]["gpus_per_node"]) == (4, 4)
    found = answer(capsys, *words(f"{QUESTION} --gpus 2"))
    assert found["cluster"]["gpus"] == 2


def test_the_limits_of_the_partition_hold(slurm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(MaxNodes="1", MaxTime="0-02:00:00")
    found = answer(capsys, *words(f"{QUESTION} --tokens 1T"))
    assert found["cluster"]["gpus"] == 8
    assert (found["cluster"]["name"], found["cluster"]["nodes"]) == ("dgx-h100", 1)
    said = " ".join(found["assumptions"])
    assert "8 GPUs, what partition main has idle now: 1 node of 8" in said
    assert "at most 1 node and 2.00 h a job; 2 jobs wait there" in said
    assert "profile dgx-h100, by Slurm's type h100" in said
    assert any("partition main ends a job after 2.00 h" in one for one in found["warnings"])
    plan = read_plan("fsdpplan.json")
    assert dict(plan.sources)["cluster"] == "Slurm: idle in partition main"


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ("--gpus 16", 2, "more than a job can have now"),
        ("--gpus-per-node 9", 2, "use that or less"),
        ("--min-gpus", 2, "leave one of them out"),
        ("--partition nowhere", 2, "name one of main, urgent"),
    ],
)
def test_bad_input_is_one_error(
    given: str, code: int, said: str, slurm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm()
    assert exit_code_of(words(f"{QUESTION} {given}")) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_type_that_says_too_little_asks_for_the_hardware(
    slurm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(Gres="gpu:a100:8")
    assert exit_code_of(words(QUESTION)) == 2
    assert "Slurm's type a100 may be" in capsys.readouterr().err
    found = answer(capsys, *words(f"{QUESTION} --hardware dgx-a100-80g-hdr --partition urgent"))
    assert found["cluster"]["device"]["name"] == "a100-sxm-80g"
    slurm(Gres="gpu:8")
    assert exit_code_of(words(QUESTION)) == 2
    assert "of which type" in capsys.readouterr().err


def test_a_partition_without_asking_slurm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("recommend --model llama-3.2-1b --gpus 8 --partition main")) == 2
    assert "add it, or leave it to emit-launch" in capsys.readouterr().err
