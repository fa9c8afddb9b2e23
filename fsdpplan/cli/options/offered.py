"""The values that a shell offers for an option; files are completed by the shell itself.

Typer has the rest of completion: the scripts of the shells, the names of commands and options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

Offered = Callable[[str], list[str]]
"""The beginning of a value -> the values that it may become."""

_KIND = re.compile(r'^kind = "(\w+)"', re.M)
_LITERAL = re.compile(r"[a-z][a-z_-]+")


def beginning(incomplete: str, words: Iterable[str], *, between: str = ",") -> list[str]:
    """The `words` that begin as the last of several values in `incomplete` does, behind the
    others."""
    others, sign, last = incomplete.rpartition(between)
    return [f"{others}{sign}{word}" for word in words if word.startswith(last)]


def one_of(words: Iterable[str]) -> Offered:
    """Offers these words."""
    known = tuple(words)

    def offered(incomplete: str) -> list[str]:
        return beginning(incomplete, known)

    return offered


def literals(metavar: str | None) -> tuple[str, ...]:
    """The words of a metavar such as `always|never|N` that are typed as they stand."""
    parts = (metavar or "").split("|")
    return tuple(one for one in parts if len(parts) > 1 and _LITERAL.fullmatch(one))


def models(incomplete: str) -> list[str]:
    """Names of the catalogue."""
    from fsdpplan.files.catalogue import model_names

    return beginning(incomplete, model_names())


def machines(incomplete: str) -> list[str]:
    """Profiles of nodes and clusters."""
    return beginning(incomplete, _profiles("node", "cluster"))


def devices(incomplete: str) -> list[str]:
    """Profiles of devices."""
    return beginning(incomplete, _profiles("device"))


def profiles(incomplete: str) -> list[str]:
    """All profiles."""
    return beginning(incomplete, _profiles())


def _profiles(*kinds: str) -> list[str]:
    from fsdpplan.files.profiles.catalogue import profiles_folder

    found = []
    for path in sorted(profiles_folder().glob("*.toml")):
        kind = _KIND.search(path.read_text(encoding="utf-8")) if kinds else None
        if not kinds or (kind is not None and kind[1] in kinds):
            found.append(path.stem)
    return found


def providers(incomplete: str) -> list[str]:
    """Providers of the price table."""
    from fsdpplan.files.prices import prices

    return beginning(incomplete, sorted({row.provider for row in prices()}))


def runs(incomplete: str) -> list[str]:
    """Runs of this folder."""
    try:
        found = sorted(os.listdir("fsdpplan-runs"))
    except OSError:
        return []
    return beginning(incomplete, (name for name in found if name.isprintable()))
