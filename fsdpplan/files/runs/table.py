"""Tables of measured training runs: CSV with the columns of docs/reference/runs.md.

An empty field means that the source does not say. What is read here is only what the table says;
what is taken where it says nothing is stated in `fsdpplan.validate`.

Tables of measured runs that come with the repository, and not with a wheel.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fsdpplan.errors import SpecError, nearest
from fsdpplan.files.runs.columns import COLUMNS as COLUMNS
from fsdpplan.files.runs.columns import REQUIRED as REQUIRED
from fsdpplan.files.runs.columns import Cell, cell_value
from fsdpplan.files.table import path_text, read_text, short

LIMIT_BYTES = 16 * 2**20
MAX_ROWS = 100_000
Outcome = Literal["n", "y", "fail"]
MemoryKind = Literal["alloc", "reserved", "nvidia-smi", "unknown"]
Cells = tuple[tuple[str, str], ...]
"""(column, text) of the fields of a row that are not empty: the row as the ledger keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One row: what a run was and what was measured. None: the table does not say."""

    row: int
    """Data row, from 0."""
    source_id: str
    """Where the figures come from; errors are reported by it."""
    date: str
    """When the figures were published, such as `2024-12`; empty: not known."""
    framework: str
    """The software that trained."""
    model_name: str
    parameters: float | None
    """Parameters by the source's count."""
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    sibling_heads: int | None
    """Heads of the row of this source with this `hidden` that is nearest in parameters, where
    `heads` is not known."""
    kv_heads: int | None
    head_dim: int | None
    """Width of a query head, where the table says it."""
    vocab: int | None
    tied: bool | None
    """Embedding and head have one table."""
    seq_len: int | None
    attention_type: str
    """`mha`, `gqa`, `mqa`, `mla`, or empty."""
    moe: str
    """Experts, such as `128/8`; empty for a dense model."""
    gpu: str
    gpus: int | None
    gpus_per_node: int | None
    network: str
    """The network between nodes in words, such as `4x100 Gb RoCE per node`."""
    cpu: str
    """The host's, as the table calls it."""
    torch: str
    """Release of PyTorch, such as `2.11`."""
    allocator: str
    """`growing` segments or `fixed` ones; empty: as the software sets it."""
    dtype: str
    zero_stage: str
    dp_replicate: int | None
    dp_shard: int | None
    """Ranks that share sharded state, context-parallel ranks included."""
    tp: int
    sequence_parallel: bool | None
    cp: int
    pp: int
    virtual_stages: int | None
    schedule: str
    ep: int
    micro_batch: int | None
    global_batch: int | None
    num_microbatches: int | None
    activation_checkpointing: str
    compile: bool | None
    async_tp: bool
    offload: str
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None
    mfu: float | None
    """The source's own model FLOPs utilisation."""
    hfu: float | None
    """The source's own hardware FLOPs utilisation: with recomputation."""
    outcome: Outcome
    """`n` ran, `y` out of memory, `fail` failed for a reason that is not known."""
    notes: str

    @property
    def measured_step_seconds(self) -> float | None:
        """The step time, as given or from the throughput; None where there is neither."""
        if self.step_seconds is not None:
            return self.step_seconds
        rate, seq_len, gpus = self.tokens_per_second_per_gpu, self.seq_len, self.gpus
        batch = self.global_batch
        if batch is None and gpus and self.micro_batch and self.num_microbatches:
            ranks = gpus / (self.tp * self.pp * self.cp)
            batch = round(ranks * self.micro_batch * self.num_microbatches)
        if not rate or not seq_len or not gpus or not batch:
            return None
        return batch * seq_len / (rate * gpus)

    @property
    def is_timed(self) -> bool:
        """Whether its step time may be compared: it ran, and its notes do not rule it out."""
        return (
            self.outcome == "n"
            and "EXCLUDE" not in self.notes
            and self.measured_step_seconds is not None
        )

    @property
    def memory_kind(self) -> MemoryKind | None:
        """What the memory figure counts, by `mem_kind=` in the notes; None without a figure."""
        if self.peak_memory_bytes is None:
            return None
        kinds: dict[str, MemoryKind] = {
            "alloc": "alloc",
            "reserved": "reserved",
            "nvidia-smi": "nvidia-smi",
        }
        match = re.search(r"\bmem_kind=([\w-]+)", self.notes)
        return kinds.get(match[1], "unknown") if match else "unknown"


def read_runs(path: Path) -> tuple[MeasuredRun, ...]:
    """The rows of the table at `path`."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="table of runs")
    return parse_runs(text, where=path_text(path))


def parse_runs(text: str, *, where: str) -> tuple[MeasuredRun, ...]:
    """The rows of a table; raises SpecError with file, row and column at the first fault."""
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    header: list[str] | None = None
    runs: list[MeasuredRun] = []
    for number, fields in _lines(lines, where):
        if header is None:
            header = _header(fields, where)
            continue
        place = f"{where}: row {len(runs)} (line {number})"
        if len(runs) == MAX_ROWS:
            raise SpecError(f"{where} has more than {MAX_ROWS} rows; split it into several tables")
        if len(fields) != len(header):
            raise SpecError(
                f"{place} has {len(fields)} fields, the header {len(header)}; give one a column, "
                "empty where nothing is known"
            )
        named = zip(header, fields, strict=True)
        cells = {name: cell_value(name, field.strip(), place) for name, field in named}
        runs.append(_run(len(runs), cells))
    if not runs:
        what = "is empty" if header is None else "has a header and no rows"
        raise SpecError(f"{where} {what}; add one row a run")
    return _with_sibling_heads(runs)


def _with_sibling_heads(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """`runs`, those without heads with the heads of their nearest sibling."""
    known: dict[tuple[str, int | None], list[MeasuredRun]] = {}
    for run in runs:
        if run.heads is not None:
            known.setdefault((run.source_id, run.hidden), []).append(run)

    def filled(run: MeasuredRun) -> MeasuredRun:
        siblings = known.get((run.source_id, run.hidden), [])
        if run.heads is not None or run.hidden is None or not siblings:
            return run
        size = run.parameters or 0.0
        nearest = min(siblings, key=lambda one: abs((one.parameters or 0.0) - size))
        return replace(run, sibling_heads=nearest.heads)

    return tuple(filled(run) for run in runs)


def _lines(lines: Iterator[list[str]], where: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of the lines that are not blank."""
    try:
        for fields in lines:
            if fields:
                yield lines.line_num, fields  # type: ignore[attr-defined]
    except csv.Error as error:
        line = lines.line_num  # type: ignore[attr-defined]
        raise SpecError(
            f"{where} is not CSV at line {line}: {error}; quote fields that hold commas or quotes"
        ) from error


def _header(fields: list[str], where: str) -> list[str]:
    names = [field.strip() for field in fields]
    for mark, what in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and mark in fields[0]:
            raise SpecError(
                f"{where}: its columns stand between {what}, as some spreadsheets write them; save "
                "it with commas between columns, and points in numbers"
            )
    for name in names:
        if name not in COLUMNS:
            near = nearest(name, COLUMNS) or difflib.get_close_matches(name[:40], COLUMNS, n=1)
            meant = f"write {' or '.join(near)}," if near else f"use {', '.join(REQUIRED)},"
            raise SpecError(
                f"{where}: the header has an unknown column {short(name)}; {meant} "
                "or another of docs/reference/runs.md"
            )
        if names.count(name) > 1:
            raise SpecError(f"{where}: the column {name} stands twice in the header; keep one")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise SpecError(
            f"{where}: the header lacks {', '.join(missing)}; add "
            f"{'it' if len(missing) == 1 else 'them'}, fields may be empty"
        )
    return names


def _run(row: int, cells: Mapping[str, Cell]) -> MeasuredRun:
    def text(name: str) -> str:
        value = cells.get(name)
        return "" if value is None else str(value)

    def whole(name: str) -> int | None:
        value = cells.get(name)
        return value if isinstance(value, int) else None

    def number(name: str, *, scale: float = 1.0) -> float | None:
        value = cells.get(name)
        return scale * value if isinstance(value, float) else None

    def flag(name: str) -> bool | None:
        return {"y": True, "n": False}.get(text(name))

    peak_gib = number("peak_mem_gib")
    outcomes: dict[str, Outcome] = {"y": "y", "fail": "fail"}
    return MeasuredRun(
        row=row,
        source_id=text("source_id") or "unnamed",
        date=text("date"),
        framework=text("framework"),
        model_name=text("model_name") or "unnamed",
        parameters=number("params_b", scale=1e9),
        layers=whole("layers"),
        hidden=whole("hidden"),
        ffn_hidden=whole("ffn_hidden"),
        heads=whole("heads"),
        sibling_heads=None,
        kv_heads=whole("kv_heads"),
        head_dim=whole("head_dim"),
        vocab=whole("vocab"),
        tied=flag("tied"),
        seq_len=whole("seq_len"),
        attention_type=text("attention_type"),
        moe=text("moe"),
        gpu=text("gpu"),
        gpus=whole("gpus"),
        gpus_per_node=whole("gpus_per_node"),
        network=text("inter_net_note"),
        cpu=text("cpu"),
        torch=text("torch"),
        allocator=text("allocator"),
        dtype=text("dtype"),
        zero_stage=text("zero_stage"),
        dp_replicate=whole("dp_replicate"),
        dp_shard=whole("dp_shard"),
        tp=whole("tp") or 1,
        sequence_parallel=flag("sp"),
        cp=whole("cp") or 1,
        pp=whole("pp") or 1,
        virtual_stages=whole("vpp"),
        schedule=text("schedule"),
        ep=whole("ep") or 1,
        micro_batch=whole("micro_batch"),
        global_batch=whole("global_batch"),
        num_microbatches=whole("grad_accum"),
        activation_checkpointing=text("act_ckpt"),
        compile=flag("compile"),
        async_tp=flag("async_tp") or False,
        offload=text("offload"),
        step_seconds=number("step_time_s"),
        tokens_per_second_per_gpu=number("tokens_per_s_per_gpu"),
        peak_memory_bytes=None if peak_gib is None else round(peak_gib * 2**30),
        mfu=number("mfu"),
        hfu=number("hfu"),
        outcome=outcomes.get(text("oom"), "n"),
        notes=text("notes"),
    )


def read_cells(path: Path) -> list[tuple[MeasuredRun, Cells]]:
    """The rows of the table at `path`, each with its cells.

    Heads that are taken from a sibling row are written down, since a cell stands for itself.
    """
    runs = read_runs(path)
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="table of runs").removeprefix("\ufeff")
    lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    header = [name.strip() for name in lines[0]]
    return [(run, _cells(header, line, run)) for run, line in zip(runs, lines[1:], strict=True)]


def _cells(header: Sequence[str], line: Iterable[str], run: MeasuredRun) -> Cells:
    named = {name: field.strip() for name, field in zip(header, line, strict=True)}
    if run.heads is None and run.sibling_heads is not None:
        named["heads"] = str(run.sibling_heads)
    return tuple((name, text) for name, text in named.items() if text)


def run_of_cells(cells: Cells) -> MeasuredRun:
    """The row in these cells. Raises SpecError where this fsdpplan does not take them."""
    named = {**dict.fromkeys(REQUIRED, ""), **dict(cells)}
    text = io.StringIO(newline="")
    csv.writer(text).writerows([list(named), list(named.values())])
    (run,) = parse_runs(text.getvalue(), where="a row of the ledger")
    return run


BENCH = Path("tests") / "golden" / "bench"


def bundled_runs(checkout: Path | None = None) -> Path:
    """The table of published runs in a clone; raises SpecError where only a wheel is installed.

    `checkout` is where to look instead of beside the package.
    """
    root = Path(__file__).resolve().parents[3] if checkout is None else checkout
    path = root / BENCH / "train_runs.csv"
    if not path.is_file():
        raise SpecError(
            "the tables of published runs come with the repository, not with the installed "
            f"package: type `fsdpplan validate {BENCH / 'train_runs.csv'}` in a clone, or "
            "`fsdpplan validate RUNS.csv` with runs of your own (docs/reference/runs.md)"
        )
    return path


KNOWN_TABLES = ("train_runs.csv", "train_runs_outside.csv", "train_runs_own.csv")
"""Published runs, those that arrived after the model had taken its form, and those of the program's
own trainer: all that constants may be fitted to. The sources in `held_back.toml` are in none."""


def known_runs(checkout: Path | None = None) -> tuple[MeasuredRun, ...]:
    """The rows of all tables that constants may be fitted to, numbered through."""
    folder = bundled_runs(checkout).parent
    rows = [run for name in KNOWN_TABLES for run in read_runs(folder / name)]
    return tuple(replace(run, row=number) for number, run in enumerate(rows))
