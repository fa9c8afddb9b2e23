"""What a part of the preflight found, and whose fault it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_SHOWN = 8
"""Ranks or hosts of one sentence that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What speaks against training on these nodes."""

    problem: str = ""
    """Why the job must not start, in one sentence; empty: it may."""
    bad: Mapping[str, str] = field(default_factory=dict)
    """Host to blame -> why, in words."""
    warnings: tuple[str, ...] = ()
    """What is not as it should be, but no reason to end the job."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"problem": self.problem, "bad": dict(self.bad), "warnings": list(self.warnings)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Findings:
        """From `document`."""
        return cls(
            problem=document["problem"],
            bad=document["bad"],
            warnings=tuple(document["warnings"]),
        )


def may_leave_out(bad: Collection[str], hosts: Iterable[str]) -> bool:
    """Whether so few hosts are to blame that the others can be trusted: at most half, not all."""
    everybody = set(hosts)
    return bool(bad) and 2 * len(set(bad)) <= len(everybody)


def suspects(groups: Iterable[tuple[Collection[str], bool]]) -> frozenset[str]:
    """Hosts that explain which groups fail: in each failing one, in none that is fine.

    `groups` are (hosts, whether it is fine). Empty where no host is in all that fail.
    """
    failing: list[set[str]] = []
    fine: set[str] = set()
    for hosts, is_fine in groups:
        if is_fine:
            fine |= set(hosts)
        else:
            failing.append(set(hosts))
    return frozenset(set.intersection(*failing) - fine) if failing else frozenset()


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 2, 3`, `ranks 0, 1, ... and 56 more`."""
    shown = ", ".join(map(str, ranks[:MOST_SHOWN]))
    more = f" and {len(ranks) - MOST_SHOWN} more" if len(ranks) > MOST_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def places_words(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Ranks and the hosts that they are on: `ranks 2, 3 on node2 and rank 5 on node3`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    words = [
        f"{ranks_words(of)} on {host}" if host else f"{ranks_words(of)} on an unknown host"
        for host, of in by_host.items()
    ]
    rest = f" and {len(words) - MOST_SHOWN} hosts more" if len(words) > MOST_SHOWN else ""
    return " and ".join(words[:MOST_SHOWN]) + rest


def hosts_words(hosts: Iterable[str]) -> str:
    """`node1, node2`."""
    names = list(dict.fromkeys(hosts))
    rest = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + rest
