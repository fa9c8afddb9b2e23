"""On two ranks: who makes the index of some text."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.private_torch import meeting_store
from fsdpplan.trainer.text import data, make_index
from fsdpplan.trainer.text.stream import TextSource
from tests.trainer.jobs import leave_with

MADE: list[Path] = []


def counting(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make_index` that notes what it made."""

    def noted(text: make_index.Text, *args: Any, **kwargs: Any) -> Any:
        MADE.append(text.path)
        return make(text, *args, **kwargs)

    return noted


def opened(path: Path) -> dict[str, Any]:
    """What each rank found, and how many made it."""
    MADE.clear()
    try:
        tokens: Any = TextSource(path).tokens
    except TrainerError as error:
        tokens = f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (tokens, len(MADE)))
    return {"tokens": [each[0] for each in found], "made": sum(each[1] for each in found)}


def text(folder: Path, line: str) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "a.jsonl").write_text(line)
    dist.barrier()
    return folder


def others_disk(path: Path) -> bool:
    """`Path.exists` of a node that does not see what others write."""
    return False


def main(out: Path) -> None:
    """Open texts in several ways."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), out.parent
    make_index.make_index = counting(make_index.make_index)
    good = '{"text": "one two"}'
    shared = text(folder / "shared", good)
    results = {"one node": opened(shared), "again": opened(shared)}
    results["no text"] = opened(text(folder / "bad", '{"text": 3}'))

    host, exists = socket.gethostname, Path.exists
    socket.gethostname = lambda: f"node-{rank}"
    results["two nodes"] = opened(text(folder / "nodes", good))
    Path.exists = others_disk  # type: ignore[method-assign, assignment]
    text(folder / "disk-0", good), text(folder / "disk-1", good)
    results["two disks"] = opened(folder / f"disk-{rank}")
    socket.gethostname, Path.exists = host, exists  # type: ignore[method-assign]

    kinds: list[Any] = [None, None]
    line = text(folder / "kinds", good) / "a.jsonl"
    # the first rank sees a sidecar, the other one does not yet
    data.sidecar_of = lambda path: path.with_name("none") if rank else path
    dist.all_gather_object(kinds, data.are_texts([line, folder]))
    results["kinds"] = kinds

    make_index.SILENT_SECONDS = 0.5
    lost = text(folder / "lost", good)
    if rank == 0:  # comes first, and gives no sign of life
        number = next(make_index._meetings)
        meeting_store(f"index {number}").add(f"node {socket.gethostname()}/first", 1)
    dist.barrier()
    said = ""
    if rank == 1:
        try:
            TextSource(lost)
        except TrainerError as error:
            said = str(error)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, said)
    results["lost"] = found[1]
    leave_with(results, out)
