"""Stands in for wandb: what the trainer calls of it, with the parameters that it has there
(https://docs.wandb.ai/ref/python, 0.22)."""

from __future__ import annotations

from typing import Any

from recorder import record


class Run:
    """What `init` returns."""

    def define_metric(
        self,
        name: str,
        step_metric: str | None = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        goal: str | None = None,
        overwrite: bool | None = None,
    ) -> None:
        record("wandb", "define_metric", name=name, step_metric=step_metric)

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        record("wandb", "log", data=data, step=step)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        record("wandb", "finish")


def init(
    entity: str | None = None,
    project: str | None = None,
    dir: Any = None,
    id: str | None = None,
    name: str | None = None,
    notes: str | None = None,
    tags: Any = None,
    config: Any = None,
    *,
    resume: bool | str | None = None,
) -> Run:
    record("wandb", "init", project=project, id=id, resume=resume, config=config)
    return Run()
