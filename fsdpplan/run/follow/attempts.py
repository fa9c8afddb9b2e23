"""What a job's script says of its starts: which nodes it took, and why a start ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.run.follow.tail import FileTail
from fsdpplan.spec.nodes import compress_host_list

ATTEMPTS_NAME = "attempts.jsonl"

_NEXT = {
    "retry": "it is started again in the same allocation",
    "requeue": "it goes back into the queue",
    "end": "it is not started again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedOn:
    """The ranks were started."""

    attempt: int
    most: int | None
    """Starts at most; None: the script did not say."""
    nodes: tuple[str, ...]

    @property
    def words(self) -> str:
        """For a person."""
        of = "" if self.most is None else f" of {self.most}"
        return f"attempt {self.attempt}{of} on {compress_host_list(self.nodes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEnded:
    """The ranks of a start are gone."""

    attempt: int
    exit_code: int
    next: str
    """`retry`, `requeue` or `end`."""
    reason: str

    @property
    def words(self) -> str:
        """For a person; a start that ended well is no news."""
        what = f"attempt {self.attempt} ended with exit code {self.exit_code}"
        if self.reason:
            # The script's reasons may begin with the same words.
            what = self.reason if self.reason.startswith(what) else f"{what}: {self.reason}"
        return f"{what}; {_NEXT.get(self.next, self.next)}"


class AttemptsTail:
    """Reads what is added to a run's `attempts.jsonl`."""

    def __init__(self, run_folder: Path, *, from_start: bool = True) -> None:
        self._tail = FileTail(run_folder / ATTEMPTS_NAME, from_start=from_start)

    def poll(self) -> list[StartedOn | StartEnded]:
        """Events since the last call."""
        events = map(parse_attempt, self._tail.poll())
        return [event for event in events if event is not None]


def ended_for_good(run_folder: Path) -> StartEnded | None:
    """The last start's end, where the script said that there will be no other."""
    events = AttemptsTail(run_folder).poll()
    last = events[-1] if events else None
    return last if isinstance(last, StartEnded) and last.next == "end" else None


def parse_attempt(line: str) -> StartedOn | StartEnded | None:
    """The event on one line; None for a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("attempt"), int):
        return None
    attempt: int = record["attempt"]
    match record.get("event"):
        case "attempt":
            nodes, most = record.get("nodes"), record.get("most")
            named = nodes if isinstance(nodes, list) else []
            return StartedOn(
                attempt=attempt,
                most=most if isinstance(most, int) else None,
                nodes=tuple(node for node in named if isinstance(node, str)),
            )
        case "attempt_ended":
            code = record.get("exit_code")
            return StartEnded(
                attempt=attempt,
                exit_code=code if isinstance(code, int) else 1,
                next=str(record.get("next", "end")),
                reason=" ".join(str(record.get("reason") or "").split()),
            )
    return None
