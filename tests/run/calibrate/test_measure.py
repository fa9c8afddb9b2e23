"""Measuring a machine from the command's side: the script, the plan's shapes, the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdpplan.cost.block.work import block_work
from fsdpplan.errors import LaunchError
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.run.calibrate.measure import (
    LiveMeasuring,
    PlainMeasuring,
    Ranks,
    measure,
    measuring_script,
    plan_axes,
    plan_shapes,
    reason_in,
    settings_for_plan,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.topology.measure.settings import Attention, Axis, Settings
from tests.cost.works import projection_shapes
from tests.emit.plans import make_plan
from tests.run.displays import Remembers

ROOT = Path(__file__).resolve().parents[3]
SHORT = Settings(device="cpu", seconds=4, largest_bytes=2**16)
HOSTILE = ("--out", "/a b/$(touch x)'\"`id`.jsonl")


def numbers(axes: tuple[Axis, ...]) -> list[tuple[str, int, int]]:
    return [(axis.name, axis.ranks, axis.stride) for axis in axes]


def test_axes_have_the_strides_of_the_mesh_order() -> None:
    layout = Layout(
        pp=2, schedule="1f1b", dp_replicate=2, dp_shard=4, cp=2, tp=8, num_microbatches=2
    )
    assert numbers(plan_axes(layout)) == [
        ("pp", 2, 128),
        ("dp_replicate", 2, 64),
        ("dp_shard", 4, 16),
        ("cp", 2, 8),
        ("tp", 8, 1),
        ("dp_shard_cp", 8, 8),
    ]


def test_axes_of_one_rank_are_none() -> None:
    assert plan_axes(Layout()) == ()
    assert numbers(plan_axes(Layout(dp_shard=8))) == [("dp_shard", 8, 1)]


def test_the_shapes_are_those_that_the_cost_model_prices() -> None:
    plan = make_plan("cpu", per_node=2)
    work = block_work(plan.case)
    shapes = plan_shapes(plan)
    for m, n, k in projection_shapes(work):
        assert {(m, n, k), (m, k, n), (n, k, m)} <= set(shapes)
    assert len(set(shapes)) == len(shapes)


def test_a_plan_says_what_to_measure_but_not_for_how_long() -> None:
    plan = make_plan("cpu", nodes=2, per_node=2)
    settings = settings_for_plan(SHORT, plan)
    assert (settings.seconds, settings.largest_bytes) == (SHORT.seconds, SHORT.largest_bytes)
    assert settings.dtypes == ("fp32",)
    assert settings.attention == (Attention(batch=1, heads=4, kv_heads=2, seq_len=64, head_dim=16),)
    assert numbers(settings.axes) == [("dp_replicate", 2, 2), ("dp_shard", 2, 1)]


@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(device="cpu", processes=4),
        Ranks(device="cuda", processes=8),
        Ranks(device="cpu", processes=2, nodes=2),
        Ranks(device="cuda", processes=8, nodes=16),
    ],
    ids=str,
)
def test_shellcheck_and_bash_find_nothing_in_the_script(ranks: Ranks) -> None:
    script = measuring_script(ranks, python="/my python/it's", arguments=HOSTILE)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([command, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.stdout == ""


def test_what_is_given_reaches_the_program_as_it_is(tmp_path: Path) -> None:
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    python.chmod(0o755)
    ranks = Ranks(device="cpu", processes=2)
    script = measuring_script(ranks, python=str(python), arguments=HOSTILE)
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "words").read_text().splitlines()[-2:] == list(HOSTILE)
    assert not (tmp_path / "x").exists()


@pytest.mark.gloo
def test_what_fails_is_one_sentence_with_the_programs_own_reason(tmp_path: Path) -> None:
    ranks = Ranks(device="cuda", processes=1)
    with pytest.raises(LaunchError, match=r"failed with exit code 1: .* has no GPU.*measured\.log"):
        measure(
            Settings(device="cuda", seconds=4),
            ranks=ranks,
            out=tmp_path / "measured.jsonl",
            environment={"CUDA_VISIBLE_DEVICES": ""},
            display=Remembers(),
        )


def test_a_log_in_no_folder_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be written: No such file or directory"):
        measure(SHORT, ranks=Ranks(device="cpu", processes=1), out=tmp_path / "none" / "log.jsonl")


@pytest.mark.parametrize(("allocated", "there"), [(None, "this is none"), ("4", "this one has 4")])
def test_several_nodes_need_an_allocation_of_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocated: str | None, there: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    if allocated is not None:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", allocated)
    ranks = Ranks(device="cpu", processes=1, nodes=2)
    with pytest.raises(LaunchError, match=f"{there}: type salloc --nodes=2"):
        measure(SHORT, ranks=ranks, out=tmp_path / "log.jsonl")


RUNNER = """
    import sys
    from pathlib import Path
    from fsdpplan.run.calibrate.measure import Ranks, Settings, measure
    try:
        settings = Settings(device="cpu", seconds=1000)
        measure(settings, ranks=Ranks(device="cpu", processes=2), out=Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_ranks_and_keeps_their_rows(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    log = tmp_path / "measured.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUNNER), str(log)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while not log.exists() or log.read_bytes().count(b"\n") < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=90)
    assert process.returncode == code
    assert f"what was measured until now is in {log}; fsdpplan calibrate --from {log}" in said
    assert len(read_measurements(log)) >= 10
    assert not processes_with(str(log))


def test_an_interruption_before_the_first_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdpplan.run.calibrate.measure.run_here", lambda **_: 130)
    settings = Settings(device="cpu", seconds=1)
    with pytest.raises(KeyboardInterrupt):
        measure(settings, ranks=Ranks(device="cpu", processes=2), out=tmp_path / "measured.jsonl")
    assert capsys.readouterr().err == "fsdpplan: nothing was measured yet\n"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program on it could not write down why it failed."""
    full = SimpleNamespace(free=4096)
    monkeypatch.setattr("fsdpplan.run.calibrate.measure.shutil.disk_usage", lambda _: full)
    monkeypatch.setattr("fsdpplan.run.calibrate.measure.run_here", lambda **_: 1)
    settings = Settings(device="cpu", seconds=1)
    out = tmp_path / "measured.jsonl"
    with pytest.raises(LaunchError, match=r"exit code 1: the disk that .* is full"):
        measure(settings, ranks=Ranks(device="cpu", processes=2), out=out)


def processes_with(word: str) -> list[str]:
    """Command lines of live processes that have `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in words:
            found.append(" ".join(words))
    return found


def test_a_pipe_gets_what_the_program_says_and_not_what_torchrun_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with PlainMeasuring() as display:
        display.state("begins")
        for line in ("W1120 torchrun speaks", "measure: 1/2 a thing: 3 ms", "0: measure: a note"):
            display.output(line)
    assert capsys.readouterr().err.splitlines() == [
        "fsdpplan: begins",
        "fsdpplan: 1/2 a thing: 3 ms",
        "fsdpplan: a note",
    ]


def test_a_terminal_gets_one_moving_line_and_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveMeasuring() as display:
        for line in ("torchrun speaks", "measure: 1/2 a thing: 3 ms", "measure: a note"):
            display.output(line)
    said = capsys.readouterr().err
    assert "fsdpplan: a note" in said
    assert "torchrun speaks" not in said


def test_the_reason_of_a_failure_is_the_last_note() -> None:
    console = "measure: first\nmeasure: 1/2 a thing: 3 ms\n0: measure: the cause\nTraceback"
    assert reason_in(console) == "the cause"
    assert reason_in("Traceback") is None
    refused = "srun: fatal: Could not establish a configuration source"
    assert reason_in(f"starting\n{refused}\n") == refused
