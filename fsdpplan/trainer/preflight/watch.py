"""A watchdog over the preflight: where a stage does not end, it says on whom the ranks wait.

A collective that waits for a rank that is stopped or cut off does not return, so this lives in
threads beside it, with a connection of their own to the rendezvous store, and ends the process.
Every watchdog answers for its rank when one asks; who does not answer is stopped, dead or cut off.

Who keeps a stage of the preflight from ending, told from what each rank's watchdog answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..errors import PreflightFailed
from .findings import Findings, hosts_words, may_leave_out, places_words, suspects


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where one rank is."""

    stage: int
    """Stages that it began."""
    words: str
    """What it does: `the all-reduce over tp`."""
    group: tuple[int, ...] = ()
    """Ranks that it waits for; empty: all."""
    error: str = ""
    """What it failed with."""
    is_own: bool = False
    """The failure is of this rank's own program; others fail since messages do not come."""

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Answer:
        """From `text`."""
        document = json.loads(text)
        return cls(**{**document, "group": tuple(document["group"])})


def blame(
    answers: Mapping[int, Answer], hosts: Mapping[int, str], *, world: int, seconds: float
) -> Findings:
    """Why the first stage that does not end does not, after so many seconds.

    A rank that does not answer is stopped, dead or cut off. One that failed on its own, on a single
    host, is why the others wait. One that has not begun what the others of its group have is late.
    Where all are there, messages do not pass: between whom, the groups that are through may tell.
    """
    silent = [rank for rank in range(world) if rank not in answers]
    first = min((one.stage for one in answers.values()), default=0)
    words = next((one.words for one in answers.values() if one.stage == first), "the start")
    if silent:
        return _named(silent, hosts, f"did not answer in {words} within {seconds:g} s")
    failed = [rank for rank, one in sorted(answers.items()) if one.error]
    own = [rank for rank in failed if answers[rank].is_own]
    if own:
        one = answers[own[0]]
        found = _named(own, hosts, f"failed in {one.words}: {one.error}")
        # on several hosts it is the program that is wrong
        return found if len({hosts.get(rank) for rank in own}) == 1 else replace(found, bad={})
    if failed and len({hosts.get(rank) for rank in failed}) == 1:
        return _named(failed, hosts, f"failed in {words}: {answers[failed[0]].error}")
    behind = [rank for rank in sorted(answers) if _is_behind(rank, answers, first, world)]
    if behind and len(behind) < world:
        later = min(one.stage for one in answers.values() if one.stage > first)
        waited = next(one.words for one in answers.values() if one.stage == later)
        return _named(
            behind, hosts, f"did not come to {waited} within {seconds:g} s, after {words}"
        )
    return _no_messages(answers, hosts, first=first, words=words, seconds=seconds)


def all_hosts(
    told: Mapping[int, str], *, world: int, per_node: int, nodes: tuple[str, ...]
) -> dict[int, str]:
    """The host of each rank, where ranks did not come to tell: that of another rank of the node,
    or, where no rank of just one node came, the one of `nodes` that nobody told of."""
    by_node = {rank // per_node: host for rank, host in told.items()}
    missing = sorted({rank // per_node for rank in range(world)} - set(by_node))
    untold = [host for host in nodes if host not in by_node.values()]
    if len(missing) == 1 == len(untold) and len(nodes) == -(-world // per_node):
        by_node[missing[0]] = untold[0]
    return {rank: by_node[rank // per_node] for rank in range(world) if rank // per_node in by_node}


def _members(answer: Answer, world: int) -> tuple[int, ...]:
    return answer.group or tuple(range(world))


def _is_behind(rank: int, answers: Mapping[int, Answer], first: int, world: int) -> bool:
    """In the first stage, while another of its group is further."""
    if answers[rank].stage != first:
        return False
    return any(answers[other].stage > first for other in _members(answers[rank], world))


def _no_messages(
    answers: Mapping[int, Answer],
    hosts: Mapping[int, str],
    *,
    first: int,
    words: str,
    seconds: float,
) -> Findings:
    waiting = {one.group for one in answers.values() if one.stage == first}
    ranks = sorted({rank for group in waiting for rank in group} or answers)
    through = {one.group for one in answers.values() if one.stage > first}
    groups = [([hosts[rank] for rank in group], False) for group in waiting]
    groups += [([hosts[rank] for rank in group], True) for group in through]
    error = next((f": {one.error}" for one in answers.values() if one.error), "")
    said = f"{words} did not end within {seconds:g} s{error}"
    text = (
        f"all ranks are there, but {said}, among {hosts_words(hosts[rank] for rank in ranks)}: "
        "look whether their data network lets messages pass (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME, firewalls)"
    )
    return _blamed(text, suspects(groups), said, hosts.values())


def _named(ranks: list[int], hosts: Mapping[int, str], what: str) -> Findings:
    bad = {hosts[rank] for rank in ranks if rank in hosts}
    text = f"{places_words(ranks, hosts)} {what}"
    # each rank that never told its host may be on another one
    unknown = {f"rank {rank}" for rank in ranks if rank not in hosts}
    may = may_leave_out(bad | unknown, {*hosts.values(), *unknown})
    return _blamed(text, bad if may else (), what, hosts.values())


def _blamed(text: str, bad: Iterable[str], what: str, hosts: Iterable[str]) -> Findings:
    few = sorted(bad) if may_leave_out(set(bad), hosts) else []
    return Findings(problem=text, bad={host: f"a rank {what}" for host in few})


POLL_SECONDS = 0.25
ANSWER_SECONDS = 15.0
"""How long a watchdog may take to answer: it waits for nothing but the store. On two cores with
twenty processes at work a live one was seen to take more than five."""
LATE_FACTOR = 4.0
"""How many times as late as ever before it may be then: its machine may have more to do by now."""
MOST_ANSWER_SECONDS = 4 * ANSWER_SECONDS
"""However late watchdogs were: who waits in vain for a dead rank has the rest of an hour to lose,
and who takes a live one for dead loses a good node."""
LOST_SECONDS = 20.0
"""After a stage's limit, or after the last answer was due, when a store that has not answered is
lost."""
JOIN_FACTOR = 4.0
"""Ranks may be so many times as late at the start as later: torch is imported before."""
DONE = 2**31
"""Stage of a rank that is through."""


def store_client(*, seconds: float, trial: int) -> Store:
    """A connection of its own to the store by which the ranks of this start meet; each `trial` of a
    process has keys of its own."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"preflight {attempt} {trial}", store)


def patience_seconds(late_seconds: Iterable[float]) -> float:
    """How long to wait for answers, after how late watchdogs were at looking at the store before:
    on a machine with too much to do a live rank is late, and must not be taken for a dead one."""
    latest = max((0.0, *late_seconds))
    return min(ANSWER_SECONDS + LATE_FACTOR * latest, MOST_ANSWER_SECONDS)


class Watch:
    """Ends this process where a stage takes too long. `found` hears of it on one rank, first;
    `nodes` are those that the job was started on, where that is known."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        seconds: float,
        found: Callable[[Findings], None],
        nodes: tuple[str, ...] = (),
        trial: int = 0,
    ) -> None:
        self._rank, self._world, self._host = rank, world, host
        self._trial = trial
        self._seconds = seconds
        self._found, self._nodes = found, nodes
        self._hosts: dict[int, str] = {}
        self._limit_seconds = seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._here = Answer(stage=0, words="the start")
        self._deadline = 0.0
        self._watcher = threading.Thread(target=self._watch, name="preflight watch", daemon=True)

    def start(self, words: str) -> None:
        """Begin to watch, with the stage in which the ranks meet."""
        self.enter(words, factor=JOIN_FACTOR)
        self._watcher.start()
        threading.Thread(target=self._guard, name="preflight guard", daemon=True).start()

    def enter(self, words: str, *, group: Sequence[int] = (), factor: float = 1.0) -> None:
        """The next stage begins: what is done, with whom (nobody named: all)."""
        with self._lock:
            self._here = Answer(stage=self._here.stage + 1, words=words, group=tuple(group))
            self._limit_seconds = factor * self._seconds
            self._deadline = time.monotonic() + self._limit_seconds

    def know(self, hosts: Sequence[str]) -> None:
        """The host of each rank, as the roll told."""
        self._hosts = dict(enumerate(hosts))

    def fail(self, error: Exception) -> NoReturn:
        """The stage failed here: let the watchdogs find out why, and end."""
        with self._lock:
            said = " ".join(str(error).split("\n", 1)[0].split())
            is_own = not isinstance(error, RuntimeError)  # which torch's collectives raise
            self._here = replace(self._here, error=said or type(error).__name__, is_own=is_own)
            self._deadline = time.monotonic()
        time.sleep(MOST_ANSWER_SECONDS + 3 * LOST_SECONDS)  # the watchdogs end the process before
        os._exit(PreflightFailed.exit_code)

    def finish(self) -> None:
        """All stages are through; others may not be yet, and still get an answer."""
        self._over.set()
        self._watcher.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        """Look at the clock and at whether another rank is in trouble."""
        try:
            store = store_client(seconds=JOIN_FACTOR * self._seconds, trial=self._trial)
            store.set(f"host/{self._rank}", self._host)
            told, looked = 0.0, time.monotonic()
            while not self._over.wait(POLL_SECONDS):
                is_due = time.monotonic() > self._deadline
                if is_due or store.check(["trouble"]):
                    self._end(store)
                late = time.monotonic() - looked - POLL_SECONDS
                looked = time.monotonic()
                if late > told + POLL_SECONDS:
                    store.set(f"late/{self._rank}", f"{late:.3f}")
                    told = late
            store.set(f"answer/{self._rank}", Answer(stage=DONE, words="the end").text())
        except RuntimeError:
            if not self._over.is_set():
                self._lost()

    def _guard(self) -> None:
        """The watcher itself may wait for a store that it is cut off from."""
        while not self._over.wait(POLL_SECONDS):
            if time.monotonic() > self._deadline + LOST_SECONDS:
                self._lost()

    def _end(self, store: Store) -> NoReturn:
        with self._lock:
            here = self._here
        store.set("trouble", "1")
        store.set(f"answer/{self._rank}", here.text())
        # The store answers: the guard is to wait for the answers of the others, too.
        self._deadline = time.monotonic() + MOST_ANSWER_SECONDS + LOST_SECONDS
        if store.add("finder", 1) == 1:
            self._find(store)
            store.set("verdict", "1")
        else:
            with contextlib.suppress(RuntimeError):
                store.wait(["verdict"], timedelta(seconds=MOST_ANSWER_SECONDS + LOST_SECONDS))
        os._exit(PreflightFailed.exit_code)

    def _find(self, store: Store) -> None:
        """Gather the answers and say who is to blame."""
        everybody = range(self._world)
        late = [float(store.get(f"late/{r}")) for r in everybody if store.check([f"late/{r}"])]
        began, polls = time.monotonic(), 0
        answers = [f"answer/{rank}" for rank in everybody]
        while not store.check(answers):
            spent = time.monotonic() - began
            if spent > patience_seconds([*late, spent / max(polls, 1) - POLL_SECONDS]):
                break
            time.sleep(POLL_SECONDS)
            polls += 1
        here = {r: store.get(f"answer/{r}") for r in everybody if store.check([f"answer/{r}"])}
        told = [rank for rank in everybody if store.check([f"host/{rank}"])]
        hosts = all_hosts(
            {rank: store.get(f"host/{rank}").decode() for rank in told} | self._hosts,
            world=self._world,
            per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            nodes=self._nodes,
        )
        found = blame(
            {rank: Answer.of(text) for rank, text in here.items()},
            hosts,
            world=self._world,
            seconds=self._limit_seconds,
        )
        self._found(found)

    def _lost(self) -> NoReturn:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(
            f"[rank {self._rank} on {self._host}] error: the rendezvous store at {where} does not "
            f"answer in {self._here.words}: one of the two is cut off from the other, or has ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(PreflightFailed.exit_code)


class Council:
    """What ranks tell each other through the store, which works where the data network does not."""

    def __init__(self, *, rank: int, world: int, seconds: float, trial: int = 0) -> None:
        self._rank, self._world = rank, world
        self._store = store_client(seconds=seconds, trial=trial)

    def decide(
        self, subject: str, value: Any, judge: Callable[[list[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """What rank 0 makes of the values of all ranks; all call this. All of it is JSON."""
        self._store.set(f"{subject}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            keys = [f"{subject}/{rank}" for rank in range(self._world)]
            self._store.wait(keys)
            values = [json.loads(text) for text in self._store.multi_get(keys)]
            self._store.set(f"{subject} verdict", json.dumps(judge(values)))
        verdict: dict[str, Any] = json.loads(self._store.get(f"{subject} verdict"))
        return verdict

    def close(self) -> None:
        """All ranks are about to leave; rank 0 last, since the store may end with it."""
        with contextlib.suppress(RuntimeError):
            gone = self._store.add("gone", 1)
            until = time.monotonic() + ANSWER_SECONDS
            while self._rank == 0 and gone < self._world and time.monotonic() < until:
                time.sleep(POLL_SECONDS / 5)
                gone = self._store.add("gone", 0)
