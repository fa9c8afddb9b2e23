"""What each rank of test_pace.py runs: steps of a trainer whose reads of the device are counted."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.trainer import train
from fsdpplan.trainer.config import PLAN_VARIABLE, parse_plan
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.signals import StopRequest
from fsdpplan.trainer.text.data import Data
from fsdpplan.trainer.text.packing import MicroBatch
from tests.trainer import jobs, matrix_layouts, plans

STEPS = 6
LOG_EVERY = 4

READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__")
"""Of a tensor: on CUDA the host waits for each."""
READ_OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
"""Operators that do so beneath Python."""

FSDP = {"dp_shard": 2}
FP16 = {"training": {"precision": "fp16", "reduce_dtype": "fp32"}}

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fsdp": (FSDP, ()),
    "ddp_not_clipped": ({"dp_replicate": 2, "sharding": "ddp"}, ("--clip-norm", "inf")),
    "tp": (matrix_layouts.SPLIT | {"model": matrix_layouts.FOUR_HEADS}, ()),
    "pp": (dict(matrix_layouts.PIPED), ()),
    "cp_alibi": ({"cp": 2, "model": {"positions": "alibi", "kv_heads": 4, "qk_norm": False}}, ()),
    "moe": (FSDP | {"model": matrix_layouts.EXPERTS}, ()),
    "moe_ep": (FSDP | {"ep": 2, "model": matrix_layouts.EXPERTS}, ()),
    "fp16": (FSDP | FP16, ()),
    "packed": (FSDP, ("--pack",)),
    "spikes_skipped": (FSDP, ("--on-spike", "skip")),
    "fp16_spikes_skipped_pp": (matrix_layouts.PIPED | FP16, ("--on-spike", "skip")),
}
"""Name -> (plan, options), all of 2 ranks."""


class ReadOperators(TorchDispatchMode):
    """Counts operators whose result the host has to know."""

    def __init__(self, seen: collections.Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "aten" and name in READ_OPERATORS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reads(seen: collections.Counter[str]) -> Iterator[None]:
    """Count, under `seen`, whatever makes the host wait for the device."""

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return original(*args, **kwargs)

        return counted

    originals = {name: getattr(torch.Tensor, name) for name in READS}
    synchronize = torch.cuda.synchronize
    for name, original in originals.items():
        setattr(torch.Tensor, name, counting(name, original))
    torch.cuda.synchronize = counting("synchronize", synchronize)
    try:
        with ReadOperators(seen):
            yield
    finally:
        torch.cuda.synchronize = synchronize
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class Ready(NamedTuple):
    """A step's data, made on the host before it is asked for."""

    data: Data
    batches: list[MicroBatch]

    def take(self, _: int) -> list[MicroBatch]:
        """What there is."""
        return self.batches


def reads_of(plan_text: str, options: tuple[str, ...]) -> list[dict[str, int]]:
    """What each step of a run reads, from the first one on."""
    os.environ[PLAN_VARIABLE] = plan_text
    words = ["--steps", str(STEPS), "--log-every", str(LOG_EVERY), "--hang-seconds", "0"]
    run = train.set_up(
        parse_plan(plan_text), parse_options([*words, "--no-numbers", *options]), StopRequest()
    )
    found, feed = [], run.feed
    for _ in range(STEPS):
        seen: collections.Counter[str] = collections.Counter()
        run.feed = Ready(feed.data, feed.take(run.progress.sequences))  # type: ignore[assignment]
        with counted_reads(seen):
            train.one_step(run)
        found.append(dict(seen))
    train.settle(run, is_last=True)
    run.votes.last()
    run.garbage.stop()
    assert len(run.losses) == len(run.step_seconds) == STEPS
    return found


def measure_all(out: Path) -> None:
    """Each case on two ranks."""
    dist.init_process_group("gloo")
    results = {
        name: reads_of(plans.plan_text(**plan), options)
        for name, (plan, options) in jobs.asked_of(CASES).items()
    }
    jobs.leave_with(results, out)
