"""Training steps on one device: predicted first, then run by the trainer, then compared.

    python tests/benchmarks/single_gpu.py --hardware measured.toml --out table.md --json rows.jsonl

All predictions are written down, with the time, before anything runs. Each case is then emitted and
run as `fsdpplan run` does it; rows are appended and the table is written anew as each one ends, so
an interruption loses nothing. A benchmark, not a test: nothing here asserts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from single_gpu_cases import KERNELS, Trial, model_and_batch, planned  # noqa: E402
from single_gpu_rows import run_row  # noqa: E402
from single_gpu_rows import table as table_of_runs  # noqa: E402
from single_gpu_table import MEMORY, STEP, Result, table  # noqa: E402

from fsdpplan.emit.job import Job  # noqa: E402
from fsdpplan.emit.trainer_program import Trainer  # noqa: E402
from fsdpplan.errors import FsdpPlanError  # noqa: E402
from fsdpplan.files.clusters import load_cluster  # noqa: E402
from fsdpplan.files.plans import cluster_document, estimate_document  # noqa: E402
from fsdpplan.files.writing import write_text_atomically  # noqa: E402
from fsdpplan.run.compare import compare  # noqa: E402
from fsdpplan.run.follow.show import PlainDisplay  # noqa: E402
from fsdpplan.run.launch import Launch, emit_script  # noqa: E402
from fsdpplan.run.outcome import Outcome  # noqa: E402
from fsdpplan.run.session import INTERRUPTED, run_launch  # noqa: E402
from fsdpplan.spec.cluster import Cluster  # noqa: E402
from fsdpplan.spec.plan import Plan  # noqa: E402
from fsdpplan.spec.training import Training  # noqa: E402

MODELS = "llama-3.2-1b:4,llama-3.2-3b:2,gpt2-large:16"


class Record:
    """The files that the benchmark leaves."""

    def __init__(self, *, rows: Path, table: Path, runs: Path | None, profile: str) -> None:
        self._rows, self._table, self._profile, self._runs = rows, table, profile, runs
        self._results: list[Result] = []
        self._measured: list[Any] = []
        rows.write_text("", encoding="utf-8")

    def add(self, event: str, **values: Any) -> None:
        """Append one row."""
        row = {"event": event, "at": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def keep_run(self, result: Result, plan: Plan) -> None:
        """Write the table of measured runs anew, if one is asked for."""
        if self._runs is None or result.why is not None:
            return
        self._measured.append(
            run_row(
                plan,
                name=f"{result.case.name} {plan.training.precision} {plan.layout.sharding}",
                seconds=result.row(STEP).measured or 0.0,
                peak_bytes=result.row(MEMORY).measured,
                torch=result.device.rpartition("torch ")[2],
            )
        )
        write_text_atomically(self._runs, table_of_runs(self._measured))

    def keep(self, result: Result, *, step_seconds: Sequence[float | None] = ()) -> None:
        """Append what became of a case, and write the table anew."""
        self._results.append(result)
        if result.why is not None:
            self.add("skipped", case=result.case.name, why=result.why)
            print(f"single_gpu: {result.case.name}: {result.why}", file=sys.stderr, flush=True)
        else:
            rows = {row.quantity: [row.predicted, row.measured] for row in result.comparison}
            self.add(
                "measured",
                case=result.case.name,
                device=result.device,
                predicted_and_measured=rows,
                each_step_seconds=list(step_seconds),
            )
        write_text_atomically(self._table, table(self._results, profile=self._profile))


def cases(options: argparse.Namespace) -> Iterator[Trial]:
    """All that was asked for, model by model."""
    for model, micro_batch in map(model_and_batch, options.models):
        training = Training(
            seq_len=min(options.seq_len, model.max_positions),
            global_batch=micro_batch,
            precision=options.precision,
        )
        for kernels in options.kernels:
            for checkpointing in options.checkpointing:
                yield Trial(
                    model=model,
                    training=training,
                    compiled=kernels == "compiled",
                    checkpointing=checkpointing,
                    sharding=options.sharding,
                )


def predicted(options: argparse.Namespace, record: Record, cluster: Cluster) -> dict[Trial, Plan]:
    """The plans of all cases that can run; the predictions are on disk when this returns."""
    record.add("hardware", profile=options.hardware, cluster=cluster_document(cluster))
    plans = {}
    for case in cases(options):
        try:
            plans[case] = planned(case, cluster)
        except FsdpPlanError as error:
            record.keep(Result(case=case, why=str(error)))
        else:
            document = estimate_document(plans[case].estimate)
            record.add("predicted", case=case.name, estimate=document)
    return plans


def measure(plans: dict[Trial, Plan], options: argparse.Namespace, record: Record) -> None:
    """Run one case after the other, as long as the budget has time for one more."""
    ends = time.monotonic() + options.budget_seconds
    longest = 0.0
    for case, plan in plans.items():
        began = time.monotonic()
        if began + longest > ends:
            why = f"{options.budget_seconds:g} s for everything do not suffice"
            record.keep(Result(case=case, why=why))
            continue
        with tempfile.TemporaryDirectory(prefix="fsdpplan-") as folder:
            outcome = run(plan, steps=options.steps, folder=Path(folder), seconds=ends - began)
            result = result_of(case, plan, outcome, steps=options.steps)
        record.keep(result, step_seconds=[step.step_seconds for step in outcome.measured.steps])
        record.keep_run(result, plan)
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        longest = max(longest, time.monotonic() - began)


def run(plan: Plan, *, steps: int, folder: Path, seconds: float) -> Outcome:
    """Emit the plan and run it here, `seconds` at most."""
    job = Job(python=sys.executable, program=Trainer(steps=steps))
    launch = Launch(script=emit_script(plan, job), plan=plan, origin=Path(__file__).name)
    with _ended_after(seconds):
        return run_launch(launch, folder=folder, target="here", display=PlainDisplay(sys.stderr))


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """When the time is over the run is told to end, as by SIGTERM."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def result_of(case: Trial, plan: Plan, outcome: Outcome, *, steps: int) -> Result:
    """The comparison, or what went wrong."""
    done = len(outcome.measured.steps)
    if outcome.exit_code or outcome.measured.summary is None or done < steps:
        log = (outcome.run_folder / "job.log").read_text(errors="replace").splitlines()
        said = [line for line in log if "error: " in line] or log or [""]
        stopped = outcome.exit_code in (INTERRUPTED, 128 + signal.SIGTERM)
        how = "was stopped" if stopped else f"ended with exit code {outcome.exit_code}"
        why = f"it {how} after {done} steps" + ("" if stopped else f": {said[-1][:300]}")
        return Result(case=case, why=why)
    summary = json.loads((outcome.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    return Result(
        case=case,
        comparison=compare(estimate=plan.estimate, measured=outcome.measured),
        device=f"{summary['device']}, torch {summary['torch_version']}",
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--hardware", required=True, help="profile that predicts: a name or a path")
    add("--models", type=_listed(), default=MODELS, help="NAME or config.json, each :MICRO_BATCH")
    add("--kernels", type=_listed(*KERNELS), default=",".join(KERNELS), help="of the blocks")
    add("--checkpointing", type=_listed("none", "op", "full"), default="none,op,full", help="of it")
    add("--sharding", choices=("ddp", "fsdp"), help="otherwise as fsdpplan estimate")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="of matmuls")
    add("--seq-len", type=int, default=4096, help="or the model's longest")
    add("--steps", type=int, default=12, help="of each case; the first few do not count")
    add("--budget-seconds", type=float, default=480.0, help="for everything")
    add("--out", type=Path, required=True, help="Markdown table to write")
    add("--runs", type=Path, help="table of measured runs to write (docs/reference/runs.md)")
    add("--json", type=Path, required=True, help="rows to write, one JSON object a line")
    return parser.parse_args(arguments)


def _listed(*choices: str) -> Callable[[str], list[str]]:
    """An argparse type: words between commas, each one of `choices` where there are some."""

    def words_of(text: str) -> list[str]:
        words = text.split(",")
        unknown = [word for word in words if choices and word not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return words

    return words_of


def main() -> int:
    """Run the benchmark and print its table."""
    options = parse()
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    try:
        cluster = load_cluster(options.hardware, gpus=1).cluster
        profile = f"profile {Path(options.hardware).stem} ({cluster.device.evidence})"
        record = Record(rows=options.json, table=options.out, runs=options.runs, profile=profile)
        measure(predicted(options, record, cluster), options, record)
    except FsdpPlanError as error:
        print(f"single_gpu: {error}", file=sys.stderr)
        return error.exit_code
    print(options.out.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
