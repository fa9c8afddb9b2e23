"""Jobs whose time limit comes before their last step: the chain goes on, and trains no step twice.

Steps and saves last as long as they are told to, by lines that are added to the trainer in the job
folder. A plan may know that or be far off: then only what the job measures is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.emit.plans import make_estimate
from tests.slurm.saved import newest_sound
from tests.slurm.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3000)]

NUM_LIMITS = 30
AT_ONCE = 4
STEP_SECONDS, SAVE_SECONDS = 20.0, 15.0
"""The longest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A job, and how long it may run at a time."""

    seed: int
    minutes: int
    scale: float
    """Share of the longest step and save."""
    every: int
    """Steps between saves."""
    is_planned: bool
    """Whether the plan says how long a step takes; else it says a few milliseconds."""
    per_node: int

    @property
    def steps(self) -> int:
        """More than one limit has time for."""
        return round(60 * (self.minutes - 1) / (self.scale * STEP_SECONDS)) + 2


def draw_limit(seed: int) -> Limit:
    """A limit in which something can be done."""
    draw = random.Random(seed)
    scale = draw.choice((0.2, 0.3, 0.5, 0.75, 1.0))
    return Limit(
        seed=seed,
        # starting takes a while on a machine that is busy
        minutes=draw.choice((4, 5)) if scale < 0.5 else draw.choice((5, 6)),
        scale=scale,
        every=draw.choice((1, 2, 3, 50)),
        is_planned=draw.random() < 0.5,
        per_node=draw.choice((1, 2)),
    )


QUICK = Limit(seed=0, minutes=2, scale=0.05, every=10, is_planned=False, per_node=2)
LIMITS = [draw_limit(seed) for seed in range(1, NUM_LIMITS + 1)]


def slow_down(job_folder: Path, limit: Limit) -> None:
    """Have steps and saves of the trainer in a job folder last as long as the limit's."""
    for name, place, seconds in (
        ("train.py", "    output = train_step(\n", STEP_SECONDS * limit.scale),
        ("checkpoint/runs.py", "            problem = self._first_problem(problem)\n", 0.0),
    ):
        path = job_folder / "trainer" / name
        text = path.read_text()
        assert text.count(place) == 1, name
        indent = place[: len(place) - len(place.lstrip())]
        seconds = seconds or SAVE_SECONDS * limit.scale
        path.write_text(text.replace(place, f"{indent}time.sleep({seconds})\n{place}"))


def play(stage: Stage, limit: Limit) -> None:
    """A chain of jobs, until all steps are trained."""
    with stage.scene(f"limit-{limit.seed}", nodes=1, per_node=limit.per_node) as scene:
        seconds = STEP_SECONDS * limit.scale if limit.is_planned else 0.005
        tokens, gpus = scene.plan.training.tokens_per_step, scene.plan.cluster.gpus
        estimate = make_estimate(tokens=tokens, gpus=gpus, seconds=seconds)
        plan = replace(scene.plan, estimate=estimate)
        scene.user.emit(
            plan,
            f"--steps={limit.steps}",
            f"--time={limit.minutes}",
            f"--checkpoint-dir={scene.saved}",
            f"--checkpoint-every={limit.every}",
            "--out=job",
            nodes=scene.names,
        )
        slow_down(scene.user.folder / "job", limit)
        run = scene.user.run("job/job.sbatch")
        ended = run.end(seconds=2000)
        said = scene.told(run)
        assert ended.code == 0, said
        assert newest_sound(scene.saved) == limit.steps
        # each attempt begins where the one before it ended: no step is trained twice
        trained = [int(step) for step in re.findall(r"step (\d+)/\d+  loss", scene.user.logs())]
        assert trained == list(range(1, limit.steps + 1)), said
        assert len(scene.user.beginnings()) > 1, said
        assert "TIME LIMIT" not in said


@pytest.fixture(scope="module")
def ending(stage: Stage, request: pytest.FixtureRequest) -> Iterator[dict[int, Future[None]]]:
    """How each chain ended that some test of this session is about."""
    asked = {
        item.callspec.params["limit"].seed
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    players = ThreadPoolExecutor(max_workers=AT_ONCE)
    try:
        yield {
            limit.seed: players.submit(play, stage, limit)
            for limit in (QUICK, *LIMITS)
            if limit.seed in asked
        }
    finally:
        stage.end()
        players.shutdown(cancel_futures=True)


@pytest.mark.parametrize("limit", [QUICK], ids=["quick"])
def test_a_chain_goes_on(limit: Limit, ending: dict[int, Future[None]]) -> None:
    ending[limit.seed].result()


@pytest.mark.sampled(0)  # each takes minutes: only with --whole
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"seed{limit.seed}")
def test_a_chain_goes_on_with_nothing_lost(limit: Limit, ending: dict[int, Future[None]]) -> None:
    ending[limit.seed].result()
