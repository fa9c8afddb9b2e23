"""Under the wrong torch nothing starts, and it says which one would do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpplan.spec.torch_features import FEATURES
from fsdpplan.spec.training import NVIDIA_IMAGES, OLDEST, TorchRelease, torch_release
from fsdpplan.trainer import floor, torch_versions
from fsdpplan.trainer import torch_versions as trainer
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError, WrongTorch
from tests.trainer.plans import plan_document, plan_text

HERE = torch_release(torch.__version__)
FOLDER = Path(trainer.__file__).parent


def plan(**changes: Any) -> PlanConfig:
    return parse_plan(json.dumps({**plan_document(), **changes}))


def test_the_floor_and_its_image_are_the_planner_s() -> None:
    assert TorchRelease(*floor.OLDEST) == OLDEST
    month = floor.IMAGE.rpartition(":")[2].removesuffix("-py3")
    assert NVIDIA_IMAGES[month] == OLDEST


@pytest.mark.parametrize("version", ["2.9.1", "2.13.0+cu128", "2.10.0a0+b558c986e8.nv25.11", "3.0"])
def test_a_version_is_read_as_the_planner_reads_it(version: str) -> None:
    assert TorchRelease(*floor.release_of(version)) == torch_release(version)


def test_a_plan_that_needs_a_newer_torch_is_refused_with_what_helps() -> None:
    needed = {"oldest": "99.0", "because": "time travel"}
    with pytest.raises(WrongTorch) as refused:
        trainer.require_torch(plan(torch_needed=needed))
    said = str(refused.value)
    assert "layout (time travel) needs 99.0 or newer" in said
    assert "pip install 'torch>=99.0'" in said
    assert f"plan again with --torch {HERE}" in said
    assert refused.value.exit_code == 5


def test_a_plan_that_this_torch_can_train_is_not() -> None:
    trainer.require_torch(plan(torch_needed={"oldest": str(HERE), "because": "x"}))
    trainer.require_torch(plan())


def test_what_is_needed_must_be_said_right() -> None:
    with pytest.raises(TrainerError, match=r"torch_needed\.oldest"):
        plan(torch_needed={"oldest": 2.8})


def test_another_release_than_the_planned_one_is_only_told() -> None:
    said = trainer.torch_remark(parse_plan(plan_text(training={"torch": "2.0"})))
    assert f"torch {torch.__version__}, and the plan is for 2.0" in said
    assert f"--torch {HERE}" in said
    assert not trainer.torch_remark(parse_plan(plan_text(training={"torch": str(HERE)})))
    assert not trainer.torch_remark(parse_plan(plan_text()))


@pytest.mark.parametrize("words", [["-m", "fsdpplan.trainer"], [str(FOLDER / "__main__.py")]])
def test_a_torch_below_the_floor_ends_it_before_anything_is_imported(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.7.1+cu126'\n")
    ended = subprocess.run(
        [sys.executable, *words, "--plan", "x"],
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER.parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 5
    assert "this is torch 2.7.1+cu126, and this trainer needs 2.8 or newer" in ended.stderr
    assert "pip install 'torch>=2.8'" in ended.stderr
    assert floor.IMAGE in ended.stderr
    assert "Traceback" not in ended.stderr


def test_its_own_refusals_name_the_releases_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer looks what torch has, the planner in a table: both name the first that has it."""
    from torch.distributed import pipelining

    monkeypatch.setattr(torch_versions, "RELEASE", (2, 8))
    monkeypatch.setattr(torch_versions, "has_ring_attention", lambda: False)
    monkeypatch.delattr(pipelining, "ScheduleDualPipeV", raising=False)
    since = {feature.instead: str(feature.since) for feature in FEATURES if feature.instead}
    for layout, cuda in (
        ({"pp": 2, "schedule": "dualpipev", "virtual_stages": 2}, False),
        ({"cp": 2}, True),
        ({"ep": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True}, False),
    ):
        document = plan_document(**layout)
        document["cluster"]["device"]["kind"] = "cuda" if cuda else "cpu"
        (refusal,) = torch_versions.lacking(parse_plan(json.dumps(document)))
        instead = next(words for words in since if words.partition(" or ")[0] in refusal)
        assert f"torch>={since[instead]}" in refusal
