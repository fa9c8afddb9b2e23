"""Predicted against measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpplan.cli.views.render import blocks, table, wrapped
from fsdpplan.run.compare import Comparison
from fsdpplan.units import format_gib, format_percent, format_seconds


def row_document(row: Comparison) -> dict[str, Any]:
    """One row as JSON has it."""
    return {
        "quantity": row.quantity,
        "predicted": row.predicted,
        "lower": row.lower,
        "upper": row.upper,
        "measured": row.measured,
        "error_fraction": row.error_fraction,
        "inside_band": row.inside_band,
        "note": row.note,
    }


def comparison_table(rows: Sequence[Comparison], *, width: int) -> str:
    """One line a quantity, and the notes on them."""
    cells = [
        (
            row.quantity.removesuffix("_seconds").removesuffix("_fraction").replace("_", " "),
            _shown(row, row.predicted),
            "" if row.lower is None else f"{_shown(row, row.lower)} to {_shown(row, row.upper)}",
            _shown(row, row.measured),
            "" if row.note or row.error_fraction is None else f"{row.error_fraction * 100:+.1f} %",
        )
        for row in rows
    ]
    headers = ("", "predicted", "80 % band", "measured", "error")
    align = ("left", "right", "right", "right", "right")
    notes = [
        wrapped(f"{row.note[0].upper()}{row.note[1:]}.", width=width) for row in rows if row.note
    ]
    return blocks(table(cells, headers=headers, align=align, width=width), *notes)


def _shown(row: Comparison, value: float | None) -> str:
    if value is None:
        return "unknown"
    match row.unit:
        case "seconds":
            return format_seconds(value)
        case "tokens_per_second":
            return f"{value:,.0f}"
        case "fraction":
            return format_percent(value)
        case "bytes":
            return format_gib(value)
