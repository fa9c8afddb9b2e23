"""Stands in for mlflow: what the trainer calls of it, with the parameters that it has there
(https://mlflow.org/docs/latest/api_reference/python_api/mlflow.html, 3.5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from recorder import record


def set_experiment(experiment_name: str | None = None, experiment_id: str | None = None) -> None:
    record("mlflow", "set_experiment", name=experiment_name)


def start_run(
    run_id: str | None = None,
    experiment_id: str | None = None,
    run_name: str | None = None,
    nested: bool = False,
    parent_run_id: str | None = None,
    tags: Any = None,
    description: str | None = None,
    log_system_metrics: bool | None = None,
) -> Any:
    record("mlflow", "start_run", run_id=run_id)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "given-by-the-server"))


def log_params(
    params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None
) -> None:
    record("mlflow", "log_params", params=params)


def log_metrics(
    metrics: dict[str, float],
    step: int | None = None,
    synchronous: bool | None = None,
    run_id: str | None = None,
    timestamp: int | None = None,
    model_id: str | None = None,
    dataset: Any = None,
) -> None:
    record("mlflow", "log_metrics", metrics=metrics, step=step)


def end_run(status: str = "FINISHED") -> None:
    record("mlflow", "end_run", status=status)
