"""A run on four ranks goes on on two, by the plan and the command of `replan`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cost.reshard import checkpoint_bytes
from fsdpplan.files.plans import read_plan
from tests.cli.small import DEMO, answer, words
from tests.trainer import forks, jobs

pytestmark = pytest.mark.gloo

SMALLER = words("--layers 3")
LOSS_TOLERANCE = 2e-5
"""Over two steps, of rounding that Adam spreads."""


def train(folder: str, world: int, plan: str, *options: str) -> dict[int, float]:
    """The losses of a run, by step."""
    Path(folder).mkdir()
    metrics = f"{folder}/metrics.jsonl"
    jobs.finish(forks.start(str(world), "--plan", plan, "--metrics", metrics, *options))
    return jobs.losses(Path(folder))


def test_it_keeps_its_batch_and_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of([*DEMO, *SMALLER, "--no-ledger", "--save", "a.json"]) == 0
    options = words("--steps 4 --learning-rate 3e-3 --warmup-steps 1 --checkpoint-dir saved")
    every = words("--checkpoint-every 2 --checkpoint-keep 2")
    expected = train("four", 4, "a.json", *options, *every)
    Path("saved/latest").write_text("step-00000002\n")
    capsys.readouterr()
    found = answer(
        capsys, *words("replan a.json --gpus 2 --checkpoint-dir saved --no-ledger --save b.json")
    )
    assert found["global_batch_kept"]
    assert (found["checkpoint"]["step"], found["checkpoint"]["said"]) == (2, [])
    saved = found["checkpoint"]["saved_bytes"]
    assert saved == pytest.approx(checkpoint_bytes(read_plan("a.json").case), rel=0.05)
    resumed = train("two", 2, "b.json", *shlex.split(found["command"])[3:])
    assert resumed.keys() == {3, 4}
    assert resumed == pytest.approx({step: expected[step] for step in (3, 4)}, abs=LOSS_TOLERANCE)
