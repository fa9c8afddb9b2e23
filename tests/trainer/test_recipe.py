"""Runs of two ranks with a recipe of their own: alike on each layout, resumed or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer.schedule import Schedule, learning_rate_at
from tests.trainer import jobs

pytestmark = pytest.mark.gloo

MODEL = {"layers": 2, "hidden": 24, "ffn_hidden": 24, "heads": 2, "kv_heads": 2, "vocab": 60}
TIED = MODEL | {"tied_embeddings": True}
FSDP: dict[str, Any] = {"dp_shard": 2}
DDP: dict[str, Any] = {"sharding": "ddp", "dp_replicate": 2}
PIPED: dict[str, Any] = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "sharding": "ddp",
}
RECIPE = (
    *("--no-numbers", "--lr-schedule", "wsd", "--warmup-steps", "1", "--min-lr", "1e-4"),
    *("--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-6", "--weight-decay", "0.3"),
)
GROUPS = ("--param-group", "tok_emb*:lr=0.1", "--param-group", "layers.1.*:lr=3,weight_decay=0")
LOSS_TOLERANCE = 2e-5


def train(folder: Path, layout: dict[str, Any], *words: str, **options: Any) -> str:
    return jobs.train(folder, 2, *RECIPE, *words, model=TIED, **layout, **options)


def test_groups_and_schedules_are_alike_on_layouts_and_survive_a_resume(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    longer = ("--steps", "6", "--decay-steps", "2")
    train(whole, FSDP, *GROUPS, *longer)
    schedule = Schedule(
        kind="wsd", steps=6, learning_rate=3e-3, min_lr=1e-4, warmup_steps=1, decay_steps=2
    )
    rates = [line["learning_rate"] for line in jobs.lines(whole, "step")]
    assert rates == [learning_rate_at(step, schedule) for step in range(6)]

    saved = ("--checkpoint-dir", str(tmp_path / "saved"))
    # as far as this, both schedules are constant
    train(parted, PIPED, *GROUPS, *saved, "--steps", "3", "--decay-steps", "1")
    losses = [line["loss"] for line in jobs.lines(parted, "step")]
    expected = [line["loss"] for line in jobs.lines(whole, "step")]
    assert losses[:3] == pytest.approx(expected[:3], abs=LOSS_TOLERANCE)

    refused = train(parted, FSDP, *GROUPS, *saved, "--steps=6", "--learning-rate=1e-2", exit_code=2)
    assert "learning_rate 0.003 there, 0.01 from here on" in refused
    assert "by the old schedule 0.0001; give the options" in refused

    output = train(parted, FSDP, *GROUPS, *saved, *longer, "--allow-changes")
    assert "steps 3 there, 6 from here on" in output
    assert "the learning rate of step 4 is 0.003, by the old schedule 0.0001" in output
    assert jobs.losses(parted) == pytest.approx(jobs.losses(whole), abs=LOSS_TOLERANCE)


def test_a_group_changes_what_is_learnt(tmp_path: Path) -> None:
    words = ("--steps", "3")
    train(tmp_path / "with", PIPED, *GROUPS, *words)
    train(tmp_path / "without", PIPED, *words)
    changed, plain = jobs.losses(tmp_path / "with"), jobs.losses(tmp_path / "without")
    assert changed[1] == plain[1]
    assert abs(changed[3] - plain[3]) > 1e-3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is in this process
def test_experts_are_balanced_unless_told_not_to(tmp_path: Path) -> None:
    experts = {"experts": 4, "active": 1, "hidden": 16}
    words = ("--steps", "2", "--no-numbers", "--checkpoint-dir")
    biases = {}
    for rate in ("0.01", "0"):
        folder = tmp_path / rate
        given = (*words, str(folder / "saved"), "--expert-bias-rate", rate)
        jobs.train(folder, 2, *given, model=MODEL | {"experts": experts}, **FSDP)
        assert all(line["expert_imbalance"] >= 1 for line in jobs.lines(folder, "step"))
        biases[rate] = _biases(folder / "saved")
    assert biases["0"] == {0.0}
    assert biases["0.01"] <= {-0.02, -0.01, 0.0, 0.01, 0.02}
    assert biases["0.01"] - {0.0}


@pytest.mark.parametrize(
    ("before", "behind"), [(FSDP, FSDP), (PIPED, PIPED), (FSDP, DDP)], ids=["fsdp", "piped", "ddp"]
)
def test_a_mixture_goes_on_with_what_presses_its_routers(
    before: dict[str, Any], behind: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit on the same layout, also in a pipeline; on another as near as sums in another
    order are."""
    experts = {"experts": 4, "active": 2, "hidden": 16}
    words = ("--no-numbers", "--router-aux-loss-coef", "0.5", "--warmup-steps", "1")
    plan = {"model": MODEL | {"experts": experts}}
    jobs.train(tmp_path / "whole", 2, *words, "--steps", "4", **plan, **before)
    whole = _told(tmp_path / "whole")
    assert all(loss > 2 - 1e-3 for _, loss in whole.values())  # as many as are active, at least
    saved = ("--checkpoint-dir", str(tmp_path / "saved"))
    jobs.train(tmp_path / "parted", 2, *words, *saved, "--steps", "2", **plan, **before)
    more = (*saved, "--steps", "4", "--allow-changes")
    jobs.train(tmp_path / "parted", 2, *words, *more, **plan, **behind)
    near = 0.0 if before == behind else LOSS_TOLERANCE
    for step, values in _told(tmp_path / "parted").items():
        assert values == pytest.approx(whole[step], abs=near)


def _told(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, auxiliary loss) of each step."""
    lines = jobs.lines(folder, "step")
    return {line["step"]: (line["loss"], line["router_aux_loss"]) for line in lines}


def _biases(folder: Path) -> set[float]:
    """Values of the experts' biases in the newest checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]

    path = folder / (folder / "latest").read_text().strip()
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in entries if name.endswith("expert_bias")]
    assert names
    state = {name: torch.empty(entries[name].size) for name in names}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    return {round(value, 6) for tensor in state.values() for value in tensor.tolist()}
