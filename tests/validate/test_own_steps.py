"""Steps of the trainer that an H100 ran: what is allocated is as predicted.

Source: tests/golden/bench/train_runs_own.csv, 15 steps on one GPU; what a case is stands in its
`source_location`, since shapes have fewer layers, or another vocabulary, than the catalogue's.
"""

from __future__ import annotations

import re
from csv import DictReader
from dataclasses import replace
from statistics import median
from typing import Any

from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.table import bundled_runs
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

MEDIAN_ERROR, LARGEST_ERROR = 0.015, 0.06
CASE = re.compile(
    r"(?P<model>\S+?)(-layers(?P<layers>\d+))?(-vocab(?P<vocab>\d+))?"
    r" (?P<batch>\d+) x (?P<tokens>\d+)"
    r" (?P<kernels>\w+) (?P<recompute>\w+) (?P<precision>\w+) (?P<sharding>\w+)"
)


def rows() -> list[dict[str, str]]:
    """The steps of one GPU."""
    with (bundled_runs().parent / "train_runs_own.csv").open(encoding="utf-8") as file:
        return [row for row in DictReader(file) if CASE.fullmatch(row["source_location"])]


def case_of(row: dict[str, str]) -> Case:
    """It as the program planned it; on one GPU the trainer of that day wrapped DDP."""
    found = CASE.fullmatch(row["source_location"])
    assert found is not None
    said: dict[str, Any] = found.groupdict()
    shapes = {name: int(said[name]) for name in ("layers", "vocab") if said[name]}
    is_ddp = said["sharding"] == "ddp"
    training = Training(
        seq_len=int(said["tokens"]),
        global_batch=int(said["batch"]),
        precision=said["precision"],
        runtime="fsdp2_wrapped" if is_ddp else "fsdp2",
        torch="2.11",
    )
    layout = Layout(
        sharding=said["sharding"],
        micro_batch=int(said["batch"]),
        activation_checkpointing=said["recompute"],
        compile=said["kernels"] == "compiled",
    )
    cluster = load_cluster("dgx-h100", gpus=1).cluster
    model = replace(load_model(said["model"]), **shapes)
    return Case(model=model, cluster=cluster, training=training, layout=layout)


def test_what_is_allocated_on_one_gpu_is_as_predicted() -> None:
    errors = [
        rank_memory(case_of(row)).peak_allocated_bytes / (float(row["peak_mem_gib"]) * 2**30) - 1
        for row in rows()
    ]
    assert len(errors) == 15
    assert median(map(abs, errors)) <= MEDIAN_ERROR
    assert max(map(abs, errors)) <= LARGEST_ERROR


def test_one_rank_of_a_70b_plan_on_64_gpus_is_as_it_ran() -> None:
    """Measured on one H100 with torch 2.11: real memory and kernels, collectives that go nowhere;
    50.49 GiB allocated."""
    training = Training(seq_len=4096, global_batch=1024, torch="2.11")
    layout = Layout(
        dp_shard=64,
        micro_batch=4,
        num_microbatches=4,
        activation_checkpointing="full",
        compile=True,
    )
    cluster = load_cluster("dgx-h100", gpus=64).cluster
    model = load_model("llama-3.1-70b")
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    allocated = rank_memory(case).peak_allocated_bytes
    assert abs(allocated / (50.49 * 2**30) - 1) <= 0.02
