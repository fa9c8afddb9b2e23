"""One process that has imported torch, of which jobs on forked ranks are children.

An import of torch takes longer than most of these jobs. `start` runs the client below, which asks
for a job, passes signals on to it and ends as it ends; the process goes with the tests that use it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

RANKS = Path(__file__).parent / "ranks.py"


@cache
def _address() -> str:
    """Where the process listens, which is started once."""
    address = f"{tempfile.mkdtemp()}/forks"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(RANKS), "serve", str(listener.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    atexit.register(process.communicate)
    return address


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`ranks.py ARGUMENTS...`, as a process of its own to whoever looks at it."""
    return subprocess.Popen(
        [sys.executable, "-S", __file__, _address(), *arguments],
        # the tiny step before each job has tests of its own
        env={**os.environ, "OMP_NUM_THREADS": "1", "FSDPPLAN_NUMBERS": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def serve(listener: socket.socket) -> None:
    """Fork a job for each request, until standard input ends; the socket's folder goes, too."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            shutil.rmtree(Path(listener.getsockname()).parent)
            return
        connection, _ = listener.accept()
        _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
        child = os.fork()
        if child == 0:
            _job(connection, outputs)
        for output in outputs:
            os.close(output)
        connection.close()


def _reap(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _job(connection: socket.socket, outputs: list[int]) -> None:
    """What a client asked for; tells it the process id, and the exit code at the end."""
    from tests.trainer.ranks import run

    code = 99
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
            os.close(output)
        request = json.loads(connection.makefile().readline())
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[1:] = request["arguments"]
        connection.sendall(f"{os.getpid()}\n".encode())
        code = run(request["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(code)


def _ask(address: str, arguments: list[str]) -> int:
    """Have a job done, with this process's folder, environment and outputs."""
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\0"], [1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        answers = connection.makefile()
        job = int(answers.readline())

        def forward(number: int, _frame: FrameType | None) -> None:
            os.kill(job, number)

        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        return int(answers.readline())


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1], sys.argv[2:]))
