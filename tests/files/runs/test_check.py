"""`validate --check`: all faults of a table at once, by row and column, and what others need."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.check import check_text
from fsdpplan.validate.compare.doubts import doubts

HEADER = (
    "source_id,source_url,date,framework,model_name,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "gpu,gpus,dtype,seq_len,zero_stage,micro_batch,global_batch,act_ckpt,compile,step_time_s,"
    "peak_mem_gib,mfu,notes"
)
ROW = (
    "mine,https://example.org,2026-11,torchtitan,llama-3.1-8b,32,4096,14336,32,8,128256,"
    "H100-80GB,64,bf16,8192,3,1,64,op,n,1.33,38.5,0.4,mem_kind=reserved"
)


def found(text: str) -> set[tuple[str, str]]:
    return {(one.kind, one.where) for one in check_text(text, where="runs.csv").findings}


def test_a_whole_table_has_nothing_to_see_to(tmp_path: Path) -> None:
    assert found(f"{HEADER}\n{ROW}\n") == set()
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROW}\n", encoding="utf-8")
    assert doubts(path) == ()


@pytest.mark.parametrize(
    ("old", "new", "kind", "where"),
    [
        ("H100-80GB,64", "H100-80GB,-4", "wrong", "row 0, gpus"),
        (",op,", ",most,", "wrong", "row 0, act_ckpt"),
        (",bf16,", ",bf16,,", "wrong", "row 0"),
        ("step_time_s", "steptime", "wrong", "header"),
        ("gpus,dtype", "notes2,dtype", "missing", "header"),
        (",torchtitan,", ",,", "unsourced", "row 0, framework"),
        ("mem_kind=reserved", "", "unsourced", "row 0, peak_mem_gib"),
        ("1.33,38.5", ",", "unsourced", "row 0"),
        (",0.4,", ",40,", "implausible", "row 0, mfu"),
        (",3,1,64,", ",3,8,4,", "implausible", "row 0, global_batch"),
    ],
)
def test_a_fault_is_named_by_row_and_column(old: str, new: str, kind: str, where: str) -> None:
    text = f"{HEADER}\n{ROW}\n"
    assert old in text
    assert (kind, where) in found(text.replace(old, new, 1))


def test_all_rows_are_looked_at() -> None:
    bad = ROW.replace(",op,", ",most,")
    assert len(found("\n".join([HEADER, bad, ROW, bad, bad]))) == 3


def test_rows_that_cannot_be_predicted_or_lie_far_off_are_asked_about(tmp_path: Path) -> None:
    rows = [ROW.replace("H100-80GB", "H1000"), ROW.replace(",1.33,", ",1330,"), ROW]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *rows]), encoding="utf-8")
    assert [(one.kind, one.where) for one in doubts(path)] == [
        ("unsourced", "row 0"),
        ("implausible", "row 1, step time"),
    ]


@pytest.mark.parametrize("text", ["", '"half'])
def test_what_is_no_table_is_one_error(text: str) -> None:
    with pytest.raises(SpecError):
        check_text(text, where="runs.csv")
