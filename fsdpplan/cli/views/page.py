"""A report on disk: written whole or not at all, and said to be there."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.files.table import path_text
from fsdpplan.files.writing import require_place, write_text_atomically
from fsdpplan.report.page import page
from fsdpplan.report.values import Report
from fsdpplan.units import format_gb

ADVICE = "choose another --report"


def require_report_place(out: Path | None) -> None:
    """Raise SpecError where a page cannot be written there, before anything is searched for it."""
    if out is not None:
        require_place(out, advice=ADVICE)


def written_report(report: Report, out: Path) -> str:
    """Write `report` as a page; what to say about it."""
    text = page(report)
    write_text_atomically(out, text, advice=ADVICE)
    return f"wrote {path_text(out)}, {format_gb(len(text.encode()))}; open it in a browser"
