from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.kernels import read_timed_collectives
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.files.runs.nccl_tests import (
    NcclTest,
    is_nccl_tests,
    measured_calls,
    nccl_tests,
)
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
}
"""busbw / algbw. Source: nccl-tests, doc/PERFORMANCE.md."""
WHOLE = ("all_reduce", "sendrecv")
HEADING = """\
#
#                                                              out-of-place          in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time \
  algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us) \
 (GB/s)  (GB/s)
"""


def printed(
    test: str,
    ranks: int,
    seconds: float = 1e-3,
    *,
    hosts: int = 1,
    command: str = "./{}_perf -b 8M -e 1G -f 2 -g 1",
    gpu: str = "NVIDIA H100 80GB HBM3",
    in_place: bool = True,
) -> str:
    """What nccl-tests 2.13 prints of two sizes, each as long as `seconds` a 64 MiB."""
    text = command.format(test) + "\n" if command else ""
    text += "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) validation: 1 graph: 0\n#\n"
    text += "# Using devices\n"
    for rank in range(ranks):
        host = f"node-{rank // (ranks // hosts)}"
        text += f"#  Rank {rank:2d} Group  0 Pid  28{rank:03d} on {host:>10} device {rank:2d} "
        text += f"[0x{16 + rank:02x}] {gpu}\n"
    text += HEADING
    redop = "sum" if test in ("all_reduce", "reduce_scatter", "sendrecv") else "none"
    for size in (2**26, 2**27):
        micros = seconds * 1e6 * size / 2**26
        algorithm = size / micros / 1e3
        half = f"{micros:8.2f} {algorithm:8.2f} {algorithm * FACTORS[test](ranks):8.2f}"
        other = f"{half}      0" if in_place else "     N/A      N/A      N/A    N/A"
        count = size // 4 if test in WHOLE else size // 4 // ranks
        text += f"{size:12d} {count:13d}     float {redop:>7}      -1 {half}      0 {other}\n"
    return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 252.4\n"


def read(text: str) -> tuple[NcclTest, ...]:
    assert is_nccl_tests(text)
    return nccl_tests(text, where="pasted.txt")


@pytest.mark.parametrize("test", FACTORS)
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (8, 1), (16, 2)])
def test_each_program_is_read_with_its_ranks_hosts_and_times(
    test: str, ranks: int, hosts: int
) -> None:
    (found,) = read(printed(test, ranks, hosts=hosts))
    assert (found.test, found.ranks, len(found.hosts)) == (test, ranks, hosts)
    assert found.gpus == ("NVIDIA H100 80GB HBM3",)
    assert [(row.bytes, row.in_place) for row in found.rows] == [
        (2**26, False),
        (2**26, True),
        (2**27, False),
        (2**27, True),
    ]
    assert found.rows[0].seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "command", ["# Collective test starting: {}_perf", "srun {}_perf_mpi -g 1"]
)
def test_the_program_is_named_by_its_first_line_or_by_the_command(command: str) -> None:
    assert read(printed("all_gather", 8, command=command))[0].test == "all_gather"


def test_what_tells_programs_apart_without_their_name() -> None:
    assert read(printed("all_reduce", 8, command=""))[0].test == "all_reduce"
    assert read(printed("reduce_scatter", 8, command=""))[0].test == "reduce_scatter"
    with pytest.raises(SpecError, match=r"line 1\d: the rows may be of all_gather or alltoall"):
        read(printed("all_gather", 8, command=""))
    with pytest.raises(SpecError, match="all_reduce or sendrecv"):  # both carry as much between two
        read(printed("all_reduce", 2, command=""))


def test_without_rank_lines_the_rates_tell_how_many() -> None:
    """16 GPUs: busbw is 1.875 of algbw. The row is of NVIDIA/nccl issue 1801's kind."""
    row = "8589934592 2147483648 float sum -1 45000.0 190.89 357.92 0 45010.0 190.85 357.84 0\n"
    (found,) = read(f"host a:1\n{HEADING}{row}")
    assert (found.test, found.ranks, found.rank_lines) == ("all_reduce", 16, ())
    with pytest.raises(SpecError, match="name no GPU"):
        measured_calls([found], where="x", date="2026-01-01")


OLD = """\
# nThread 1 nGpus 1 minBytes 268435456 maxBytes 536870912 step: 2(factor) iters: 20 validation: 1
# Using devices
#   Rank  0 Pid  17 on  a device  0 [0x00] Tesla V100-SXM2-16GB
#   Rank  1 Pid  18 on  b device  0 [0x00] Tesla V100-SXM2-16GB
#       size         count      type   redop     time   algbw   busbw  error     time   algbw
"""


def test_tables_of_older_versions_have_fewer_columns() -> None:
    all_reduce = "268435456 67108864 float sum 122131 2.20 2.20 2e-06 122165 2.20 2.20 2e-06\n"
    (found,) = read(f"all_reduce_perf\n{OLD}{all_reduce}")
    assert (found.test, found.ranks, found.hosts) == ("all_reduce", 2, ("a", "b"))
    swap = "268435456 33554432 float 520935 0.52 0.51 0e+00 519562 0.52 0.51 1e+00\n"
    assert read(f"alltoall_perf\n{OLD}{swap}")[0].rows[0].seconds == pytest.approx(0.520935)


def test_rccl_and_tagged_lines() -> None:
    text = printed("all_reduce", 8, gpu="AMD Instinct MI300X")
    text = re.sub(r"\[0x(..)\]", r"[0000:\1:00]", text).replace(
        "#\n", "#\nrccl-tests: develop\n", 1
    )
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())
    assert read(tagged)[0].gpus == ("AMD Instinct MI300X",)
    labelled = "".join(f" 0: {line}\n" for line in text.splitlines())
    assert read(labelled) == read(tagged)


def test_a_half_that_was_not_measured_is_left_out() -> None:
    (found,) = read(printed("alltoall", 8, in_place=False))
    assert not any(row.in_place for row in found.rows)


def test_several_tables_of_a_text() -> None:
    tests = read(printed("all_reduce", 8) + "$ next\n" + printed("all_gather", 16, hosts=2))
    assert [(one.test, one.ranks) for one in tests] == [("all_reduce", 8), ("all_gather", 16)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Rank  1 ", "Rank  0 ", "line 17: .*built without MPI=1"),
        ("Rank  3 Group  0", "Rank  3 Group  1", "NCCL_TESTS_SPLIT"),
        ("#  Rank  3", "#  Rnk  3", "Rank lines above are missing"),
        ("all_reduce_perf", "hypercube_perf", "hypercube_perf is not read"),
        ("all_reduce_perf", "all_gather_perf", "are of no all_gather_perf on 8 GPUs"),
        ("      0 ", "      7 ", "line 17: 7 results were wrong"),
        (" 0\n# Out", " 0 | 8 9\n# Out", "line 18: .*cut or has another table beside it"),
    ],
)
def test_what_is_no_measurement_is_refused_by_line(old: str, new: str, message: str) -> None:
    text = printed("all_reduce", 8)
    assert old in text
    with pytest.raises(SpecError, match=rf"pasted\.txt.*{message}"):
        read(text.replace(old, new, 1))


def test_a_table_becomes_the_log_of_a_calibration() -> None:
    tests = read(
        printed("all_reduce", 16, hosts=2) + printed("all_gather", 8) + "# nccl-library=22706\n"
    )
    machine, *calls = measured_calls(tests, where="x", date="2026-01-01")
    assert isinstance(machine, MeasuredMachine)
    assert (machine.world, machine.ranks_per_node, machine.hosts) == (16, 8, ("node-0", "node-1"))
    assert all(isinstance(call, MeasuredCall) for call in calls)
    shapes = {
        (call.group, call.collective, call.ranks)
        for call in calls
        if isinstance(call, MeasuredCall)
    }
    assert shapes == {("world", "all_reduce", 16), ("inside", "all_gather", 8)}


def test_files_are_read_by_validate_and_calibrate(tmp_path: Path) -> None:
    place = tmp_path / "nccl.txt"
    place.write_text(printed("all_reduce", 16, hosts=2), encoding="utf-8")
    rows = read_timed_collectives(place)
    assert {(row.gpu, row.gpus, row.nodes, row.collective) for row in rows} == {
        ("NVIDIA H100 80GB HBM3", 16, 2, "all_reduce")
    }
    assert len(read_measurements(place)) == 1 + len(rows)
    place.write_text("#SBATCH -N 1\n", encoding="utf-8")
    for reader in (read_timed_collectives, read_measurements):
        with pytest.raises(SpecError, match="a Slurm script"):
            reader(place)


WHOLE_TEXT = printed("all_reduce", 4) + printed("alltoall", 8, hosts=2)


@settings(max_examples=300)
@given(st.data())
def test_no_text_ends_otherwise_than_in_tables_or_one_line(data: st.DataObject) -> None:
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(WHOLE_TEXT))] * 2)))
    at = data.draw(st.integers(start, end))
    junk = data.draw(
        st.sampled_from(["", "9" * 5000, "\x00", "nan", "1e999", " | ", "-1", "\n8 8 "])
    )
    text = WHOLE_TEXT[start:at] + junk + WHOLE_TEXT[at:end]
    if not is_nccl_tests(text):
        return
    try:
        tests = nccl_tests(text, where="x")
        measured_calls(tests, where="x", date="2026-01-01")
    except SpecError as error:
        refused = str(error)
    else:
        refused = ""
        assert all(0 < row.seconds < 1e12 for test in tests for row in test.rows)
    assert "\n" not in refused
