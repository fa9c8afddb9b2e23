"""Plays a story: a job, its faults, and a person who resumes a job that has failed."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fsdpplan.trainer.checkpoint.owner import SAVES
from tests.slurm import breaking
from tests.slurm.drawing import ENDING, Fault, Kind, Story, Strike
from tests.slurm.saved import corrupt_newest, newest_sound
from tests.slurm.stage import Scene
from tests.slurm.user import Ended, Run

MOST_RESUMES = 12
"""More often no person would try."""
_WHY = re.compile(
    r"It said: .{10,}"
    r"|attempt \d+ ended with exit code \d+: .{10,}; it is not started again"
    r"|fsdpplan: .{10,}: type .*"
)
PATIENCE_SECONDS = 500
"""A job that neither goes on nor ends for so long hangs."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the faults, by kind."""

    right: Counter[str] = field(default_factory=Counter)
    """The job went on by itself, or had trained its last step."""
    clear: Counter[str] = field(default_factory=Counter)
    """The job failed in words, and went on when it was resumed."""


@dataclass(slots=True, kw_only=True)
class Player:
    """A job under faults, and where it stands."""

    scene: Scene
    run: Run
    tally: Tally
    job_id: str = ""
    floor: int = 0
    """Step of a checkpoint that may not be lost."""
    open: list[Fault] = field(default_factory=list)
    """Faults of which it is not known yet what they come to."""
    told: list[str] = field(default_factory=list)
    """What happened so far."""
    num_resumes: int = 0

    def play(self, strikes: tuple[Strike, ...], *, loses: random.Random | None) -> list[Strike]:
        """Strike after strike until the job has ended right; returns what came too late.

        `loses` chooses the node that is lost for good at the end, if one is.
        """
        self.job_id = self.scene.user.submitted(self.run)
        left = list(strikes)
        while left and self._is_ready(patient=left[0].patient):
            missed = self._strike(left.pop(0).faults)
            if missed:
                left.append(Strike(faults=tuple(missed), patient=True))
        if loses is not None and self._is_ready(patient=True):
            self._lose_node(loses)
        while not self._has_ended_right():
            self._resume(self.run.end(seconds=PATIENCE_SECONDS))
        self.scene.ends_right(self.run)
        self._settle(self.tally.right)
        return left

    def story(self) -> str:
        """For whoever reads a failure."""
        return "\n".join((*self.told, self.scene.told(self.run)))

    def _is_ready(self, *, patient: bool) -> bool:
        """Wait for ranks, of a job that has saved something new where that is wanted; False: it
        has ended right instead."""
        while True:
            self._wait_for_news(more_than=self.floor if patient else -1)
            if self.run.process.poll() is None:
                self._require_floor()
                if patient:
                    self._settle(self.tally.right)
                return True
            if self._has_ended_right():
                return False
            self._resume(self.run.end())

    def _wait_for_news(self, *, more_than: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.run.process.poll() is None:
            if newest_sound(self.scene.saved) > more_than and self._places():
                return
            assert time.monotonic() < deadline, f"the job hangs:\n{self.story()}"
            time.sleep(0.1)

    def _places(self) -> list[str]:
        """Nodes on which ranks run now."""
        cluster = self.scene.cluster
        return [n for n in self.scene.names if breaking.ranks(cluster, self.job_id, node=n)]

    def _strike(self, faults: tuple[Fault, ...]) -> list[Fault]:
        """Have all of them happen at once; returns those that found nothing to happen to."""
        self.floor = newest_sound(self.scene.saved)
        missed: list[Fault] = []
        undo: list[tuple[float, Callable[[], object]]] = []
        for fault in sorted(faults, key=_when):
            places = self._places()
            if not places:
                missed.append(fault)
                continue
            node = places[fault.place % len(places)]
            self.told.append(f"after step {self.floor}: {fault.kind} on {node}")
            undo.append((fault.seconds, self._begin(fault, node)))
            self.open.append(fault)
        began = time.monotonic()
        for seconds, end in sorted(undo, key=lambda each: each[0]):
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            end()
        self._require_floor()
        return missed

    def _begin(self, fault: Fault, node: str) -> Callable[[], object]:
        """Have it happen; returns what ends it."""
        cluster, saved = self.scene.cluster, self.scene.saved
        draw = random.Random(fault.seed)
        match fault.kind:
            case "kill_rank":
                pids = breaking.ranks(cluster, self.job_id, node=node)
                breaking.kill(draw.sample(pids, k=min(1, len(pids))))
            case "kill_agent":
                breaking.kill(breaking.agents(cluster, self.job_id, node=node))
            case "choke_rank":
                pids = breaking.ranks(cluster, self.job_id, node=node)
                return breaking.choke(draw.choice(pids)) if pids else lambda: None
            case "preempt":
                breaking.preempt(cluster, node, seconds=fault.seconds)
            case "stop_rank":
                pids = breaking.ranks(cluster, self.job_id, node=node)[:1]
                breaking.kill(pids, signal.SIGSTOP)
                return partial(breaking.kill, pids, signal.SIGCONT)
            case "stop_slurmd":
                pids = [pid for pid in [cluster.slurmd_pid(node)] if pid is not None]
                breaking.kill(pids, signal.SIGSTOP)
                return partial(breaking.kill, pids, signal.SIGCONT)
            case "shift_clock":
                breaking.shift_clock(saved, draw)
            case "hide_folder":
                return breaking.hide(saved)
            case "kill_slurmd":
                breaking.kill_slurmd(cluster, node)
                return partial(breaking.start_slurmd, cluster, node)
            case "cut_link":
                breaking.cut(cluster, node)
                return partial(breaking.mend, cluster, node)
            case "slow_link":
                breaking.slow(cluster, node)
                return partial(breaking.quick, cluster, node)
            case "fill_disk":
                full = breaking.fill(saved.parent)
                return partial(full.unlink, missing_ok=True)
            case "corrupt" if self.floor:
                self.told.append(corrupt_newest(saved, draw))
                # Only what was corrupted may be lost.
                self.floor = newest_sound(saved)
            case "corrupt":
                self.told.append("nothing to corrupt yet")
        return lambda: None

    def _lose_node(self, draw: random.Random) -> None:
        """A node is cut off, or its daemon ends, until the job is over."""
        self.floor = newest_sound(self.scene.saved)
        node = draw.choice(self._places())
        lose = draw.choice((breaking.cut, breaking.kill_slurmd))
        self.told.append(f"after step {self.floor}: {lose.__name__} on {node} for good")
        with breaking.held(self.scene.cluster, self.job_id):
            lose(self.scene.cluster, node)
        kind: Kind = "cut_link" if lose is breaking.cut else "kill_slurmd"
        self.open.append(Fault(kind=kind, place=0, seconds=0, seed=0))

    def _require_floor(self) -> None:
        found = newest_sound(self.scene.saved)
        assert found >= self.floor, (
            f"the newest whole checkpoint is of step {found}, there was one of {self.floor}:\n"
            f"{self.story()}"
        )

    def _has_ended_right(self) -> bool:
        return self.run.process.poll() == 0

    def _resume(self, ended: Ended) -> None:
        """Go on with a job that has failed, if it has said why."""
        if ended.code == 0:
            return
        self._require_floor()
        assert says_why(ended), f"nobody says why it failed:\n{self.story()}"
        self.told.append(f"failed with {ended.code}: {says_why(ended)}")
        self._settle(self.tally.clear)
        self.num_resumes += 1
        assert self.num_resumes <= MOST_RESUMES, self.story()
        breaking.heal(self.scene.cluster, self.scene.names)
        if not newest_sound(self.scene.saved):
            # All were corrupted, and the trainer does not decide to begin anew: a person does.
            shutil.rmtree(self.scene.saved, ignore_errors=True)
            (self.scene.user.run_folder / SAVES).unlink(missing_ok=True)
        self.run = self.scene.user.run("--resume")
        self.job_id = self.scene.user.submitted(self.run)

    def _settle(self, how: Counter[str]) -> None:
        how.update(fault.kind for fault in self.open)
        self.open.clear()


def _when(fault: Fault) -> tuple[bool, bool]:
    """What ends the ranks comes last, and before it what takes the folder away from the others."""
    return fault.kind in ENDING, fault.kind == "hide_folder"


def says_why(ended: Ended) -> str:
    """The sentence in which a failed run says why; empty: there is none."""
    found = [found[0] for line in ended.output.splitlines() if (found := _WHY.search(line))]
    return found[-1] if found else ""


def options(story: Story) -> tuple[str, ...]:
    """Of `emit-launch`, for a job that has much to outlive."""
    spares = (f"--spares={story.spares}",) if story.spares else ()
    return ("--retries=20", *spares)
