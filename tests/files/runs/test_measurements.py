"""A calibration's log is read whole or refused in one line; only a torn last line is forgiven."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.measurements import KINDS, parse_measurements, read_measurements
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredCall,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.topology.measure.runner import Log, row_document

MACHINE = MeasuredMachine(
    world=16,
    ranks_per_node=8,
    hosts=("n01", "n02"),
    device_kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=85_000_000_000,
    multiprocessors=132,
    backend="nccl",
    torch="2.13.0",
    nccl="2.27.3",
    date="2026-11-20T10:00:00+00:00",
)
ROWS: tuple[Measurement, ...] = (
    MACHINE,
    MeasuredMatmul(rank=0, m=1, n=2, k=3, dtype="fp8", seconds=(0.25, 0.5)),
    MeasuredMemory(rank=15, traffic_bytes=1024, seconds=(1e-6,)),
    MeasuredAttention(
        rank=1,
        batch=1,
        heads=8,
        kv_heads=2,
        seq_len=4096,
        head_dim=128,
        dtype="bf16",
        direction="backward",
        seconds=(0.1,),
    ),
    MeasuredLaunch(rank=0, kernels=1000, seconds=(0.004,)),
    MeasuredCopy(
        rank=0, direction="host_to_device", pinned=True, copied_bytes=2**20, seconds=(1e-4,)
    ),
    MeasuredCall(
        group="axis",
        axis="dp_shard",
        collective="all_gather",
        first_rank=0,
        ranks=8,
        stride=1,
        groups_at_once=2,
        gathered_bytes=2**30,
        seconds=(0.003, 0.0031),
    ),
)
SECONDS = st.lists(st.floats(0, 1e4).map(lambda s: float(f"{s:.6g}")), min_size=1).map(tuple)


def text_of(*rows: Measurement) -> str:
    return "".join(json.dumps(row_document(row)) + "\n" for row in rows)


def with_field(row: Measurement, **changed: Any) -> str:
    return text_of(MACHINE) + json.dumps({**row_document(row), **changed}) + "\n"


def test_every_kind_of_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for row in ROWS:
        log.write(row)
    assert read_measurements(tmp_path / "log.jsonl") == ROWS
    assert {type(row) for row in ROWS} == set(KINDS.values())


def test_a_row_names_its_kind_and_then_its_fields() -> None:
    matmul = ROWS[1]
    assert row_document(matmul) == {"kind": "matmul", **asdict(matmul), "seconds": [0.25, 0.5]}


@given(SECONDS)
def test_seconds_come_back_as_they_were(seconds: tuple[float, ...]) -> None:
    row = MeasuredLaunch(rank=3, kernels=7, seconds=seconds)
    assert parse_measurements(text_of(MACHINE, row), where="log")[1] == row


@given(st.integers(0, len(text_of(*ROWS))))
def test_a_log_cut_anywhere_gives_the_rows_before_the_cut(cut: int) -> None:
    text = text_of(*ROWS)[:cut]
    whole = sum(len(line) - 1 <= cut - start for line, start in lines_of(text_of(*ROWS)))
    if whole == 0:
        with pytest.raises(SpecError, match="does not begin with what was measured on"):
            parse_measurements(text, where="log")
    else:
        assert parse_measurements(text, where="log") == ROWS[:whole]


def lines_of(text: str) -> list[tuple[str, int]]:
    starts, start = [], 0
    for line in text.splitlines(keepends=True):
        starts.append((line, start))
        start += len(line)
    return starts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin"),
        (text_of(*ROWS[1:]), "does not begin"),
        (text_of(MACHINE, MACHINE), "more than one calibration"),
        (text_of(MACHINE) + "\n" + text_of(ROWS[1]), "line 2 is not JSON"),
        (text_of(MACHINE) + '{"kind": "mat\n' + text_of(ROWS[1]), "line 2 is not JSON"),
        (text_of(MACHINE) + "[1]\n", "line 2 must hold one JSON object"),
        (with_field(ROWS[1], kind="guess"), "line 2: kind must be one of"),
        (with_field(ROWS[1], colour="red"), "unknown key 'colour'"),
        (with_field(ROWS[1], m=0), "m must be a whole number from 1"),
        (with_field(ROWS[1], m=1.0), "m must be a whole number"),
        (with_field(ROWS[1], rank=-1), "rank must be a whole number from 0"),
        (with_field(ROWS[1], dtype="int4"), "dtype must be one of"),
        (with_field(ROWS[1], seconds=[]), "seconds must be a list of seconds"),
        (with_field(ROWS[1], seconds=[-1.0]), "seconds must be a list of seconds"),
        (with_field(ROWS[1], seconds=[True]), "seconds must be a list of seconds"),
        (with_field(ROWS[1], seconds=["1"]), "seconds must be a list of seconds"),
        (with_field(ROWS[1], seconds=[1e9]), "seconds must be a list of seconds"),
        (with_field(ROWS[1]).replace("0.25", "NaN"), "NaN is not a number"),
        (with_field(ROWS[1]).replace("0.25", "1e999"), "seconds must be a list of seconds"),
        (with_field(ROWS[5], pinned=1), "pinned must be true or false"),
        (with_field(ROWS[6], axis=7), "axis must be a text"),
        (text_of(MACHINE).replace('["n01", "n02"]', "[]"), "hosts must be a list of texts"),
    ],
)
def test_anything_else_that_is_wrong_is_one_line_that_says_where(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        parse_measurements(text, where="some.jsonl")
    assert str(raised.value).startswith("some.jsonl")
    assert "\n" not in str(raised.value)


def test_a_missing_field_is_named() -> None:
    document = row_document(ROWS[1])
    del document["k"]
    with pytest.raises(SpecError, match="line 2: k is missing"):
        parse_measurements(text_of(MACHINE) + json.dumps(document) + "\n", where="log")


@given(st.text(max_size=200))
def test_other_texts_are_refused_and_nothing_worse(text: str) -> None:
    with pytest.raises(SpecError):
        parse_measurements(text, where="log")
