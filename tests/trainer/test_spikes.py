"""Loss spikes: what is one, and what a run does about it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpplan.trainer import step as steps
from fsdpplan.trainer import train
from fsdpplan.trainer.checkpoint import runs
from fsdpplan.trainer.checkpoint.runs import Checkpoints, Saved
from fsdpplan.trainer.parallel.shards import local
from fsdpplan.trainer.spikes import LEAST_STEPS, MOST_IN_A_ROW, WINDOW, SpikeGuard
from fsdpplan.trainer.text.feed import Feed
from tests.trainer import jobs, matrix_layouts, plans

CPU = torch.device("cpu")
SPIKE_STEP = 24


def judged(values: list[tuple[float, float]], *, scales_loss: bool = False) -> list[bool]:
    """Which of (loss, norm) are spikes beside those before."""
    guard = SpikeGuard(CPU, stages=1, scales_loss=scales_loss)
    return [bool(guard.judge_equal(torch.tensor(each)).is_spike) for each in values]


def noisy(count: int, *, seed: int = 0, level: float = 3.0) -> list[tuple[float, float]]:
    """A run that goes on as runs do: the loss falls slowly, the norm is skewed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, count, generator=generator, dtype=torch.float64)
    losses = level - 0.002 * torch.arange(count) + 0.05 * noise[0]
    norms = torch.exp(0.2 * noise[1])
    return list(zip(losses.tolist(), norms.tolist(), strict=True))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed: int) -> None:
    assert not any(judged(noisy(3 * WINDOW, seed=seed)))


@pytest.mark.parametrize("at", [LEAST_STEPS, WINDOW - 1, WINDOW, 2 * WINDOW + 7])
@pytest.mark.parametrize("spike", [(6.0, 1.0), (3.0, 50.0), (math.nan, 1.0), (3.0, math.inf)])
def test_what_is_far_off_is_one_and_moves_no_limit(at: int, spike: tuple[float, float]) -> None:
    values = noisy(3 * WINDOW)
    values[at] = spike
    assert [step for step, found in enumerate(judged(values)) if found] == [at]


def test_the_first_steps_are_judged_by_whether_they_are_numbers() -> None:
    assert judged([(9.0, 1.0), (3.0, 1.0), (math.inf, 1.0), (3.0, 90.0)]) == [
        *(False, False, True, False)
    ]


def test_a_level_that_stays_is_how_the_run_is_from_there_on() -> None:
    found = judged(noisy(LEAST_STEPS + 5) + noisy(60, seed=1, level=9.0))
    assert [step for step, each in enumerate(found) if each] == [
        LEAST_STEPS + 5 + more for more in range(MOST_IN_A_ROW)
    ]


def test_what_is_no_number_never_becomes_usual() -> None:
    assert all(judged(noisy(30) + [(math.nan, 1.0)] * 20)[30:])


def test_norms_that_overflow_are_the_loss_scalers() -> None:
    values = noisy(60)
    values[40] = (values[40][0], math.inf)
    assert not any(judged(values, scales_loss=True))


def spiking(folder: Path) -> None:
    """A job whose loss spikes where a certain batch comes, at SPIKE_STEP the first time; of each
    step it writes whether the weights have changed."""
    options = (folder / "options").read_text().split()
    take, pass_, one = Feed.take, steps.forward_backward, train.train_step
    first = [0]
    changed = []

    def taking(feed: Feed, number: int) -> Any:
        first[0] = number
        return take(feed, number)

    def passing(assembled: Any, batches: Any, plan: Any, *more: Any) -> Any:
        loss = pass_(assembled, batches, plan, *more)
        bad = plan.training.global_batch * (SPIKE_STEP - 1)
        return loss * 3 if bad <= first[0] < bad + plan.training.global_batch else loss

    def stepping(assembled: Any, *args: Any, **more: Any) -> Any:
        before = [local(each).detach().clone() for each in assembled.model.parameters()]
        output = one(assembled, *args, **more)
        now = map(local, assembled.model.parameters())
        changed.append(any(not torch.equal(*pair) for pair in zip(before, now, strict=True)))
        return output

    Feed.take, steps.forward_backward = taking, passing  # type: ignore[method-assign]
    train.train_step = stepping
    set_up = train.set_up

    def noting(*args: Any) -> Any:
        run = set_up(*args)
        close = run.metrics.close
        run.metrics.close = lambda: (run.metrics.emit("changed", step=30, steps=changed), close())
        return run

    train.set_up = noting
    for word, fault in FAULTS_OF_RANK_1.items():
        if word in options:
            options.remove(word)
            fault()
    paths = [f"--plan={folder / 'plan.json'}", f"--metrics={folder / 'metrics.jsonl'}"]
    train.main([*paths, "--steps=30", "--learning-rate=1e-4", "--no-numbers", *options])


def hear_late_of_saves() -> None:
    """Let rank 1 hear that a save has ended only where it waits for that."""
    ended = Checkpoints.ended

    def late(checkpoints: Checkpoints) -> Saved | None:
        return None if torch.distributed.get_rank() else ended(checkpoints)

    Checkpoints.ended = late  # type: ignore[method-assign]


def fail_saves_alone() -> None:
    """Let the saves of rank 1 fail when the other ranks are through."""
    save = runs.dcp.save  # type: ignore[attr-defined]

    def failing(*args: Any, **given: Any) -> None:
        save(*args, **given)
        if torch.distributed.get_rank():
            raise OSError("no such disk")

    runs.dcp.save = failing  # type: ignore[attr-defined]


FAULTS_OF_RANK_1 = {"late": hear_late_of_saves, "broken": fail_saves_alone}


def run_spiking(folder: Path, *options: str, **plan: Any) -> list[bool]:
    """Which of its steps changed the weights."""
    (folder / "plan.json").write_text(plans.plan_text(**plan), encoding="utf-8")
    (folder / "options").write_text(" ".join(options))
    jobs.finish(jobs.start_function(2, "tests.trainer.test_spikes:spiking", folder))
    return list(jobs.lines(folder, "changed")[0]["steps"])


SKIPPED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "on the device": ({"dp_shard": 2}, ()),
    "by the host": ({"dp_shard": 2}, ("--adamw=foreach",)),
    "in a pipeline": (dict(matrix_layouts.PIPED), ()),
}


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", SKIPPED)
def test_an_update_is_left_out(tmp_path: Path, how: str) -> None:
    plan, options = SKIPPED[how]
    changed = run_spiking(tmp_path, "--on-spike=skip", "--log-every=7", *options, **plan)
    assert [step for step, each in enumerate(changed, start=1) if not each] == [SPIKE_STEP]
    (event,) = jobs.lines(tmp_path, "spike")
    assert (event["step"], event["action"]) == (SPIKE_STEP, "skip")
    assert event["loss"] > 2.5 * event["usual_loss"]
    assert jobs.lines(tmp_path, "summary")[0]["spikes"] == {"skip": 1}


@pytest.mark.gloo
def test_a_run_goes_back_and_on_with_other_data(tmp_path: Path) -> None:
    """The spike's batch is not seen again, no checkpoint is of a step behind it, and each step is
    told of once."""
    saved = tmp_path / "saved"
    options = ("--on-spike=rollback", "--checkpoint-every=8", f"--checkpoint-dir={saved}")
    changed = run_spiking(tmp_path, *options, "--log-every=5", dp_shard=2)
    (event,) = jobs.lines(tmp_path, "rollback")
    assert (event["step"], event["spike_step"], event["tries"]) == (16, SPIKE_STEP, 1)
    assert event["sequences_skipped"] == 8 * 8
    assert len(changed) == 8 + 30
    assert [line["step"] for line in jobs.lines(tmp_path, "step")] == [5, 10, 15, 20, 25, 30]
    (summary,) = jobs.lines(tmp_path, "summary")
    assert (summary["step"], summary["spikes"]) == (30, {"rollback": 1})
    assert (saved / "latest").read_text() == "step-00000030\n"
    document = (saved / "step-00000030" / "trainer.json").read_text()
    assert f'"sequences": {(30 + 8) * 8}' in document


@pytest.mark.gloo
def test_ranks_decide_alike_where_one_hears_late_of_a_save(tmp_path: Path) -> None:
    """A save in the background ends when it does, on each rank by itself."""
    saved = f"--checkpoint-dir={tmp_path / 'saved'}"
    options = ("--on-spike=rollback", "--checkpoint-every=16", saved, "late")
    changed = run_spiking(tmp_path, *options, dp_shard=2)
    assert [event["step"] for event in jobs.lines(tmp_path, "rollback")] == [16]
    (event,) = jobs.lines(tmp_path, "rollback")
    assert len(changed) == 30 + event["sequences_skipped"] // 8


@pytest.mark.gloo
def test_ranks_decide_alike_where_a_save_fails_on_one(tmp_path: Path) -> None:
    saved = f"--checkpoint-dir={tmp_path / 'saved'}"
    options = ("--on-spike=rollback", "--checkpoint-every=16", saved, "broken")
    (tmp_path / "plan.json").write_text(plans.plan_text(dp_shard=2), encoding="utf-8")
    (tmp_path / "options").write_text(" ".join(options))
    process = jobs.start_function(2, "tests.trainer.test_spikes:spiking", tmp_path)
    process.communicate(timeout=jobs.TIMEOUT_SECONDS)
    assert [event["action"] for event in jobs.lines(tmp_path, "spike")] == ["keep"]
    assert process.returncode == 1  # its last state is not saved, on either rank


@pytest.mark.gloo
def test_a_run_that_cannot_go_back_goes_on(tmp_path: Path) -> None:
    options = ("--on-spike=rollback", "--checkpoint-every=100")
    changed = run_spiking(tmp_path, *options, f"--checkpoint-dir={tmp_path / 'saved'}", dp_shard=2)
    assert len(changed) == 30
    assert [event["action"] for event in jobs.lines(tmp_path, "spike")] == ["keep"]
