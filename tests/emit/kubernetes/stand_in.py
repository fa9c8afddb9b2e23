"""Stands in for Python with torch: its torchrun starts one rank, which does what RANK_DOES says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn


def rank() -> NoReturn:
    """A rank that notes the signal which ends it, as the trainer does."""
    os.setsid()
    does, stopped = os.environ["RANK_DOES"], Path(os.environ["FSDPPLAN_STOPPED_FILE"])

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        stopped.write_text(f"{number}\n")
        os._exit(0)

    if does == "take its time":
        print("the ranks are ready", flush=True)
        time.sleep(2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, leave)
    metrics = Path(os.environ["FSDPPLAN_METRICS"])
    metrics.write_text('{"event": "start", "step": 0}\n{"event": "summary"}\n')
    print("the ranks are ready", flush=True)
    match does:
        case "wait" | "take its time":
            while True:
                time.sleep(60)
        case "stop with the others":
            stopped.write_text("12\n")
    os._exit(7 if does == "fail" else 0)


def main() -> int:
    """The agent: it gives 1 for a rank that failed, and ends its rank when it has to go."""
    if "torch.distributed.run" not in sys.argv:
        return 0
    print(f"torchrun {' '.join(sys.argv[3:])}", flush=True)
    child = os.fork()
    if not child:
        rank()

    def end(_number: int, _frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    _, status = os.waitpid(child, 0)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
