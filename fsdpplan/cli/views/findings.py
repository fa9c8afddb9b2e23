"""What a check of a file that somebody wrote found, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, NotRequired, TypedDict

import typer

from fsdpplan.cli.views.render import blocks, columns, listed, tell, wrapped
from fsdpplan.errors import ErrorJson, FsdpPlanError, GateFailed, SpecError, error_document
from fsdpplan.files.table import Finding, FindingKind

HEADINGS: Mapping[FindingKind, str] = {
    "wrong": "Wrong: it cannot be read so",
    "missing": "Missing: it cannot be read without",
    "unsourced": "Not to be looked up, or not to be compared",
    "implausible": "Implausible: look again",
}
MOST_SHOWN = 20
"""Of one kind; all with --json."""


def conclude(
    what: str, findings: Sequence[Finding], *, counts: Mapping[str, int], after: str, as_json: bool
) -> None:
    """Print what was found in the file `what`, of which there are `counts`; leave with code 2 where
    it cannot be read, 6 where something is left to see to, and else say what comes `after`."""
    failed = failure(what, findings)
    if as_json:
        typer.echo(findings_json(what, findings, counts, failed))
    else:
        typer.echo(findings_screen(what, findings, counts, width=columns()))
    if failed is None:
        tell(after)
        return
    tell(str(failed))
    raise typer.Exit(failed.exit_code)


def failure(what: str, findings: Sequence[Finding]) -> FsdpPlanError | None:
    """Why the file is not whole; None where it is."""
    faults = sum(one.kind in ("wrong", "missing") for one in findings)
    if faults:
        many = faults > 1
        return SpecError(
            f"{what} has {faults} fault{'s' if many else ''}: correct {'them' if many else 'it'}, "
            "then type the same again"
        )
    if findings:
        left = f"{len(findings)} thing{'s are' if len(findings) > 1 else ' is'} left"
        return GateFailed(
            f"{what} can be read, and {left} to see to before others can use it: type the same "
            "again when that is done"
        )
    return None


class FindingsJson(TypedDict):
    """What a check of a file prints with `--json`; beside these, how many of what were read."""

    file: str
    whole: bool
    """Nothing is left to see to that makes it fail."""
    findings: list[Annotated[dict[str, Any], Finding]]
    error: NotRequired[ErrorJson]
    """Where the exit code is not 0."""


def findings_json(
    what: str,
    findings: Sequence[Finding],
    counts: Mapping[str, int],
    failed: FsdpPlanError | None,
) -> str:
    """The same with every finding."""
    document: FindingsJson = {
        "file": what,
        "whole": failed is None,
        "findings": [asdict(one) for one in findings],
    }
    if failed is not None:
        document["error"] = error_document(failed)
    return json.dumps({"file": what, **counts, **document}, indent=2)


def findings_screen(
    what: str, findings: Sequence[Finding], counts: Mapping[str, int], *, width: int
) -> str:
    """The findings by kind."""
    said = ", ".join(
        f"{number:,} {name.removesuffix('s') if number == 1 else name}"
        for name, number in counts.items()
    )
    head = f"{what}: {said}" + ("" if findings else "; nothing is left to see to")
    return blocks(
        wrapped(head, width=width), *(_of_kind(kind, findings, width) for kind in HEADINGS)
    )


def _of_kind(kind: FindingKind, findings: Sequence[Finding], width: int) -> str:
    lines = [f"{one.where}: {one.what}" for one in findings if one.kind == kind]
    more = len(lines) - MOST_SHOWN
    shown = [*lines[:MOST_SHOWN], f"{more} more, with --json"] if more > 0 else lines
    return listed(HEADINGS[kind], shown, width=width)
