"""Searching a catalogue by words, of which each narrows it: of profiles and of models alike."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from fsdpplan.files.table import short

NEAREST = 3
"""Names in the message of a search that finds nothing."""


def split_words(words: Sequence[str]) -> list[str]:
    """Each word by itself, in small letters, whether quoted together or not."""
    return " ".join(words).lower().split()


def having_all(
    words: Sequence[str], names: Sequence[str], has: Callable[[str, str], bool]
) -> list[str]:
    """Those of `names` that have each of `words`, in their order."""
    return [name for name in names if all(has(name, word) for word in words)]


def nearest_names(words: Sequence[str], names: Sequence[str], *, cutoff: float = 0.5) -> list[str]:
    """Names that are spelled much alike, the nearest first."""
    asked = " ".join(words).lower()[:100]
    joined = asked.replace(" ", "-")
    near = difflib.get_close_matches(joined, names, n=NEAREST, cutoff=cutoff)
    return near or difflib.get_close_matches(asked, names, n=NEAREST, cutoff=cutoff)


def nothing_found(
    what: str,
    words: Sequence[str],
    names: Sequence[str],
    *,
    has: Callable[[str, str], bool],
) -> str:
    """What a search that found nothing says: which word is to blame, and what is spelled like it.
    What to type instead the caller adds."""
    asked = split_words(words)
    strange = [word for word in asked if not having_all([word], names, has)]
    near = nearest_names(words, names) or nearest_names(strange, names)
    parts = [f"no {what} matches {short(' '.join(words))}"]
    if len(asked) > 1 and not strange:
        parts.append("each word by itself does, so leave one out")
    elif len(asked) > len(strange):
        parts.append(f"nothing has {short(' '.join(strange))}")
    if near:
        parts.append(f"nearest: {', '.join(near)}")
    return "; ".join(parts)
