"""Start real gloo ranks by fork, after one import of torch: `ranks.py WORLD ARGUMENTS...` for
the trainer's command line, `python ranks.py WORLD MODULE:FUNCTION OUT` to call `function(Path)`,
`ranks.py serve DESCRIPTOR` for one such job after another (forks.py).

A fork is safe here because this process has run no torch operation. Prints the ranks' process ids
first, passes stop signals on, ends with the highest exit code, and kills ranks that hang.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ports import free_port

TIME_LIMIT_SECONDS = 280
"""When ranks that wait for each other are killed."""


def fork_ranks(world: int, body: Callable[[], None]) -> int:
    """Run `body` on `world` ranks, with the environment that torchrun would give."""
    port = free_port()
    children: list[int] = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            try:
                # Here, by one thread: torch makes its threads anew behind a fork, and those of
                # autograd, which begin together, may each find them half made.
                torch.set_num_threads(1)
                body()
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(99)
            os._exit(0)
        children.append(child)

    def forward(number: int, _frame: FrameType | None) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def give_up(_number: int, _frame: FrameType | None) -> None:
        print(f"ranks still run after {TIME_LIMIT_SECONDS} s", file=sys.stderr, flush=True)
        forward(signal.SIGKILL, None)

    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIME_LIMIT_SECONDS)
    print("ranks", *children, flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(abs(code) for code in codes)


def run(arguments: list[str]) -> int:
    """The job that the arguments of this program name; its exit code."""
    world, what, *others = arguments
    if ":" in what:
        module, _, function = what.partition(":")
        body = getattr(importlib.import_module(module), function)
        return fork_ranks(int(world), lambda: body(Path(others[0])))
    from fsdpplan.trainer.train import main

    return fork_ranks(int(world), lambda: main(arguments[1:]))


if __name__ == "__main__":
    import fsdpplan.trainer.train  # noqa: F401, for the children

    if sys.argv[1] != "serve":
        sys.exit(run(sys.argv[1:]))
    from tests.trainer.forks import serve

    serve(socket.socket(fileno=int(sys.argv[2])))
