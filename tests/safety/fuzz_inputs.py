"""Good documents of each kind, and what can be wrong with one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpplan.emit.job import Job
from fsdpplan.files.ledger import add_rows
from fsdpplan.files.plans import plan_json
from fsdpplan.run.launch import emit_script
from tests.emit.plans import make_plan
from tests.ledgers import rows_of_a_slow_cluster

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
RECORD = {
    "schema_version": 1,
    "engine": "here",
    "jobs": ["0f1e"],
    "folder": "/f",
    "script": "/f/job.sbatch",
    "plan_sha256": "",
    "metrics": "/f/m.jsonl",
    "submitted_at": "2026-11-22T00:00:00+00:00",
    "host": "h",
    "log": "",
    "earlier": [],
    "ending": {"state": "COMPLETED", "exit_code": 0},
    "is_cancelled": False,
    "in_ledger": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """One good document of each kind, or several."""

    plan: bytes
    script: bytes
    profiles: tuple[bytes, ...]
    config: bytes
    table: bytes
    metrics: bytes
    record: bytes
    checkpoint: dict[str, bytes]
    nccl: tuple[bytes, ...]
    recordings: tuple[bytes, ...]
    ledger: bytes

    @staticmethod
    def made() -> Documents:
        """All of them."""
        plan = make_plan()
        profiles = ROOT / "hardware_profiles"
        table = (ROOT / "tests/golden/bench/train_runs.csv").read_bytes().splitlines(keepends=True)
        return Documents(
            plan=plan_json(plan).encode(),
            script=emit_script(plan, Job()).encode(),
            profiles=tuple((profiles / f"{n}.toml").read_bytes() for n in ("cpu", "dgx-h100")),
            config=json.dumps(CONFIG).encode(),
            table=b"".join(table[:4]),
            metrics=(ROOT / "tests/run/metrics_of_a_run.jsonl").read_bytes(),
            record=json.dumps(RECORD).encode(),
            checkpoint=_checkpoint(),
            nccl=_all(RECORDINGS / "nccl", 4),
            recordings=_all(RECORDINGS / "machines", 4, ".json"),
            ledger=_ledger(),
        )


def _all(folder: Path, most: int, ending: str = "") -> tuple[bytes, ...]:
    paths = [p for p in sorted(folder.rglob(f"*{ending}")) if p.is_file() and p.suffix != ".md"]
    return tuple(path.read_bytes() for path in sorted(paths, key=lambda p: p.stat().st_size)[:most])


def _ledger() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        add_rows(path, rows_of_a_slow_cluster(3))
        return path.read_bytes()


def _checkpoint() -> dict[str, bytes]:
    from torch.distributed.checkpoint.metadata import Metadata

    from fsdpplan.trainer.checkpoint.files import FileRecord, manifest_text, record_of

    progress = {"step": 5, "sequences": 40, "seed": 0, "seq_len": 8, "steps": 9}
    progress |= {"learning_rate": 0.1, "warmup_steps": 1, "schema_version": 2}
    files = {
        "trainer.json": json.dumps(progress).encode(),
        ".metadata": pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})),
        "__0_0.distcp": bytes(range(256)),
    }
    records: list[FileRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
            records.append(record_of(Path(folder) / name))
    return {**files, "manifest.json": manifest_text(records).encode()}


def make_node(place: Path, chance: random.Random) -> Path:
    """Something in `place` that is no regular file; a new name."""
    path = place / f"node{len(os.listdir(place))}"
    kind = chance.choice(("pipe", "folder", "circle", "dangling", "null", "zero", "full", "link"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("circle", "dangling", "link"):
        targets = {"circle": path.name, "dangling": "no/where", "link": "linked"}
        (place / "linked").write_text("{}")
        path.symlink_to(targets[kind])
    else:
        number = {"null": 3, "zero": 5, "full": 7}[kind]
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, number))
        except PermissionError:
            path.symlink_to(f"/dev/{kind}")
    return path


WORDS = (
    *("", " ", "-1", "0", "1e9", "1e400", "nan", "inf", "9" * 40, "7", "70B", "10**9", "0x10"),
    *("\u202ex", "ünï", "a" * 300, "a/" * 3000, "/", ".", "..", "~", "//", "/proc/self/mem"),
    *("-", "--", "--json", "$HOME", "`id`", "'", '"', "\n", "\t", "\x1b[31m", "x\0y", "\udcff"),
    *("always", "gpipe", "1:2,3", "slurm", "kubernetes", "1GB/s", "400Gb/s", "bf16", "2026"),
)


def hostile_word(chance: random.Random, place: Path) -> str:
    """A value for any option; often a path to what is no file."""
    if chance.random() < 0.4:
        return str(make_node(place, chance))
    if chance.random() < 0.3:
        return chance.choice(("fsdpplan.json", "missing/x", "new.json", str(place / "new")))
    return chance.choice(WORDS)


def broken(chance: random.Random, path: Path, data: bytes) -> None:
    """A document at `path` that is `data` no more, or is no file at all."""
    if chance.random() < 0.15:
        node = make_node(path.parent, chance)
        node.rename(path)
    elif chance.random() < 0.05:
        return  # vanished
    else:
        path.write_bytes(_damaged(chance, data))
        if chance.random() < 0.05:
            path.chmod(0)


def _damaged(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.randrange(1, 3)):
        data = chance.choice(DAMAGES)(chance, data)
    return data


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 3, 30)) if changed else 0):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _inserted(chance: random.Random, data: bytes) -> bytes:
    where = chance.randrange(len(data) + 1)
    pieces = (b"\0" * 9, b"\xff\xfe", b"\x1b[2J", b"[" * 5000, b"9" * 5000, b"\r\n", b'"', b"{" * 9)
    return data[:where] + chance.choice(pieces) + data[where:]


def _doubled(chance: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    where = chance.randrange(len(lines))
    return b"".join([*lines[:where], lines[where] * chance.choice((0, 2, 50)), *lines[where + 1 :]])


def _encoded(chance: random.Random, data: bytes) -> bytes:
    text = data.decode("latin-1")
    return chance.choice((b"\xef\xbb\xbf" + data, text.encode("utf-16"), b"", data[::-1], b"\n"))


def _edited(chance: random.Random, data: bytes) -> bytes:
    """A value that a reader does not expect, where the document is JSON; else a number of it."""
    with contextlib.suppress(ValueError, RecursionError):
        document = [json.loads(data)]
        _edit(chance, document)
        document = document[0]
        return json.dumps(document).encode()
    tokens = data.split(b" ")
    tokens[chance.randrange(len(tokens))] = chance.choice((b"-1", b"1e999", b"nan", b"''", b"[]"))
    return b" ".join(tokens)


def _edit(chance: random.Random, holder: Any) -> None:
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.8:
            holder = holder[key]
            continue
        holder[key] = chance.choice(ODD)
        return


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 2**70, "", "x" * 400, [], {}, [[]]),
    *("\x1b[31m", "/dev/zero", "../x"),
)
DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_cut, _flipped, _inserted, _doubled, _encoded),
    *(_edited, _edited, _edited),
)
