"""Ranks of a preflight on nodes that are only named, one of which may be bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdpplan.trainer import train
from fsdpplan.trainer.preflight import links as preflight_links
from fsdpplan.trainer.preflight import program as preflight
from fsdpplan.trainer.preflight import watch as preflight_watch
from fsdpplan.trainer.preflight.program import main
from fsdpplan.trainer.preflight.report import ATTEMPTS_FILE, RESULT_FILE
from fsdpplan.trainer.preflight.watch import Watch
from tests.trainer.plans import plan_text
from tests.trainer.ranks import fork_ranks

LIMIT_SECONDS = "60"
"""Of a stage: on a busy machine all who are to come must come in time."""
FAR_LONGER_SECONDS = 240


def _run(folder: Path, *, per_node: int, **layout: int) -> NoReturn:
    os.environ["SLURMD_NODENAME"] = f"node{1 + _rank() // per_node}"
    os.environ["FSDPPLAN_PLAN"] = plan_text(**layout)
    main(["--run-folder", str(folder), "--preflight-seconds", LIMIT_SECONDS])


def _rank() -> int:
    return int(os.environ["RANK"])


def _arrive(folder: Path) -> None:
    """Say that this rank is where the scene wants it."""
    (folder / f"here.{_rank()}").touch()


def _wait_for(folder: Path, ranks: int) -> None:
    """Until so many are."""
    while len(list(folder.glob("here.*"))) < ranks:
        time.sleep(0.05)


def _not_waiting(folder: Path, ranks: int) -> None:
    """The stage's limit is over as soon as all are where the scene wants them: who does not come is
    waited for no longer, however long the others took."""

    class Impatient(Watch):
        def start(self, words: str) -> None:
            super().start(words)
            Thread(target=self._end_stage, daemon=True).start()

        def _end_stage(self) -> None:
            _wait_for(folder, ranks)
            self._deadline = time.monotonic()

    preflight.Watch = Impatient  # type: ignore[attr-defined]


def _before_axis(act: Callable[[], None], *, axis: int) -> None:
    """`act` on each rank, before its `axis`th all-reduce."""
    real, calls = preflight.sum_over, []

    def sum_over(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, float]:
        calls.append(group)
        if len(calls) == axis:
            act()
        return real(group, device)

    preflight.sum_over = sum_over  # type: ignore[attr-defined]


def good(folder: Path) -> NoReturn:
    """Three nodes of two."""
    _run(folder, per_node=2, dp_replicate=3, dp_shard=2)


STOP = """
kill -STOP "$1"
until grep -q '^State:.T' "/proc/$1/status"; do sleep 0.1; done
: >"$2/here.$3"
until [ -e "$4" ]; do sleep 0.2; done
kill -CONT "$1"
"""


def stopped(folder: Path) -> NoReturn:
    """Rank 3 stops before the second axis, with all its threads, until the others have ended."""

    def act() -> None:
        if _rank() == 3:
            words = (str(os.getpid()), str(folder), str(_rank()), str(folder / RESULT_FILE))
            subprocess.run(["sh", "-c", STOP, "sh", *words], check=False)
        else:
            _arrive(folder)

    _before_axis(act, axis=2)
    _not_waiting(folder, 4)
    _run(folder, per_node=2, dp_replicate=2, dp_shard=2)


def late(folder: Path) -> NoReturn:
    """Rank 2 does something else for very long before it tries its axis."""
    real = preflight.tried_axes

    def tried_axes(*arguments: Any) -> Any:
        if _rank() == 2:
            _arrive(folder)
            time.sleep(FAR_LONGER_SECONDS)
        return real(*arguments)

    preflight.tried_axes = tried_axes
    _before_axis(partial(_arrive, folder), axis=1)
    _not_waiting(folder, 3)
    _run(folder, per_node=1, dp_shard=3)


def dead(folder: Path) -> NoReturn:
    """Rank 1 ends without a word in the all-reduce."""

    def act() -> None:
        _arrive(folder)
        if _rank() == 1:
            _wait_for(folder, 3)
            os._exit(3)

    _before_axis(act, axis=1)
    _run(folder, per_node=1, dp_shard=3)


def absent(folder: Path) -> NoReturn:
    """Rank 2 is started and never comes."""
    if _rank() == 2:
        while not (folder / RESULT_FILE).exists():
            time.sleep(0.2)
        os._exit(0)
    nodes = {"event": "attempt", "attempt": 1, "nodes": ["node1", "node2", "node3"]}
    own = folder / f"attempts.{_rank()}"  # each rank writes it before it reads it
    own.write_text(json.dumps(nodes) + "\n", encoding="utf-8")
    own.replace(folder / ATTEMPTS_FILE)
    connect = preflight_watch.store_client

    def store_client(*, seconds: float, trial: int) -> Any:
        store = connect(seconds=seconds, trial=trial)
        _arrive(folder)
        return store

    preflight_watch.store_client = store_client
    _not_waiting(folder, 2)
    _run(folder, per_node=1, dp_shard=3)


def slow(folder: Path) -> NoReturn:
    """The third node measures that its messages take very long: one that only waits would look
    like the others on a busy machine."""
    real = preflight_links._pair_speed

    def pair_speed(*arguments: Any) -> float:
        rate = real(*arguments)
        return 1.0 if _rank() == 2 else rate

    preflight_links._pair_speed = pair_speed
    _run(folder, per_node=1, dp_shard=3)


def _train(folder: Path, *words: str) -> NoReturn:
    os.environ["FSDPPLAN_PLAN"] = plan_text(dp_shard=2)
    train.main(["--steps", "2", "--metrics", str(folder / "metrics.jsonl"), *words])


def tried(folder: Path) -> NoReturn:
    """Training behind a preflight."""
    os.environ["FSDPPLAN_NUMBERS"] = "1"
    _train(folder, "--preflight", "--run-folder", str(folder), "--preflight-seconds", LIMIT_SECONDS)


def plain(folder: Path) -> NoReturn:
    """Training without one."""
    _train(folder, "--no-numbers")


SCENES: dict[str, tuple[int, Callable[[Path], NoReturn]]] = {
    "good": (6, good),
    "stopped": (4, stopped),
    "late": (3, late),
    "dead": (3, dead),
    "absent": (3, absent),
    "slow": (3, slow),
    "tried": (2, tried),
    "plain": (2, plain),
}
"""Name -> ranks and what each of them does."""


def play(folder: Path) -> None:
    """All scenes at once, each with a folder of its own; in it the run's folder, what its ranks
    said, and the highest of their exit codes."""
    children = []
    for name, (world, scene) in SCENES.items():
        own = folder / name
        own.mkdir()
        child = os.fork()
        if child == 0:
            said = os.open(own / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            code = fork_ranks(world, partial(scene, own))
            (own / "exit_code").write_text(str(code), encoding="utf-8")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    play(Path(sys.argv[1]))
