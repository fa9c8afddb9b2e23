"""The tables that nccl-tests and rccl-tests print, as they are pasted.

Source: nccl-tests src/common.cu, versions 2.0 to 2.20: per row a size in bytes, a count, type,
reduction and root, then time (us), algbw, busbw (GB/s) and wrong results, first out-of-place, then
in-place; above them a `Rank` line for each GPU. Around them there may be anything: launchers'
words, NCCL's log, prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdpplan.errors import SpecError
from fsdpplan.spec.measurement import GroupKind, MeasuredCall, MeasuredMachine
from fsdpplan.spec.plan import Collective

Test: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast"
]
PRICED: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
}
"""Program without `_perf` -> the collective as everywhere here."""
MOST_ROWS = 100_000
NEAR = 0.02
"""Printed rates have three digits."""

_LAUNCHER = re.compile(r"^(?:\[[0-9]+,[0-9]+\]<std[a-z]+>: ?|[ 0-9]{1,6}: )")
"""What mpirun --tag-output and srun --label put before a line."""
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|alltoallv|sendrecv|broadcast|reduce|gather|"
    r"scatter|hypercube)_perf(?:_mpi)?\b"
)
_CONCLUDED = re.compile(r"Collective test concluded")
_RANK = re.compile(
    r"^#? *Rank +([0-9]{1,6}) +(?:Group +([0-9]{1,6}) +)?Pid +[0-9]+ on +(\S{1,255}) +"
    r"device +[0-9]+ +\[[0-9A-Fa-fx:.]+\] *(.{0,80}?)\s*$"
)
_BEGINS = re.compile(r"^#? *nThread +[0-9]+ .*minBytes")
_HEADING = re.compile(r"^#? *size +count .*algbw +busbw")
_LIBRARY = re.compile(r"nccl-library=([0-9]{5,6})")
_TYPES = "float|half|bfloat16|double|u?int(?:8|32|64)|fp8_e[45]m[32]|f8e[45]m[32]|fp8"
_ROW = re.compile(rf"^ *[0-9]+ +[0-9]+ +(?:{_TYPES})\b")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,6})?(?:e[+-]?[0-9]{1,3})?")
_TYPE_BYTES = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One `Rank` line."""

    rank: int
    group: int
    host: str
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRow:
    """One line of a table, one of its two halves."""

    line: int
    bytes: int
    """The full buffer, as nccl-tests counts it."""
    in_place: bool
    seconds: float
    algorithm_gbs: float
    bus_gbs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTest:
    """One table."""

    line: int
    """Of its first row."""
    test: Test
    ranks: int
    rank_lines: tuple[RankLine, ...]
    """Empty where they were not pasted."""
    rows: tuple[TestRow, ...]
    library: str | None
    """NCCL's version, such as 2.27.6."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order of ranks."""
        return tuple(dict.fromkeys(one.host for one in self.rank_lines))

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of its GPUs, each once."""
        return tuple(dict.fromkeys(one.gpu for one in self.rank_lines if one.gpu))


def is_nccl_tests(text: str) -> bool:
    """Whether a table of nccl-tests is in the text."""
    return any(
        _BEGINS.match(line) or _HEADING.match(line) or (_ROW.match(line) and len(line.split()) > 6)
        for line in map(_plain, text.splitlines())
    )


def nccl_tests(text: str, *, where: str) -> tuple[NcclTest, ...]:
    """The tables in the text. Raises SpecError, with file and line, for one that is broken or does
    not say what it measured."""
    found = [_finished(draft, where) for draft in _drafts(text, where) if draft.rows]
    if not found:
        raise SpecError(
            f"{where} has the heading of nccl-tests and no row under it: paste all of it"
        )
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A table while it is read."""

    program: str | None
    rank_lines: list[RankLine]
    rows: list[tuple[TestRow, int, str, str | None, int | None]]
    """Row, count, type, reduction and root."""
    library: str | None


def _plain(line: str) -> str:
    return _LAUNCHER.sub("", line.rstrip())


def _drafts(text: str, where: str) -> Iterator[_Draft]:
    draft = _Draft(program=None, rank_lines=[], rows=[], library=None)
    lines = text.splitlines()
    for number, line in enumerate(map(_plain, lines), start=1):
        named = None if _CONCLUDED.search(line) else _PROGRAM.search(line)
        rank = _RANK.match(line)
        if draft.rows and (rank is not None or named is not None or _BEGINS.match(line)):
            yield draft
            draft = _Draft(program=None, rank_lines=[], rows=[], library=draft.library)
        if rank is not None:
            draft.rank_lines.append(
                RankLine(
                    rank=int(rank[1]), group=int(rank[2] or 0), host=rank[3], gpu=rank[4].strip()
                )
            )
        elif named is not None:
            draft.program = named[1]
        elif (library := _LIBRARY.search(line)) is not None:
            code = int(library[1])
            draft.library = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
        elif _ROW.match(line):
            if len(draft.rows) > MOST_ROWS:
                raise SpecError(
                    f"{where}: line {number}: more than {MOST_ROWS} rows in a table: split the file"
                )
            cut = number == len(lines) and not text.endswith("\n")
            draft.rows += _rows(line, number, where, may_be_cut=cut)
    yield draft


def _rows(
    line: str, number: int, where: str, *, may_be_cut: bool
) -> list[tuple[TestRow, int, str, str | None, int | None]]:
    """Both halves of a line, or the one that was measured."""
    words = line.split()
    size, count, kind, *rest = words
    reduction = rest.pop(0) if rest and re.fullmatch(r"[a-z]+", rest[0]) else None
    root = None
    if len(rest) % 4 == 1:
        root = int(rest[0]) if re.fullmatch(r"-1|[0-9]{1,6}", rest[0]) else None
        rest = rest[1:]
    halves = [rest[at : at + 4] for at in range(0, len(rest), 4)]
    told = "N/A"
    if (
        len(size) > 15
        or len(count) > 15
        or len(rest) not in (4, 8)
        or not all(word == told or _NUMBER.fullmatch(word) for word in rest)
    ):
        if may_be_cut:
            return []
        raise SpecError(
            f"{where}: line {number}: a row of nccl-tests ends with time, algbw, busbw and errors, "
            "once or twice; this one is cut or has another table beside it: paste it again"
        )
    found = []
    for in_place, (micros, algorithm, bus, wrong) in zip((False, True), halves, strict=False):
        if told in (micros, algorithm, bus) or not int(size):
            continue
        if re.fullmatch(r"[0-9]+", wrong) and int(wrong):
            raise SpecError(
                f"{where}: line {number}: {wrong} results were wrong, so its time is of no use: "
                "see what is wrong with the machine first, or take the line out"
            )
        seconds = float(micros) * 1e-6
        if not 0 < seconds < math.inf:
            continue
        row = TestRow(
            line=number,
            bytes=int(size),
            in_place=in_place,
            seconds=seconds,
            algorithm_gbs=float(algorithm),
            bus_gbs=float(bus),
        )
        found.append((row, int(count), kind, reduction, root))
    return found


def _finished(draft: _Draft, where: str) -> NcclTest:
    line = draft.rows[0][0].line
    place = f"{where}: line {line}"
    numbers = [one.rank for one in draft.rank_lines]
    if len(set(numbers)) < len(numbers):
        raise SpecError(
            f"{place}: the lines above name Rank {numbers[0]} more than once: each process ran by "
            "itself, as nccl-tests does when built without MPI=1: build it with that"
        )
    if len({one.group for one in draft.rank_lines}) > 1:
        raise SpecError(
            f"{place}: several groups ran at once (NCCL_TESTS_SPLIT), which is not read: run it "
            "without"
        )
    if numbers and sorted(numbers) != list(range(len(numbers))):
        raise SpecError(f"{place}: some of the Rank lines above are missing: paste all of them")
    test, ranks = _test_and_ranks(draft, place)
    return NcclTest(
        line=line,
        test=test,
        ranks=ranks,
        rank_lines=tuple(sorted(draft.rank_lines, key=lambda one: one.rank)),
        rows=tuple(row for row, *_ in draft.rows),
        library=draft.library,
    )


def _test_and_ranks(draft: _Draft, place: str) -> tuple[Test, int]:
    """Which program it was and on how many GPUs, as far as the text says or rates tell."""
    known = len(draft.rank_lines) or None
    if draft.program is not None and draft.program not in PRICED:
        raise SpecError(
            f"{place}: {draft.program}_perf is not read; read are "
            f"{', '.join(f'{name}_perf' for name in PRICED)}"
        )
    tests = [draft.program] if draft.program is not None else list(PRICED)
    fits = {test: ranks for test in tests if (ranks := _ranks_of(draft, test, known)) is not None}
    if len(fits) == 1:
        ((test, ranks),) = fits.items()
        return _as_test(test), ranks
    if not fits:
        raise SpecError(
            f"{place}: bus bandwidths and counts are of no {draft.program or 'collective'}"
            f"{'_perf' if draft.program else ''} on {known or 'any number of'} GPUs: paste the "
            "whole output of one program"
        )
    raise SpecError(
        f"{place}: the rows may be of {' or '.join(fits)}: keep the line with the command above "
        "them, such as all_gather_perf"
    )


def _as_test(name: str) -> Test:
    for test in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast"):
        if test == name:
            return test
    raise AssertionError(name)


def _ranks_of(draft: _Draft, test: str, known: int | None) -> int | None:
    """On how many GPUs the rows can be of this test; None: they cannot.

    busbw / algbw is 2 (n - 1) / n of all_reduce, (n - 1) / n of all_gather, reduce_scatter and
    alltoall, and 1 of the others (nccl-tests, doc/PERFORMANCE.md); the count is that of the whole
    buffer or of one rank's part of it.
    """
    row, count, kind, reduction, root = max(
        draft.rows, key=lambda one: (one[0].algorithm_gbs, one[0].bytes)
    )
    ratio = row.bus_gbs / row.algorithm_gbs if row.algorithm_gbs > 1 else None
    element = _TYPE_BYTES.get(kind)
    parts = None if element is None or not count else row.bytes / (count * element)
    if draft.program is None:
        reduces = test in ("all_reduce", "reduce_scatter")
        if reduces != (reduction == "sum") and not (test == "sendrecv" and reduction == "sum"):
            return None
        if (test == "broadcast") != (root is not None and root >= 0):
            return None
    whole = test in ("all_reduce", "sendrecv", "broadcast")
    by_parts = None if parts is None or whole else round(parts)
    if draft.program is None and parts is not None and whole != (parts == 1) and known != 1:
        return None
    factor = {"all_reduce": 2.0, "sendrecv": None, "broadcast": None}.get(test, 1.0)
    ranks = known or by_parts
    if ranks is None and factor is not None and ratio is not None and ratio < factor:
        ranks = round(1 / (1 - ratio / factor))
    if ranks is None or ranks < 1:
        return None
    expected = 1.0 if factor is None else factor * (ranks - 1) / ranks
    if ratio is not None and abs(ratio - expected) > NEAR * max(expected, 0.1):
        return None
    return ranks


def measured_calls(
    tests: Sequence[NcclTest], *, where: str, date: str
) -> tuple[MeasuredMachine | MeasuredCall, ...]:
    """The tables as a log of a calibration: the machine, then each row that was timed.

    Raises SpecError where the text does not name its GPUs and hosts, or where they differ.
    """
    largest = max(tests, key=lambda one: len(one.rank_lines))
    if not largest.rank_lines or len(largest.gpus) != 1:
        said = "name no GPU" if not largest.gpus else f"name {len(largest.gpus)} kinds of GPUs"
        raise SpecError(
            f"{where}: the lines '# Rank 0 ... on HOST device 0 ... NAME' {said}, and a machine is "
            "calibrated by one kind: paste the output with them"
        )
    hosts = largest.hosts
    per_host, rest = divmod(largest.ranks, len(hosts))
    if rest or any(
        sum(one.host == host for one in largest.rank_lines) != per_host for host in hosts
    ):
        raise SpecError(
            f"{where}: {largest.ranks} ranks on {len(hosts)} hosts do not fill them alike: run "
            "nccl-tests with as many on each"
        )
    machine = MeasuredMachine(
        world=largest.ranks,
        ranks_per_node=per_host,
        hosts=hosts,
        device_kind="cuda",
        device_name=largest.gpus[0],
        memory_bytes=None,
        multiprocessors=None,
        backend="nccl",
        torch="none, nccl-tests",
        nccl=largest.library,
        date=date,
    )
    calls = [call for test in tests for call in _calls(test, machine, where)]
    return (machine, *calls)


def _calls(test: NcclTest, machine: MeasuredMachine, where: str) -> Iterator[MeasuredCall]:
    place = f"{where}: line {test.line}"
    if test.gpus != (machine.device_name,) or not set(test.hosts) <= set(machine.hosts):
        raise SpecError(
            f"{place}: this table is of another machine than the largest one of the file: give "
            "each machine a file of its own"
        )
    per_host = test.ranks // len(test.hosts)
    group: GroupKind
    if len(test.hosts) == 1:
        group, stride = "inside", 1
    elif per_host == machine.ranks_per_node:
        group, stride = "world", 1
    elif per_host == 1:
        group, stride = "across", machine.ranks_per_node
    else:
        raise SpecError(
            f"{place}: {per_host} of {machine.ranks_per_node} GPUs of each host took part: take "
            "the table out, or run it on all of them or on one"
        )
    if test.ranks < 2:
        return
    for row in test.rows:
        yield MeasuredCall(
            group=group,
            axis=None,
            collective=PRICED[test.test],
            first_rank=0,
            ranks=test.ranks,
            stride=stride,
            groups_at_once=1,
            gathered_bytes=row.bytes,
            seconds=(row.seconds,),
        )
