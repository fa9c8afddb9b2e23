"""A bug report: what helps somebody else to see what happened here, without secrets and names.

All that is gathered goes through `Scrubber.value` at once, so nothing leaves but by that door.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdpplan import __version__
from fsdpplan.emit.anonymous import Known, Scrubber, secrets_of
from fsdpplan.emit.safe_text import log_line
from fsdpplan.errors import SpecError
from fsdpplan.files.job_records import read_bad_nodes
from fsdpplan.files.table import text_of
from fsdpplan.run.crash import allowed, last_crash
from fsdpplan.run.detect import software_here
from fsdpplan.run.follow.jobs import RecordedRun
from fsdpplan.spec.nodes import expand_host_list

SCHEMA_VERSION = 1
PACKAGES = (
    *("typer", "click", "pydantic", "numpy", "rich", "tabulate", "PyYAML", "nvidia-ml-py"),
    *("torch", "torchao", "triton", "transformers", "tokenizers"),
)
LEFT_OUT_OF_PLAN = ("alternatives",)
"""Long, and searched again from the rest."""
PLAN_BYTES = 2**24
TAIL_BYTES = 2**18
LOG_LINES, NOTE_LINES, METRIC_LINES = 80, 20, 5
_USERS = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
_HOSTS = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_TOPOLOGY_ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What may be passed on, and what was left out of it."""

    document: dict[str, Any]
    left_out: dict[str, int]
    """What -> how many."""


def bug_report(
    *,
    plan: Path | None,
    run: RecordedRun | None,
    machine: str,
    environment: Mapping[str, str] = os.environ,
) -> Report:
    """The report of this machine, of a plan's file and of a run, where they are given; `machine` is
    what detect says in words."""
    shown = allowed(environment)
    raw = {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "environment": shown,
        "machine": machine.splitlines(),
        "plan": None if plan is None else plan_of(plan),
        "crash": last_crash(),
        "run": None if run is None else run_of(run),
    }
    scrubber = Scrubber(known_here(environment, run))
    document = scrubber.value(raw)
    left_out = {
        "variables of the environment": len(environment) - len(shown),
        **scrubber.counts(),
    }
    return Report(document={**document, "left_out": left_out}, left_out=left_out)


def versions() -> dict[str, str | None]:
    """Of the program, of Python, of the system, of packages and of the driver."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {
        "fsdpplan": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {**found, **{name: text for name, text in software_here().items() if text}}


def known_here(environment: Mapping[str, str], run: RecordedRun | None = None) -> Known:
    """Who is asking, where, and what of the environment is secret."""
    users = {environment.get(name, "") for name in _USERS}
    hosts = {environment.get(name, "") for name in _HOSTS}
    hosts |= {socket.gethostname(), platform.node()}
    with suppress(SpecError):
        hosts |= {*expand_host_list(environment.get("SLURM_JOB_NODELIST", ""))}
    homes = {environment.get("HOME", ""), os.path.expanduser("~")}
    with suppress(Exception):  # a user without an entry in passwd, as in some containers
        users.add(getpass.getuser())
        import pwd

        entry = pwd.getpwuid(os.getuid())
        users |= {entry.pw_name, entry.pw_gecos.partition(",")[0]}
        homes.add(entry.pw_dir)
    if run is not None:
        hosts |= {run.record.host, *_nodes_of(run)}
    hosts |= {host.partition(".")[0] for host in hosts}
    return Known(
        users=tuple(sorted(user for user in users if len(user) > 1)),
        homes=tuple(sorted((home for home in homes if len(home) > 1), key=len, reverse=True)),
        hosts=tuple(sorted(host for host in hosts if len(host) > 1 and host != "localhost")),
        secrets=secrets_of(environment),
    )


def plan_of(path: Path) -> Any:
    """The plan's document, without what is long; or that it cannot be read."""
    text = text_of(path, limit_bytes=PLAN_BYTES)
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"cannot be read: {error}"
    if not isinstance(document, dict):
        return "is no plan"
    kept = {name: value for name, value in document.items() if name not in LEFT_OUT_OF_PLAN}
    if isinstance(sources := kept.get("sources"), dict):
        # A profile's name says where each of its numbers is from.
        kept["sources"] = {name: text for name, text in sources.items() if name.count(".") < 2}
    return kept


def run_of(run: RecordedRun) -> dict[str, Any]:
    """How a run stands, and the ends of what it wrote."""
    folder, record = run.run_folder, run.record
    names = ("engine", "jobs", "submitted_at", "ending", "is_cancelled")
    return {
        **{name: value for name, value in asdict(record).items() if name in names},
        "attempts": tail(folder / "attempts.jsonl", lines=NOTE_LINES),
        "bad_nodes": read_bad_nodes(folder),
        "saves": tail(folder / "saves.jsonl", lines=1),
        "metrics": tail(Path(record.metrics), lines=METRIC_LINES),
        "log": tail(Path(record.log or folder / "job.log"), lines=LOG_LINES),
    }


def tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a file, as a terminal would show them; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    if size > TAIL_BYTES:  # of a line that is cut, a secret may be cut, and not be known any more
        text = text.partition("\n")[2]
    found = [log_line(line) for line in text.splitlines()]
    return [line for line in found if line.strip()][-lines:]


def _nodes_of(run: RecordedRun) -> Iterator[str]:
    yield from read_bad_nodes(run.run_folder)
    for line in tail(run.run_folder / "attempts.jsonl", lines=NOTE_LINES):
        with suppress(ValueError, TypeError, AttributeError):
            yield from (str(node) for node in json.loads(line).get("nodes") or ())
