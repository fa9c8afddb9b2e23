"""A stack goes by the program that trained, whatever library that stands on."""

from __future__ import annotations

import pytest

from fsdpplan.files.runs.table import parse_runs
from fsdpplan.validate.learn.evidence import software_name


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
