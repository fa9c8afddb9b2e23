"""Prices of GPU hours by provider, and power of devices and nodes: two tables beside the profiles.

`prices.csv` has a row for each GPU of a provider, with the day on which its price was read and
where; `power.csv` the limit of each device (TDP) and the most that a node of one type draws, all of
it. What no source says has no row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache

from fsdpplan.errors import SpecError, did_you_mean
from fsdpplan.files.profiles.catalogue import profiles_folder
from fsdpplan.files.table import read_text

LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """On demand, of one GPU for an hour."""

    provider: str
    device: str
    """Its profile."""
    usd_per_gpu_hour: float
    offer: str
    """What is rented, as the provider calls it."""
    read_on: date
    page: str
    """Where the provider says it today."""
    source: str
    """Where it was read."""

    def age_days(self, today: date) -> int:
        """Days since it was read."""
        return (today - self.read_on).days


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The most that a device draws, or a node with all that is in it."""

    node: str
    """Its profile; empty: a device alone."""
    device: str
    """Its profile."""
    gpus: int
    """Of a node; 1 of a device."""
    watts: float
    what: str
    source: str


@cache
def prices() -> tuple[Price, ...]:
    """All rows of `prices.csv`."""
    return tuple(
        Price(
            provider=row["provider"],
            device=row["device"],
            usd_per_gpu_hour=float(row["usd_per_gpu_hour"]),
            offer=row["offer"],
            read_on=date.fromisoformat(row["date"]),
            page=row["page"],
            source=row["source"],
        )
        for row in _rows("prices.csv")
    )


def require_provider(provider: str) -> None:
    """Raise SpecError where no row is of that provider."""
    known = sorted({row.provider for row in prices()})
    if provider not in known:
        near = did_you_mean(provider, known)
        raise SpecError(
            f"--provider: no price of {provider[:40]!r} is known here{near}; type "
            f"{', '.join(known[:-1])} or {known[-1]}, or the price itself: --price 2.10"
        )


def price_of(provider: str, device: str) -> Price:
    """What a GPU of that profile costs there. Raises SpecError where no row says it."""
    require_provider(provider)
    for row in prices():
        if (row.provider, row.device) == (provider, device):
            return row
    others = [row.provider for row in prices() if row.device == device]
    instead = f"--provider {others[0]} has one; or type" if others else "type"
    raise SpecError(
        f"--provider {provider}: no price of {device} is known there; {instead} the price itself: "
        "--price 2.10"
    )


def power_of(device: str, *, node: str = "") -> Power | None:
    """Of a device, or of a whole node that has it; None: not known."""
    found = (row for row in powers() if (row.node, row.device) == (node, device))
    return next(found, None)


@cache
def powers() -> tuple[Power, ...]:
    """All rows of `power.csv`."""
    return tuple(
        Power(
            node=row["node"],
            device=row["device"],
            gpus=int(row["gpus"]),
            watts=float(row["watts"]),
            what=row["what"],
            source=row["source"],
        )
        for row in _rows("power.csv")
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = read_text(profiles_folder() / name, limit_bytes=LIMIT_BYTES, what="table")
    return csv.DictReader(text.splitlines())
