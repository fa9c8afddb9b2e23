"""A stack goes by the program that trained, whatever library that stands on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.table import parse_runs
from fsdpplan.spec.ledger import Machines
from fsdpplan.validate.learn.evidence import software_name, told
from fsdpplan.validate.learn.known import known_jobs
from tests.ledgers import rows_of_a_slow_cluster


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("MaxText (dgxc v25.04)", "MaxText"),
        ("Paxml (dgxc v24.11.1)", "Paxml"),
        ("torchtitan (FSDP2)", "torchtitan"),
        ("llm-foundry/Composer (PyTorch FSDP1)", "Composer"),
        ("my trainer v2.1", "my trainer"),
        ("", "PyTorch"),
    ],
)
def test_programs_of_one_library_are_stacks_of_their_own(framework: str, name: str) -> None:
    header = "framework,model_name,layers,hidden,heads,seq_len,gpu,gpus"
    row = f'"{framework}",mine,32,4096,32,8192,H100-80GB,8'
    (run,) = parse_runs(f"{header}\n{row}\n", where="mine.csv")
    assert software_name(run) == name


def test_processes_of_a_cpu_say_nothing_of_gpus_and_gpus_nothing_of_them() -> None:
    """The tutorial's run on four processes is the first of many ledgers."""
    gpus = load_cluster("dgx-h100", gpus=8).cluster
    processes = load_cluster("cpu", gpus=8).cluster
    (row,) = rows_of_a_slow_cluster(1)
    on_cpu = replace(row, machines=Machines.of(load_cluster("cpu", gpus=row.machines.gpus).cluster))
    for known, of in ((row, gpus), (on_cpu, processes)):
        (one,) = told([known])
        assert known_jobs([one], one.stack, of)
    for known, of in ((on_cpu, gpus), (row, processes)):
        (one,) = told([known])
        assert not known_jobs([one], one.stack, of)
