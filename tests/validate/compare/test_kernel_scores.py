"""Tables of kernels are scored row by row, in groups, and a row that cannot be says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import bundled_runs
from fsdpplan.validate.compare.kernel_scores import collective_report, matmul_report, size_class

BENCH = bundled_runs().parent
COLLECTIVES = "source_id,gpu,node_type,gpus,nodes,fabric,collective,bytes,time_us,busbw_gbs,notes"
MATMULS = "gpu,dtype,m,n,k,achieved_tflops,source_url"


def table(tmp_path: Path, header: str, *rows: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_collectives_of_every_well_known_fabric_are_within_10_percent() -> None:
    report = collective_report(BENCH / "collectives.csv")
    groups = [group for group in report.groups if group.rows >= 20]
    assert len(groups) >= 8
    assert all(group.median_abs_error_fraction <= 0.10 for group in groups), groups


def test_matmuls_are_within_5_percent_and_long_ones_are_not_biased() -> None:
    report = matmul_report(BENCH / "matmul.csv")
    large = [group for group in report.groups if group.rows >= 20 and group.group[2] != "< 0.05"]
    assert all(group.median_abs_error_fraction <= 0.05 for group in large)
    assert all(abs(group.bias_fraction) <= 0.06 for group in large)


def test_groups_have_the_gpu_the_fabric_and_the_span(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        COLLECTIVES,
        "me,H100-80GB,ours,8,1,NVLink,all_gather,268435456,1000,,",
        "me,H100-80GB,ours,16,2,8x400 Gb,all_reduce,268435456,,300,",
        "me,H100-80GB,ours,16,2,8x400 Gb,all_reduce,1024,30,0,",
    )
    report = collective_report(path)
    assert report.group_names == ("gpu", "fabric", "span")
    assert [group.group[2] for group in report.groups] == ["one node", "across nodes"]
    # a call of a kilobyte is predicted, and not counted
    assert [row.counts for row in report.rows] == [True, True, False]
    assert all(row.error_fraction is not None for row in report.rows)


def test_half_of_the_ports_take_longer(tmp_path: Path) -> None:
    rows = [
        f"me,H100-80GB,ours,16,2,{ports}x400 Gb,all_gather,268435456,1000,," for ports in (8, 4)
    ]
    one, other = collective_report(table(tmp_path, COLLECTIVES, *rows)).rows
    assert one.predicted_seconds is not None
    assert other.predicted_seconds is not None
    assert other.predicted_seconds > 1.5 * one.predicted_seconds


def test_rows_that_cannot_be_predicted_say_why(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        COLLECTIVES,
        "me,TPU v5,pod,8,1,ICI,all_gather,268435456,1000,,",
        "me,H100-80GB,ours,8,1,NVLink,scatter,268435456,1000,,",
    )
    reasons = [row.skipped.reason for row in collective_report(path).rows if row.skipped]
    assert reasons == ["no hardware profile for the GPU", "this collective is not priced"]
    path = table(
        tmp_path, MATMULS, "H100-SXM,int4,4096,4096,4096,600,", "TPU,bf16,4096,4096,4096,600,"
    )
    assert all(row.skipped for row in matmul_report(path).rows)


@pytest.mark.parametrize(
    ("header", "row", "says"),
    [
        ("gpu,bytes", "H100,1", "lacks gpus, nodes, fabric, collective"),
        (COLLECTIVES, "me,H100,ours,8,1,NVLink,all_gather,1048576,,,", "neither time_us nor"),
        (COLLECTIVES, "me,H100,ours,8,3,NVLink,all_gather,1048576,9,,", "do not fill 3 nodes"),
        (COLLECTIVES, "me,H100,ours,x,1,NVLink,all_gather,1048576,9,,", "column gpus"),
        (COLLECTIVES, "me,H100,ours,8,1,NVLink,all_gather,-1,9,,", "column bytes"),
        (COLLECTIVES, "me,H100", "has 2 fields"),
    ],
)
def test_a_fault_of_a_table_is_said_with_its_place(
    tmp_path: Path, header: str, row: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        collective_report(table(tmp_path, header, row))


def test_an_empty_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no rows"):
        matmul_report(table(tmp_path, MATMULS))


def test_size_classes_are_of_tflop() -> None:
    assert [size_class(flops) for flops in (1e9, 1e11, 1e12, 9e12)] == [
        "< 0.05",
        "0.05-0.5",
        "0.5-5",
        "> 5",
    ]
