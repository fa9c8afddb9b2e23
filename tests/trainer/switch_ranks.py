"""What each rank of the tests of a change of precision runs: the trainer itself, on CPUs that take
plans for GPUs, with emulated products of fp8."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdpplan.trainer import switch, train
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.report import TrainingRun
from tests.trainer import jobs, losses, plans
from tests.trainer.float8_layouts import MODEL

STEPS = 4
AT = 2
"""Steps before the change."""
SWITCH = {"precision": "bf16", "precision_switch": "fp8@0.5"}
PIPED = {"gradient_sync": "last", "reshard_after_forward": "never"}
TP = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}

CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 2},
    "gathered": {"dp_shard": 2, "training": {"fp8_all_gather": True}},
    "back": {"dp_shard": 2, "training": {"precision": "fp8", "precision_switch": "bf16@0.5"}},
    "muon": {"dp_shard": 2, "training": {"optimizer": "muon"}},
    "tied": {"dp_shard": 2, "model": {"tied_embeddings": True}},
    "ddp": {"dp_replicate": 2, "sharding": "ddp"},
    "tp": TP,
    "pp": {"pp": 2, "schedule": "1f1b", "micro_batch": 2, "num_microbatches": 4} | PIPED,
}


@contextmanager
def on_cpus() -> Iterator[None]:
    """Let plans for GPUs train on CPUs."""
    with (
        mock.patch("fsdpplan.trainer.train.start", return_value=losses.CPU),
        mock.patch("fsdpplan.trainer.parallel.assemble.start", return_value=losses.CPU),
    ):
        yield


def trained(folder: Path, case: dict[str, Any], *options: str, **training: Any) -> list[Any]:
    """Events of a run of the case that keeps its checkpoints in `folder`."""
    layout = {key: value for key, value in case.items() if key not in ("training", "model")}
    given = {**SWITCH, **case.get("training", {}), **training}
    model = {**MODEL, "layers": 2, **case.get("model", {})}
    document = plans.plan_document(model=model, training=given, **layout)
    document["cluster"]["device"] |= {"kind": "cuda", "peak_fp8_flops_per_second": 4e11}
    folder.mkdir(parents=True, exist_ok=True)
    plan, metrics = folder / f"plan-{dist.get_rank()}.json", folder / "metrics.jsonl"
    plan.write_text(json.dumps(document), encoding="utf-8")
    words = ["--plan", str(plan), "--metrics", str(metrics), "--learning-rate", "3e-3"]
    words += ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "1"]
    words += ["--checkpoint-keep", "9", "--no-numbers"]
    dist.barrier()
    with on_cpus():
        train.run_training(parse_options([*words, "--steps", str(STEPS), *options]))
    dist.barrier()
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def steps_of(events: list[Any]) -> list[tuple[int, str, float, float]]:
    """(step, precision, loss, learning rate)"""
    return [
        (one["step"], one["precision"], one["loss"], one["learning_rate"])
        for one in events
        if one["event"] == "step"
    ]


def resumed(folder: Path, case: dict[str, Any], step: int, **training: Any) -> list[Any]:
    """The steps of a run that goes on behind `step` of the one in `folder`."""
    if dist.get_rank() == 0:
        (folder / "saved" / "latest").write_text(f"step-{step:08}\n")
    dist.barrier()
    return steps_of(trained(folder, case, "--resume", "required", **training))


def measure(name: str, out: Path) -> dict[str, Any]:
    """A whole run, the same from every checkpoint on, and its last part as a run of its own."""
    case, folder = CASES[name], out.parent / name
    left: list[int] = []
    change = switch.change_precision

    def watched(run: TrainingRun) -> None:
        old = [weakref.ref(each) for each in run.assembled.model.parameters()]
        old += [weakref.ref(each) for each in run.assembled.model.modules()]  # type: ignore[misc]
        with mock.patch.object(switch, "assemble", side_effect=_counting(old, left)):
            change(run)

    with mock.patch.object(train, "change_precision", watched):
        events = trained(folder, case)
    later = {"gathered": "fp8", "back": "bf16"}.get(name, "fp8")
    alone = {"precision": later, "precision_switch": "none"}
    if later == "bf16":
        alone["fp8_all_gather"] = False
    return {
        "whole": steps_of(events),
        "changes": [one for one in events if one["event"] == "precision"],
        "left": left,
        "resumed": {
            step: resumed(folder, case, step)
            for step in (AT - 1, AT, AT + 1)[:: 1 if name == "gathered" else 3]
        },
        "alone": resumed(folder, case, AT, **alone),
    }


def _counting(old: list[Any], left: list[int]) -> Any:
    def assembled(*arguments: Any, **named: Any) -> Any:
        gc.collect()
        left.append(sum(each() is not None for each in old))
        return ASSEMBLE(*arguments, **named)

    return assembled


ASSEMBLE = switch.assemble


def measure_all(out: Path) -> None:
    """All that are asked for."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    jobs.leave_with({name: measure(name, out) for name in jobs.asked_of(CASES)}, out)
