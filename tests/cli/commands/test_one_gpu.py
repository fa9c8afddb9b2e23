"""One GPU, as it is asked about: bare by default, FSDP over one rank, its state on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import on_a_machine_without_gpus, words

ONE = words("--gpus 1 --hardware rtx-4090 --seq-len 2048 --global-batch 8")
SMALL = ("--model", "llama-3.2-1b", "--param-dtype", "bf16", "--loss-chunks", "8", *ONE)
TIGHT = (
    *words("--model llama-3.2-3b --param-dtype bf16 --optimizer adamw_8bit"),
    *words("--gpus 1 --hardware rtx-4090 --seq-len 2048 --global-batch 1"),  # nothing adds up
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def ask(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    code = exit_code_of(given)
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    """The plan of a question that has one, the best of several."""
    code, out, err = ask(capsys, *given, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    best: dict[str, Any] = document["plans"][0] if "plans" in document else document
    return best


@pytest.mark.parametrize("command", ["recommend", "estimate"])
@pytest.mark.parametrize(
    ("asked", "sharding", "offload"),
    [
        ("", "ddp", "none"),
        ("--sharding ddp", "ddp", "none"),
        ("--sharding fsdp", "fsdp", "none"),
        ("--sharding fsdp --dp-shard 1", "fsdp", "none"),
        ("--offload cpu", "fsdp", "cpu"),
        ("--offload cpu --sharding fsdp", "fsdp", "cpu"),
    ],
)
def test_each_way_to_use_one_gpu_is_planned(
    capsys: pytest.CaptureFixture[str], command: str, asked: str, sharding: str, offload: str
) -> None:
    layout = planned(capsys, command, *SMALL, *words(asked))["layout"]
    assert (layout["sharding"], layout["offload"]) == (sharding, offload)


def test_over_one_rank_is_slower_by_its_copies(capsys: pytest.CaptureFixture[str]) -> None:
    plain = (*SMALL, "--no-compile", "--micro-batch", "1")
    bare, sharded, offloaded = (
        planned(capsys, "estimate", *plain, *words(asked))["step_seconds"]["expected"]
        for asked in ("", "--sharding fsdp", "--offload cpu")
    )
    assert bare < sharded < offloaded


def test_one_replica_holds_its_gradients_once(capsys: pytest.CaptureFixture[str]) -> None:
    """2 + 2 + 2 bytes a parameter, the loss and one block: of 3.2 B parameters about 20 GiB."""
    fixed = (
        "--activation-checkpointing full --loss-chunks 8 --micro-batch 1 --headroom 0% --fits 10%"
    )
    memory = planned(capsys, "estimate", *TIGHT, *words(fixed))["memory"]
    parameters = memory["parameters_bytes"] / 2
    gradients = memory["gradients_bytes"] + memory["unsharded_gradients_bytes"]
    assert 2 * parameters <= gradients < 3 * parameters  # 4 in buckets beside them
    assert 19 < memory["peak_device_bytes"] / 2**30 < 24


@pytest.mark.parametrize("asked", ["--ddp-bucket 50MiB", "--gradient-compression powersgd:2"])
def test_what_needs_replicas_is_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    given = (*words("--model llama-3.2-1b"), *ONE, *words(asked))
    code, _, err = ask(capsys, "estimate", *given)
    assert code in (2, 3), err
    assert "leave" in err
    assert "Traceback" not in err
