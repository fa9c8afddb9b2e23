"""What `run` remembers of a job, in the run's folder; and the nodes that it must not get again."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from fsdpplan.errors import SpecError
from fsdpplan.files.table import Table, parse_json_object, read_text, text_of
from fsdpplan.files.writing import write_text_atomically

RECORD_NAME = "job.json"
BAD_NODES_NAME = "bad-nodes"
SCHEMA_VERSION = 1
MAX_BYTES = 2**20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*")

EngineName = Literal["here", "slurm", "kubernetes"]
"""`here`: by bash on one host, or in the allocation that it was started in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the last job of a run ended."""

    state: str
    """In the engine's word."""
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: which job trains, and where it leaves what it says."""

    engine: EngineName
    jobs: tuple[str, ...]
    """Ids in the order in which they train: several make a chain. `here`: the run's mark."""
    folder: str
    """Where it was submitted from: paths of the script that are not absolute start there."""
    script: str
    plan_sha256: str
    metrics: str
    submitted_at: str
    """ISO 8601, UTC."""
    host: str = ""
    """`here`: the host that it runs on."""
    log: str = ""
    """File of the newest job's output; empty: not known yet."""
    earlier: tuple[str, ...] = ()
    """Jobs of this run that ended before it was resumed."""
    ending: Ending | None = None
    """None: it had not ended when somebody last looked."""
    is_cancelled: bool = False
    """Whether somebody has cancelled it."""
    in_ledger: bool = False
    """Whether it was added to the ledger."""


def write_record(run_folder: Path, record: RunRecord) -> None:
    """Write or replace the record in `run_folder`."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(record)}, indent=2)
    write_text_atomically(run_folder / RECORD_NAME, text + "\n")


def read_record(run_folder: Path) -> RunRecord | None:
    """The record in `run_folder`; None where there is none. Raises SpecError for a broken one."""
    path = run_folder / RECORD_NAME
    if not os.path.isfile(path):
        return None
    text = read_text(path, limit_bytes=MAX_BYTES, what="record of a run")
    table = Table(where=str(path), values=parse_json_object(text, where=str(path)))
    if (version := table.integer("schema_version")) != SCHEMA_VERSION:
        raise SpecError(
            f"{path} has schema version {version}, and this fsdpplan reads {SCHEMA_VERSION}: use "
            "the fsdpplan that started the run"
        )
    return RunRecord(
        engine=cast(EngineName, table.choice("engine", get_args(EngineName))),
        jobs=_ids(table, "jobs"),
        folder=table.text("folder"),
        script=table.text("script"),
        plan_sha256=_text(table, "plan_sha256"),
        metrics=table.text("metrics"),
        submitted_at=table.text("submitted_at"),
        host=_text(table, "host"),
        log=_text(table, "log"),
        earlier=_ids(table, "earlier"),
        ending=_ending(table),
        is_cancelled=table.flag("is_cancelled"),
        in_ledger=table.flag("in_ledger"),
    )


def read_bad_nodes(run_folder: str | Path | None) -> dict[str, str]:
    """Node -> why it must not be used again, as the job's checks wrote it; nothing where there is
    no such file."""
    if run_folder is None:
        return {}
    text = text_of(Path(run_folder) / BAD_NODES_NAME, limit_bytes=MAX_BYTES)
    lines = (line.partition("\t") for line in text.splitlines())
    return {host.strip(): why.strip() for host, _, why in lines if host.strip()}


def _text(table: Table, key: str) -> str:
    value = table.require(key)
    if not isinstance(value, str):
        raise table.wrong(key, "a text")
    return value


def _ids(table: Table, key: str) -> tuple[str, ...]:
    """Ids of jobs, which become arguments of commands: `scancel --user=...` is not what an id from
    somebody's file may come to."""
    value = table.require(key)
    if not isinstance(value, list) or not all(
        isinstance(item, str) and _ID.fullmatch(item) for item in value
    ):
        raise table.wrong(key, "a list of ids of jobs")
    return tuple(value)


def _ending(table: Table) -> Ending | None:
    if table.require("ending") is None:
        return None
    inner = table.table("ending")
    return Ending(state=inner.text("state"), exit_code=inner.integer("exit_code", lowest=0))
