"""What happens to jobs of a cluster, and what comes of them: emitted and run as a user would.

All scenes that are asked for are played at once, each on nodes of its own, since most of their time
is waiting: for Slurm to miss a node, for a job to be let in again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.slurm.breaking import NOBODY, cut, drain, held, resume, set_down, until
from tests.slurm.saved import newest_sound
from tests.slurm.stage import Stage
from tests.slurm.user import User, reference_losses, require_same, small_plan

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

AT_ONCE = 4
FEW = 40
LOADED_SECONDS = 150
"""What a machine that is busy with other jobs may take longer than promised."""
PLAYED: dict[str, Callable[[Stage], None]] = {}


def played(scene: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """A scene that one test each waits for."""
    PLAYED[scene.__name__] = scene
    return scene


@pytest.fixture(scope="module")
def ending(stage: Stage, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """How each scene ended that some test of this session is about."""
    asked = {
        item.callspec.params["scene"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    players = ThreadPoolExecutor(max_workers=AT_ONCE)
    try:
        yield {
            name: players.submit(scene, stage) for name, scene in PLAYED.items() if name in asked
        }
    finally:
        stage.end()
        players.shutdown(cancel_futures=True)


@played
def finishes_on_2_nodes(stage: Stage) -> None:
    finishes(stage, nodes=2)


@played
def finishes_on_3_nodes(stage: Stage) -> None:
    finishes(stage, nodes=3)


@played
def finishes_on_4_nodes(stage: Stage) -> None:
    finishes(stage, nodes=4)


def finishes(stage: Stage, *, nodes: int) -> None:
    with stage.scene(f"finishes-{nodes}", nodes=nodes) as scene:
        ended = scene.ends_right(scene.start())
        assert "tokens per second" in ended.output
        assert scene.user.beginnings() == [0]


@played
def goes_on_after_an_operator_requeues_it(stage: Stage) -> None:
    with stage.scene("requeued", nodes=2, job_folder=True) as scene:
        run, job_id = scene.started()
        with held(scene.cluster, job_id):
            before = newest_sound(scene.saved)
            scene.slurm("scontrol", "requeue", job_id)
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] >= before


@played
def goes_on_after_the_signal_before_its_time_limit(stage: Stage) -> None:
    with stage.scene("limited", nodes=2, job_folder=True) as scene:
        run, job_id = scene.started("--time=30")
        with held(scene.cluster, job_id):
            before = newest_sound(scene.saved)
            # What --signal=B:USR1@120 sends when so little time is left.
            scene.slurm("scontrol", "update", f"JobId={job_id}", "TimeLimit=3")
            scene.slurm("scancel", "--batch", "--signal=USR1", job_id)
        until(lambda: scene.restarts(job_id) > 0, what="the job in the queue again")
        scene.slurm("scontrol", "update", f"JobId={job_id}", "TimeLimit=30")
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] > before


@played
def goes_on_elsewhere_after_a_node_is_set_down(stage: Stage) -> None:
    with stage.scene("set-down", nodes=2, spare=1) as scene:
        run, job_id = scene.started()
        with held(scene.cluster, job_id):
            before, node = newest_sound(scene.saved), scene.nodes_of(job_id)[1]
            set_down(scene.cluster, node)
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] >= before
        assert node not in scene.nodes_of(job_id)


@played
def goes_on_elsewhere_after_a_link_is_cut(stage: Stage) -> None:
    with stage.scene("cut", nodes=2, spare=1) as scene:
        run, job_id = scene.started()
        with held(scene.cluster, job_id):
            before, node = newest_sound(scene.saved), scene.nodes_of(job_id)[1]
            cut(scene.cluster, node)
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] >= before
        assert node not in scene.nodes_of(job_id)


@played
def goes_on_with_its_spare_node_after_a_link_is_cut(stage: Stage) -> None:
    with stage.scene("spare", nodes=2, spare=1, job_folder=True) as scene:
        run, job_id = scene.started("--spares=1")
        with held(scene.cluster, job_id):
            before, (first, second) = newest_sound(scene.saved), scene.attempts()[-1].nodes
            cut(scene.cluster, second)
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] >= before
        assert scene.restarts(job_id) == 0
        assert set(scene.attempts()[-1].nodes) == set(scene.names) - {second}
        assert first in scene.names


@played
def goes_on_after_the_node_of_its_script_is_cut_off(stage: Stage) -> None:
    """With spares Slurm lets such a job run on without a script."""
    with stage.scene("headless", nodes=2, spare=2) as scene:
        run, job_id = scene.started("--spares=1")
        with held(scene.cluster, job_id):
            before, head = newest_sound(scene.saved), scene.attempts()[-1].nodes[0]
            cut(scene.cluster, head)
        scene.ends_right(run)
        assert scene.user.beginnings()[-1] >= before
        assert scene.restarts(job_id) == 1
        assert head not in scene.attempts()[-1].nodes


@played
def goes_on_when_it_is_resumed_after_it_was_cancelled(stage: Stage) -> None:
    with stage.scene("cancelled", nodes=2, job_folder=True) as scene:
        run, job_id = scene.started()
        with held(scene.cluster, job_id):
            before = newest_sound(scene.saved)
            scene.slurm("scancel", job_id)
        ended = run.end()
        assert ended.code != 0
        assert "CANCELLED" in ended.output
        scene.ends_right(scene.user.run("--resume"))
        assert scene.user.beginnings()[-1] >= before


@played
def leaves_a_node_out_on_which_the_head_has_a_wrong_address(stage: Stage) -> None:
    with stage.scene("left-out", nodes=2, spare=1) as scene:
        head, wrong, spare = scene.names
        scene.cluster.tell_address(wrong, of=head, address=NOBODY)
        # Which nodes are taken first is for Slurm to choose: these two.
        drain(scene.cluster, spare)
        run = scene.start()
        job_id = scene.user.submitted(run)
        until(lambda: bool(scene.attempts()), what="the first start")
        resume(scene.cluster, spare)
        scene.ends_right(run)
        assert scene.nodes_of(job_id) == [head, spare]
        assert wrong in (scene.user.run_folder / "bad-nodes").read_text()


@played
def fails_in_words_where_the_head_has_a_wrong_address(stage: Stage) -> None:
    with stage.scene("misled", nodes=2) as scene:
        head, wrong = scene.names
        scene.cluster.tell_address(wrong, of=head, address=NOBODY)
        run = scene.start("--retries=0")
        job_id = scene.user.submitted(run)
        ended = run.end()
        assert ended.code == 5
        said = [line for line in ended.output.splitlines() if head in line and wrong in line]
        assert any(NOBODY in line for line in said), ended.output
        # A minute is what is promised; a loaded machine starts what checks a node that much later.
        assert scene.seconds_run(job_id) < 60 + LOADED_SECONDS


@played
def fails_at_once_when_a_rank_ends_with_7(stage: Stage) -> None:
    with stage.scene("seven", nodes=2) as scene:
        program = scene.user.folder / "own.py"
        program.write_text(
            "import os, sys, time\n"
            "if os.environ['RANK'] == '1':\n"
            "    open('left', 'w').close()\n"
            "    sys.exit(7)\n"
            "time.sleep(600)\n"
        )
        scene.user.emit(small_plan(nodes=2), f"--script={program}", nodes=scene.names)
        run = scene.user.run()
        ended = run.end()
        seconds = time.time() - (scene.user.folder / "left").stat().st_mtime
        assert ended.code not in (0, 5)
        assert "exitcode  : 7" in ended.output
        assert seconds < 30 + LOADED_SECONDS


@played
def does_not_meet_another_one_on_the_same_nodes(stage: Stage) -> None:
    with stage.scene("two", nodes=2) as scene:
        other = User(cluster=scene.cluster, folder=scene.user.folder / "other")
        alone = scene.user.folder / "alone"
        for folder in (other.folder, alone):
            folder.mkdir()
        other.emit(small_plan(nodes=2), f"--steps={FEW}", "--seed=1", nodes=scene.names)
        run, of_other = scene.start(), other.run()
        ended = of_other.end()
        assert ended.code == 0, ended.output
        scene.ends_right(run)
        reference = reference_losses(alone, small_plan(nodes=1), steps=FEW, seed=1)
        require_same(other.losses(), reference)


@played
def is_refused_where_another_one_saves(stage: Stage) -> None:
    with stage.scene("owned", nodes=2, spare=2) as scene:
        here, there = scene.names[:2], scene.names[2:]
        other = User(cluster=scene.cluster, folder=scene.user.folder / "other")
        other.folder.mkdir()
        for name in there:
            drain(scene.cluster, name)
        run, job_id = scene.started()
        for name in there:
            resume(scene.cluster, name)
        with held(scene.cluster, job_id):
            before = newest_sound(scene.saved)
            saves = (f"--checkpoint-dir={scene.saved}", "--checkpoint-every=5", "--retries=0")
            other.emit(small_plan(nodes=2), f"--steps={FEW}", *saves, nodes=there)
            ended = other.run().end()
            assert ended.code not in (0, None)
            assert job_id in ended.output, ended.output
            assert "--checkpoint-dir" in ended.output, ended.output
            assert newest_sound(scene.saved) == before
        scene.ends_right(run)
        assert set(scene.nodes_of(job_id)) == set(here)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scene", PLAYED)
def test_a_job(scene: str, ending: dict[str, Future[None]]) -> None:
    ending[scene].result()
