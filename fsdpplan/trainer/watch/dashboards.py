"""Dashboards: rank 0 tells TensorBoard, Weights & Biases and MLflow what the metrics file says.

Each has a thread of its own, which is handed lines and never waited for: a server that is away
costs lines of a dashboard, never a step. Their libraries are imported there, and are needed by
nobody else. A resumed run goes on in the dashboards' own run, whose names are kept beside its
checkpoints.

API: torch 2.13 torch/utils/tensorboard/writer.py; https://docs.wandb.ai/ref/python (init, log,
define_metric, finish); https://mlflow.org/docs/latest/api_reference/python_api/mlflow.html.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint.whole_file import read_small, write_whole
from ..config import PlanConfig
from ..errors import TrainerError
from ..options import Options

NAMES_FILE = "dashboards.json"
"""In the folder of checkpoints: dashboard -> what it calls the run."""
MOST_WAITING = 10_000
"""Lines that a dashboard may be behind; later ones it does not get."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a dashboard."""
LIBRARIES = ("tensorboard", "wandb", "mlflow")
"""Each is an option of the same name."""


def require_libraries(options: Options) -> None:
    """Raise where the process that tells dashboards has not what they need."""
    for name in LIBRARIES:
        if getattr(options, name) is not None and find_spec(name) is None:
            raise TrainerError(
                f"--{name} needs the Python package {name}, which is not installed here: pip "
                f"install {name}, or leave --{name} out"
            )


class Board(Protocol):
    """A dashboard; all calls come from one thread."""

    def start(self) -> None:
        """Begin or go on with its run."""

    def show(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of a step."""

    def forget_after(self, step: int) -> None:
        """Steps after this one will come again."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._first_step = first_step
        self._settings = settings
        self._writer: Any = None

    def start(self) -> None:
        # what a killed run wrote of later steps is hidden
        module: Any = import_module("torch.utils.tensorboard")
        purged = {"purge_step": self._first_step + 1} if self._first_step else {}
        self._writer = module.SummaryWriter(log_dir=str(self._folder), **purged)
        if not self._first_step:
            self._writer.add_text(
                "settings", f"```json\n{json.dumps(self._settings, indent=1)}\n```"
            )

    def show(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)

    def forget_after(self, step: int) -> None:
        self._writer.close()
        self._first_step = step
        self.start()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project. Steps are a field of their own: after a resumption and after going back
    they come again, and W&B's own number takes none twice."""

    def __init__(self, project: str, *, names: RunNames, settings: Mapping[str, Any]) -> None:
        self._project = project
        self._names = names
        self._settings = settings
        self._run: Any = None

    def start(self) -> None:
        wandb: Any = import_module("wandb")
        name = os.environ.get("WANDB_RUN_ID") or self._names.get("wandb") or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=self._project, id=name, resume="allow", config=dict(self._settings)
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._names.keep("wandb", name)

    def show(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def forget_after(self, step: int) -> None:
        """Nothing: it draws both."""

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an experiment, where MLFLOW_TRACKING_URI says, or in this folder."""

    def __init__(self, experiment: str, *, names: RunNames, settings: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._names = names
        self._settings = settings
        self._mlflow: Any = None

    def start(self) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(self._experiment)
        name = os.environ.get("MLFLOW_RUN_ID") or self._names.get("mlflow")
        run = self._mlflow.start_run(run_id=name)
        if name is None:
            self._mlflow.log_params(dict(self._settings))
        self._names.keep("mlflow", run.info.run_id)

    def show(self, numbers: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def forget_after(self, step: int) -> None:
        """Nothing: it draws both."""

    def close(self) -> None:
        self._mlflow.end_run()


class RunNames:
    """What dashboards call a run, in a file that its resumption finds."""

    def __init__(self, folder: Path | None, *, resumed: bool) -> None:
        self._path = None if folder is None else folder / NAMES_FILE
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        if self._path is not None and resumed:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(read_small(self._path))
                self._names = {str(board): str(name) for board, name in found.items()}

    def get(self, board: str) -> str | None:
        """The name that a run before this one had."""
        return self._names.get(board)

    def keep(self, board: str, name: str) -> None:
        """For the next one."""
        with self._lock:
            self._names[board] = name
            if self._path is not None:
                write_whole(self._path, json.dumps(self._names) + "\n")


class Dashboards:
    """Those that a run tells."""

    def __init__(self, boards: Mapping[str, Board]) -> None:
        self._threads = [_BoardThread(name, board) for name, board in boards.items()]

    def show(self, event: str, values: Mapping[str, Any]) -> None:
        """The numbers of a line of the metrics file: a step's as `train/NAME`, others as
        `EVENT/NAME`."""
        step = values.get("step")
        numbers = {
            f"{'train' if event == 'step' else event}/{name}": float(value)
            for name, value in values.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if isinstance(step, int) and numbers and event != "start":
            for thread in self._threads:
                thread.put(("show", numbers, step))

    def forget_after(self, step: int) -> None:
        """Steps after this one will come again."""
        for thread in self._threads:
            thread.put(("forget_after", step))

    def close(self) -> None:
        """The run has ended; waits for each at most so long."""
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.join()


class _BoardThread:
    """Hands lines to one dashboard. What goes wrong there is said once, and stops nothing."""

    def __init__(self, name: str, board: Board) -> None:
        self._name = name
        self._board = board
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MOST_WAITING)
        self._said = False
        self._thread = threading.Thread(target=self._serve, name=f"--{name}", daemon=True)
        self._thread.start()

    def put(self, call: tuple[Any, ...] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._say("is too slow, and does not get all lines")

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"had not taken all lines {CLOSE_SECONDS:.0f} s after the end")

    def _serve(self) -> None:
        if not self._tried(self._board.start):
            return
        while (call := self._calls.get()) is not None:
            method, *arguments = call
            self._tried(getattr(self._board, method), *arguments)
        self._tried(self._board.close)

    def _tried(self, call: Any, *arguments: Any) -> bool:
        try:
            call(*arguments)
        except Exception as error:  # of whatever library
            self._say(f"does not take what it is told: {type(error).__name__}: {error}")
            return False
        return True

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            print(f"--{self._name} {what}; training goes on", file=sys.stderr, flush=True)


def open_dashboards(plan: PlanConfig, options: Options, *, first_step: int) -> Dashboards | None:
    """Those that are asked for; to be called on rank 0, behind `require_libraries`."""
    settings = run_settings(plan, options)
    names = RunNames(options.checkpoint_dir, resumed=first_step > 0)
    boards: dict[str, Board] = {}
    if options.tensorboard is not None:
        boards["tensorboard"] = TensorBoard(
            options.tensorboard, first_step=first_step, settings=settings
        )
    if options.wandb is not None:
        boards["wandb"] = WeightsAndBiases(options.wandb, names=names, settings=settings)
    if options.mlflow is not None:
        boards["mlflow"] = MLflow(options.mlflow, names=names, settings=settings)
    return Dashboards(boards) if boards else None


def run_settings(plan: PlanConfig, options: Options) -> dict[str, Any]:
    """What a dashboard says beside the curves: the model, its training, the layout, the options."""
    said: dict[str, Any] = {"model": plan.model.name, "world": plan.layout.world}
    groups = {"training": asdict(plan.training), "layout": asdict(plan.layout)}
    groups["options"] = {
        name: value
        for name in (field.name for field in fields(Options))
        if isinstance(value := getattr(options, name), int | float | str | bool)
        and name not in ("plan", "build")
    }
    for group, values in groups.items():
        for name, value in values.items():
            said[f"{group}.{name}"] = value if isinstance(value, int | float | str) else str(value)
    return said
