"""The notes of a release, made from CHANGELOG.md: `python docs/release_notes.py 0.2.0`.

Raises SystemExit with one line where the changelog and the version do not fit together.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>[^)]*)\))?$", re.M)
LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)")


def release_notes(changelog: str, version: str, *, declared: str, base: str = "") -> str:
    """The section of `version` as Markdown of its own.

    `declared` is the version in pyproject.toml; `base` goes before links into the repository, which
    a page elsewhere cannot follow: without it they become plain words. Raises ValueError with what
    is wrong, and what to do.
    """
    if version != declared:
        raise ValueError(
            f"pyproject.toml says version {declared}, not {version}: correct one of them"
        )
    heads = list(HEAD.finditer(changelog))
    at = next((i for i, head in enumerate(heads) if head["version"] == version), None)
    if at is None:
        raise ValueError(
            f"CHANGELOG.md has no section {version}: name the unreleased one so, with its date, as "
            f"in '## {version} ({date.today().isoformat()})'"
        )
    head = heads[at]
    try:
        day = date.fromisoformat(head["date"] or "")
    except ValueError:
        raise ValueError(
            f"the section {version} of CHANGELOG.md has no date: '## {version} (YYYY-MM-DD)'"
        ) from None
    later = [other["date"] for other in heads[at + 1 :] if other["date"]]
    if any(date.fromisoformat(other) > day for other in later):
        raise ValueError(f"{version} of {day} stands above a later release: correct its date")
    end = heads[at + 1].start() if at + 1 < len(heads) else len(changelog)
    body = changelog[head.end() : end].strip()
    if not body:
        raise ValueError(f"the section {version} of CHANGELOG.md is empty: say what is new")
    return f"# fsdpplan {version}\n\nReleased {day}.\n\n{_linked(body, base)}\n"


def _linked(text: str, base: str) -> str:
    def link(match: re.Match[str]) -> str:
        words, target = match["words"], match["target"]
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"[{words}]({base.rstrip('/')}/{target})" if base else words

    return LINK.sub(link, text)


def main(arguments: Sequence[str]) -> None:
    """Print the notes of the version that is named."""
    if not 1 <= len(arguments) <= 2:
        raise SystemExit("python docs/release_notes.py VERSION [BASE_OF_LINKS]")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        notes = release_notes(
            changelog, arguments[0], declared=project["version"], base="".join(arguments[1:])
        )
    except ValueError as error:
        raise SystemExit(f"release notes: {error}") from None
    print(notes, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
