"""Recipe: number formats and runtime of a row."""

from __future__ import annotations

import re

from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.training import Precision, ReduceDtype, Runtime, Training
from fsdpplan.validate.runtimes import runtime_of
from fsdpplan.validate.skipped import NotExpressed

REDUCE_BF16 = re.compile(r"\breduce_dtype=bf16\b|\+reduce bf16\b")
PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def training_of(run: MeasuredRun, *, seq_len: int, global_batch: int) -> tuple[Training, list[str]]:
    """The training of `run`, and what was assumed for it."""
    precision, runtime, said = _formats(run)
    reduce_dtype = _reduce_dtype(run, said)
    training = Training(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        reduce_dtype=reduce_dtype,
        runtime=runtime,
        headroom_fraction=0.0,  # what ran, ran with none
    )
    return training, said


def _formats(run: MeasuredRun) -> tuple[Precision, Runtime, list[str]]:
    said: list[str] = []
    if not run.dtype:
        return "bf16", "fsdp2", ["bf16"]
    if run.dtype.startswith("mixed"):
        if run.tp > 1 or run.pp > 1:
            raise NotExpressed("autocast with tensor or pipeline parallelism is not priced yet")
        said.append("half-precision autocast taken as bf16, parameters in fp32")
        return "bf16", "autocast", said
    if run.dtype not in PRECISIONS:
        raise NotExpressed("this number format is not priced", run.dtype)
    return PRECISIONS[run.dtype], "fsdp2", said


def _reduce_dtype(run: MeasuredRun, said: list[str]) -> ReduceDtype:
    """What the notes say, or what the software does; the two half precisions cost the same."""
    if REDUCE_BF16.search(run.notes):
        return "bf16"
    runtime = runtime_of(run.framework)
    if run.dtype in runtime.half_gradients:
        said.append(f"gradients reduced in {run.dtype}, as {runtime.name} does")
        return "bf16"
    if run.gpus != 1:
        said.append("gradients reduced in fp32")
    return "fp32"
