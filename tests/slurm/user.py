"""A person at a terminal of the cluster: emits a job, runs it, looks at what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_estimate, make_plan
from tests.slurm.breaking import until
from tests.slurm.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 200
BATCH = 12
"""Sequences a step, which 1, 2, 3 and 4 ranks share evenly: the losses are the same ones."""
TOLERANCE = 1e-5
FSDPPLAN = (sys.executable, "-m", "fsdpplan")


def small_plan(*, nodes: int, per_node: int = 1) -> Plan:
    """A decoder whose step takes milliseconds, sharded over all ranks."""
    ranks = nodes * per_node
    whole = make_plan(
        nodes=nodes,
        per_node=per_node,
        dp_replicate=1,
        dp_shard=ranks,
        micro_batch=BATCH // ranks,
        num_microbatches=1,
    )
    model = replace(whole.model, layers=1, hidden=32, ffn_hidden=32, vocab=64, max_positions=32)
    training = replace(whole.training, seq_len=16)
    estimate = make_estimate(tokens=training.tokens_per_step, gpus=ranks)
    return replace(whole, model=model, training=training, estimate=estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How `fsdpplan run` ended."""

    code: int
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`fsdpplan run`, under way."""

    process: subprocess.Popen[bytes]
    output: Path

    def end(self, *, seconds: float = 280) -> Ended:
        """Wait for it."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"run did not end in {seconds:.0f} s:\n{self.output.read_text()}"
            ) from None
        return Ended(code=code, output=self.output.read_text(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Works in one folder with one job, whose name is the folder's."""

    cluster: SlurmCluster
    folder: Path
    running: list[Run] = field(default_factory=list, repr=False)
    """What was started."""
    path: Path | None = None
    """A folder of commands that come before all others."""

    @property
    def environment(self) -> dict[str, str]:
        """Of what is typed here; Slurm passes it on to the job."""
        own = self.cluster.environment
        if self.path is not None:
            own["PATH"] = f"{self.path}:{own['PATH']}"
        return {
            **own,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
        }

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type `fsdpplan ...` and wait."""
        return subprocess.run(
            [*FSDPPLAN, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def emit(self, plan: Plan, *options: str, nodes: tuple[str, ...] = ()) -> None:
        """`emit-launch ... > job.sbatch` or `emit-launch --out job`, for these nodes only."""
        (self.folder / "fsdpplan.json").write_text(plan_json(plan))
        others = [name for name in self.cluster.node_names if nodes and name not in nodes]
        exclude = ("--exclude", ",".join(others)) if others else ()
        name = ("--job-name", self.folder.name)
        done = self.type("emit-launch", *name, *exclude, *options)
        assert done.returncode == 0, done.stderr
        if "--out=job" not in options:
            (self.folder / "job.sbatch").write_text(done.stdout)

    def run(self, *options: str) -> Run:
        """`run ...` on Slurm, left to itself."""
        output = self.folder / f"run-{len(list(self.folder.glob('run-*.txt')))}.txt"
        with output.open("wb") as out:
            process = subprocess.Popen(
                [*FSDPPLAN, "run", "--target", "slurm", "--no-ledger", *options],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        run = Run(process=process, output=output)
        self.running.append(run)
        return run

    def cancel(self) -> None:
        """End what is left of the job."""
        job_id = self.job_id()
        if job_id:
            self.cluster.run("scancel", *job_id.split(), cwd=self.folder)
            until(lambda: not self.job_id(), what=f"the end of job {job_id}")

    def job_id(self) -> str:
        """The id of this folder's job in the queue; empty: there is none."""
        words = ("--noheader", f"--name={self.folder.name}", "--format=%A")
        return self.cluster.run("squeue", *words, cwd=self.folder).stdout.strip()

    def submitted(self, run: Run) -> str:
        """The id of the job that `run` has submitted."""
        found = ""

        def known() -> bool:
            nonlocal found
            found = self.job_id()
            return bool(found) or run.process.poll() is not None

        until(known, what="a job in the queue")
        assert found, run.output.read_text()
        return found

    @property
    def run_folder(self) -> Path:
        """The newest run's."""
        return max((self.folder / "fsdpplan-runs").iterdir(), key=lambda path: path.name)

    def losses(self) -> dict[int, float]:
        """Step by step, of the newest run; what was trained again counts as the last time."""
        return read_losses(self.run_folder / "metrics.jsonl")

    def beginnings(self) -> list[int]:
        """Steps at which the newest run began and went on."""
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [int(event["step"]) for event in events if event["event"] == "start"]

    def logs(self) -> str:
        """All that the jobs of this folder printed."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(self.folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
        )


def read_losses(path: Path) -> dict[int, float]:
    """Of a metrics file; a line that is being written does not count yet."""
    found = {}
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    for line in lines:
        event = json.loads(line)
        if event["event"] == "step":
            found[int(event["step"])] = float(event["loss"])
    return found


def require_same(losses: Mapping[int, float], reference: Mapping[int, float]) -> None:
    """Every step is there, with the loss of the undisturbed run."""
    missing = sorted(set(reference) - set(losses))
    assert not missing, f"steps {missing} were not trained, {len(losses)} were"
    wrong = {
        step: (losses[step], loss)
        for step, loss in reference.items()
        if abs(losses[step] - loss) > TOLERANCE
    }
    assert not wrong, f"(loss, undisturbed loss) by step: {wrong}"
    assert len(losses) == len(reference)


def reference_losses(folder: Path, plan: Plan, *, steps: int, seed: int = 0) -> dict[int, float]:
    """Losses of a run that nothing happens to, all ranks on this host."""
    (folder / "fsdpplan.json").write_text(plan_json(plan))
    words = ("run", "--target", "here", "--no-ledger", "--metrics", "metrics.jsonl")
    done = subprocess.run(
        [*FSDPPLAN, *words, "--steps", str(steps), "--seed", str(seed)],
        cwd=folder,
        env={**_without_slurm(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = read_losses(folder / "metrics.jsonl")
    assert len(losses) == steps
    return losses


def _without_slurm() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
