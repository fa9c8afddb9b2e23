"""Several jobs at once on one cluster, each on nodes of its own."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fsdpplan.spec.plan import Plan
from tests.slurm.breaking import heal, until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.saved import newest_sound
from tests.slurm.user import Ended, Run, User, require_same, small_plan


class Pool:
    """What nobody plays with: nodes, folders."""

    def __init__(self, names: list[str]) -> None:
        self._free = list(names)
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[tuple[str, ...]]:
        """`count` of them, as soon as there are so many."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield tuple(taken)
        finally:
            with self._changed:
                self._free = sorted((*self._free, *taken), key=lambda name: (len(name), name))
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where scenes are played."""

    cluster: SlurmCluster
    folder: Path
    undisturbed: Mapping[int, float]
    """Losses, by step."""
    nodes: Pool = field(repr=False)
    quotas: Pool = field(repr=False)
    """Folders that can be filled."""
    running: list[Run] = field(default_factory=list, repr=False)
    """What was started, in case it has to end early."""

    def end(self) -> None:
        """Have the scenes that are still played fail soon."""
        for run in self.running:
            if run.process.poll() is None:
                run.process.kill()

    @contextmanager
    def scene(
        self,
        name: str,
        *,
        nodes: int,
        per_node: int = 1,
        spare: int = 0,
        job_folder: bool = False,
    ) -> Iterator[Scene]:
        """A job of the small plan, not yet emitted, on nodes that no other one has; with a folder
        of its own, or all in one script."""
        folder = self.folder / name
        folder.mkdir()
        with self.nodes.take(nodes + spare) as names, self.quotas.take(1) as (quota,):
            scene = Scene(
                stage=self,
                user=User(cluster=self.cluster, folder=folder, running=self.running),
                plan=small_plan(nodes=nodes, per_node=per_node),
                names=names,
                saved=Path(quota) / "saved",
                job_folder=job_folder,
            )
            try:
                yield scene
            finally:
                scene.user.cancel()
                heal(self.cluster, names)
                for left in Path(quota).iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One job, and what happens to it."""

    stage: Stage
    user: User
    plan: Plan
    names: tuple[str, ...]
    """Nodes that it may get."""
    saved: Path
    """Folder of its checkpoints, alone on its file system."""
    job_folder: bool = False
    """Whether its script calls files of a folder."""

    @property
    def cluster(self) -> SlurmCluster:
        """The cluster that it runs on."""
        return self.stage.cluster

    def start(self, *options: str) -> Run:
        """`emit-launch`, then `run`."""
        saves = (f"--checkpoint-dir={self.saved}", "--checkpoint-every=5", "--checkpoint-keep=3")
        steps = f"--steps={len(self.stage.undisturbed)}"
        out, script = (("--out=job",), ("job/job.sbatch",)) if self.job_folder else ((), ())
        self.user.emit(self.plan, steps, *saves, *out, *options, nodes=self.names)
        return self.user.run(*script)

    def started(self, *options: str) -> tuple[Run, str]:
        """The same, until it has saved something; the job's id too."""
        run = self.start(*options)
        self.saves_beyond(0, run)
        return run, self.user.submitted(run)

    def saves_beyond(self, step: int, run: Run) -> None:
        """Wait for a checkpoint after `step`."""

        def saved() -> bool:
            assert run.process.poll() is None, self.told(run)
            return newest_sound(self.saved) > step

        until(saved, what=f"a checkpoint after step {step} of {self.user.folder.name}")

    def ends_right(self, run: Run) -> Ended:
        """All steps are trained, with the losses of the undisturbed run."""
        ended = run.end()
        assert ended.code == 0, self.told(run)
        require_same(self.user.losses(), self.stage.undisturbed)
        assert newest_sound(self.saved) == len(self.stage.undisturbed)
        return ended

    def slurm(self, *command: str) -> str:
        """What an operator types; what it says."""
        done = self.cluster.run(*command, cwd=self.user.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, job_id: str, pattern: str) -> str:
        """What `scontrol show job` has in this place."""
        text = self.slurm("scontrol", "show", "job", job_id)
        found = re.search(pattern, text, re.MULTILINE)
        assert found, text
        return found[1]

    def nodes_of(self, job_id: str) -> list[str]:
        """Nodes of its allocation, the last one where it has ended."""
        names = self.shown(job_id, r"^ +NodeList=(\S+)")
        return self.slurm("scontrol", "show", "hostnames", names).split()

    def restarts(self, job_id: str) -> int:
        """How often Slurm has started it again."""
        return int(self.shown(job_id, r" Restarts=(\d+)"))

    def seconds_run(self, job_id: str) -> int:
        """How long it ran the last time."""
        hours, minutes, seconds = self.shown(job_id, r"RunTime=(\d+:\d+:\d+)").split(":")
        return 3600 * int(hours) + 60 * int(minutes) + int(seconds)

    def attempts(self) -> list[Attempt]:
        """Starts of the ranks that the job has written down."""
        path = self.user.run_folder / "attempts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [
            Attempt(nodes=tuple(event["nodes"])) for event in events if event["event"] == "attempt"
        ]

    def told(self, run: Run) -> str:
        """All that was printed."""
        return f"{run.output.read_text(errors='replace')}\n{self.user.logs()}"
