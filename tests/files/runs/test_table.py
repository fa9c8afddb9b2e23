"""Tables of runs: read as written, and refused in one line that names row and column."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.columns import COLUMNS, REQUIRED
from fsdpplan.files.runs.table import MAX_ROWS, MeasuredRun, parse_runs, read_runs
from tests.refusals import check_one_line
from tests.validate.tables import LLAMA_8B, run, table


def refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_runs(text, where="runs.csv")
    check_one_line(caught.value)
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------


def test_a_row_is_read_in_si_units() -> None:
    one = run(peak_mem_gib="41.5", notes="mem_kind=reserved; other")
    assert one.parameters == pytest.approx(8.03e9)
    assert one.peak_memory_bytes == 41.5 * 2**30
    assert one.memory_kind == "reserved"
    assert one.measured_step_seconds == 1.3
    assert one.compile is True


def test_an_empty_field_is_not_given() -> None:
    one = run(params_b="", micro_batch="", compile="", sp="", kv_heads=" ", step_time_s="")
    unknown = (one.parameters, one.micro_batch, one.compile, one.sequence_parallel, one.kv_heads)
    assert unknown == (None,) * 5
    assert one.measured_step_seconds is None
    assert not one.is_timed


def test_columns_may_be_left_out_and_stand_in_any_order() -> None:
    columns = tuple(reversed(REQUIRED))
    (one,) = parse_runs(table(LLAMA_8B, columns=columns), where="runs.csv")
    assert (one.hidden, one.gpus, one.zero_stage, one.tp) == (4096, 64, "", 1)


def test_a_step_time_follows_from_the_throughput() -> None:
    # 64 sequences of 8192 tokens in 1.6 s on 64 GPUs
    given_batch = run(step_time_s="", tokens_per_s_per_gpu="5120")
    assert given_batch.measured_step_seconds == pytest.approx(1.6)
    from_accumulation = run(
        step_time_s="", tokens_per_s_per_gpu="5120", global_batch="", grad_accum="1"
    )
    assert from_accumulation.measured_step_seconds == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("changes", "timed"),
    [
        ({}, True),
        ({"oom": "y"}, False),
        ({"oom": "fail"}, False),
        ({"notes": "EXCLUDE: degrees do not fit"}, False),
        ({"oom": ""}, True),
    ],
)
def test_only_runs_that_ran_and_are_not_ruled_out_are_timed(
    changes: dict[str, str], timed: bool
) -> None:
    assert run(**changes).is_timed is timed


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("mem_kind=alloc", "alloc"),
        ("a; mem_kind=nvidia-smi (max over nodes)", "nvidia-smi"),
        ("mem_kind=unknown (GB as labelled)", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_notes_tell_what_a_memory_figure_counts(notes: str, kind: str) -> None:
    assert run(peak_mem_gib="40", notes=notes).memory_kind == kind
    assert run(peak_mem_gib="", notes=notes).memory_kind is None


def test_quotes_blank_lines_and_a_byte_order_mark_are_no_fault() -> None:
    text = "\ufeff" + table(LLAMA_8B | {"notes": 'one, two "three"'}).replace("\n", "\r\n") + "\r\n"
    (one,) = parse_runs(text, where="runs.csv")
    assert one.notes == 'one, two "three"'


def test_rows_are_counted_from_0() -> None:
    runs = parse_runs(table(LLAMA_8B, LLAMA_8B, LLAMA_8B), where="runs.csv")
    assert [one.row for one in runs] == [0, 1, 2]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("hidden", "4096.5"),
        ("hidden", "4,096"),
        ("hidden", "0"),
        ("hidden", "-1"),
        ("hidden", "9" * 5000),
        ("hidden", "4e3"),
        ("hidden", "\u0664\u0660\u0669\u0666"),
        ("layers", "1000000"),
        ("gpus", "1e9"),
        ("step_time_s", "nan"),
        ("step_time_s", "inf"),
        ("step_time_s", "0"),
        ("step_time_s", "-1.5"),
        ("step_time_s", "1.5 s"),
        ("step_time_s", "1,5"),
        ("step_time_s", "1e999"),
        ("peak_mem_gib", "80GB"),
        ("mfu", "41%"),
        ("zero_stage", "4"),
        ("zero_stage", "zero3"),
        ("act_ckpt", "yes"),
        ("compile", "True"),
        ("oom", "no"),
        ("notes", "two\nlines"),
        ("notes", "bell\x07"),
        ("model_name", "x" * 3000),
    ],
)
def test_a_wrong_value_is_named_by_row_and_column(column: str, value: str) -> None:
    said = refusal(table(LLAMA_8B, LLAMA_8B | {column: value}))
    assert said.startswith("runs.csv: row 1 (line ")
    assert f"column {column}" in said
    assert "must be" in said


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_takes_an_empty_field(column: str) -> None:
    assert isinstance(run(**{column: ""}), MeasuredRun)


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_column_is_named(column: str) -> None:
    columns = tuple(name for name in COLUMNS if name != column)
    assert column in refusal(table(LLAMA_8B, columns=columns))


def test_an_unknown_column_is_refused_with_the_nearest() -> None:
    said = refusal(table(LLAMA_8B).replace("step_time_s", "step_times"))
    assert "'step_times'" in said
    assert "step_time_s" in said


def test_a_column_twice_is_refused() -> None:
    assert "vocab stands twice" in refusal(table(LLAMA_8B).replace("heads,kv_heads", "heads,vocab"))


@pytest.mark.parametrize("text", ["", "\n\n", table()])
def test_a_table_without_rows_is_refused(text: str) -> None:
    assert "add one row a run" in refusal(text)


@pytest.mark.parametrize("more", [",", ",,,,,extra"])
def test_a_row_of_another_length_is_refused(more: str) -> None:
    said = refusal(table(LLAMA_8B).rstrip("\n") + more + "\n")
    assert "row 0" in said
    assert f"the header {len(COLUMNS)}" in said


def test_a_truncated_table_is_refused() -> None:
    text = table(LLAMA_8B, LLAMA_8B)
    assert "row 1" in refusal(text[:-60])
    assert "not CSV" in refusal(table(LLAMA_8B) + '"a quote that never ends')


def test_a_json_file_is_refused() -> None:
    assert "unknown column" in refusal('{"rows": []}\n')


def test_too_many_rows_are_refused() -> None:
    columns = ",".join(REQUIRED)
    text = columns + "\n" + "a,1,1,1,1,g,1\n" * (MAX_ROWS + 1)
    assert str(MAX_ROWS) in refusal(text)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(SpecError, match="larger than 16384 KiB") as caught:
        read_runs(path)
    check_one_line(caught.value)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00a", b"\x00" * 100])
def test_bytes_that_are_no_table_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        read_runs(path)
    check_one_line(caught.value)


@pytest.mark.parametrize("name", ["none.csv", ".", "with\nline.csv"])
def test_a_path_that_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_runs(tmp_path / name)
    check_one_line(caught.value)


@given(st.text(max_size=300))
def test_no_text_ends_in_anything_but_rows_or_a_refusal(text: str) -> None:
    for candidate in (text, table(LLAMA_8B) + text, ",".join(REQUIRED) + "\n" + text):
        try:
            assert parse_runs(candidate, where="runs.csv")
        except SpecError as error:
            check_one_line(error)
