"""Random faults over short jobs: each ends in the right losses or in a clear failure, and no
checkpoint is lost but the one being written.

    FSDPPLAN_FAULTS=100 pytest tests/slurm/test_faults.py     # how many in place of 24
    FSDPPLAN_FAULTS_SEED=7                                    # other ones
    FSDPPLAN_FAULTS_A_JOB=2                                   # of longer or shorter stories
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.slurm.breaking import cannot_slow
from tests.slurm.drawing import Story, draw_story
from tests.slurm.stage import Stage
from tests.slurm.striking import Player, Tally, options

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3000)]

NUM_FAULTS = int(os.environ.get("FSDPPLAN_FAULTS", "24"))
FIRST_SEED = 1000 * int(os.environ.get("FSDPPLAN_FAULTS_SEED", "1"))
FAULTS_A_JOB = int(os.environ.get("FSDPPLAN_FAULTS_A_JOB", "4"))
AT_ONCE = 3

SIZES = [min(FAULTS_A_JOB, NUM_FAULTS - begun) for begun in range(0, NUM_FAULTS, FAULTS_A_JOB)]
STORIES = [draw_story(FIRST_SEED + number, num_faults=size) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def tallies(stage: Stage, request: pytest.FixtureRequest) -> Iterator[dict[int, Future[Tally]]]:
    """How each story ended that some test of this session is about."""
    asked = {
        item.callspec.params["story"].seed
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    if reason := cannot_slow():
        pytest.skip(reason)
    players = ThreadPoolExecutor(max_workers=AT_ONCE)
    try:
        yield {
            story.seed: players.submit(play, stage, story)
            for story in STORIES
            if story.seed in asked
        }
    finally:
        stage.end()
        players.shutdown(cancel_futures=True)


def play(stage: Stage, story: Story) -> Tally:
    """A job, and another one for what came too late for it."""
    tally, part = Tally(), 0
    left, loses = story.strikes, random.Random(story.seed) if story.goes else None
    while left or loses is not None:
        part += 1
        assert part <= len(story.strikes) + 1
        name, spare = f"story-{story.seed}-{part}", 1 + story.spares
        with stage.scene(name, nodes=story.nodes, per_node=story.per_node, spare=spare) as scene:
            player = Player(scene=scene, run=scene.start(*options(story)), tally=tally)
            left = tuple(player.play(left, loses=loses))
            loses = None
    return tally


@pytest.mark.sampled(1)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: f"seed{story.seed}")
def test_a_job_outlives_its_faults_or_says_why_not(
    story: Story, tallies: dict[int, Future[Tally]]
) -> None:
    tally = tallies[story.seed].result()
    told = tally.right.total() + tally.clear.total()
    assert told == story.num_faults
    print(f"right {dict(tally.right)}, clear {dict(tally.clear)}")


def test_the_same_seed_draws_the_same_story() -> None:
    assert draw_story(1, num_faults=8) == draw_story(1, num_faults=8)
    assert draw_story(1, num_faults=8) != draw_story(2, num_faults=8)
    assert all(draw_story(seed, num_faults=9).num_faults == 9 for seed in range(100))
