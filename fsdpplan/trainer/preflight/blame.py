"""Who keeps a stage of the preflight from ending, told from what each rank's watchdog answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

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
