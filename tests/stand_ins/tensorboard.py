"""Stands in for tensorboard, and for torch.utils.tensorboard, which needs it."""

from __future__ import annotations

from typing import Any

from recorder import record


class SummaryWriter:
    """As torch 2.13 torch/utils/tensorboard/writer.py has it; a test compares the parameters."""

    def __init__(
        self,
        log_dir: Any = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
    ) -> None:
        record("tensorboard", "SummaryWriter", log_dir=log_dir, purge_step=purge_step)

    def add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        record("tensorboard", "add_scalar", tag=tag, value=scalar_value, step=global_step)

    def add_text(
        self,
        tag: str,
        text_string: str,
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        record("tensorboard", "add_text", tag=tag, text=text_string)

    def close(self) -> None:
        record("tensorboard", "close")
