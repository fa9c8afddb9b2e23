"""Scores of tables of kernels as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.validate.kernel_scores import KernelReport, ScoredKernel

WORDS = {"matmul": "matmuls", "collective": "collectives"}


def kernels_screen(reports: Sequence[KernelReport], *, width: int) -> str:
    """Errors by group of each table, and what was skipped and why."""
    return blocks(*(_screen(report, width) for report in reports))


def _screen(report: KernelReport, width: int) -> str:
    predicted = sum(row.predicted_seconds is not None for row in report.rows)
    counted = sum(group.rows for group in report.groups)
    head = f"{len(report.rows):,} timed {WORDS[report.kind]}, {predicted:,} predicted"
    if counted < predicted:
        head += f", {counted:,} of a MiB or more"
    rows = [
        (
            *group.group,
            str(group.rows),
            f"{group.median_abs_error_fraction:.1%}",
            f"{group.p90_abs_error_fraction:.1%}",
            f"{group.bias_fraction:+.1%}",
        )
        for group in report.groups
    ]
    headers = (*report.group_names, "rows", "median", "p90", "bias")
    align = (*["left"] * len(report.group_names), *["right"] * 4)
    skipped = Counter(row.skipped.reason for row in report.rows if row.skipped is not None)
    return blocks(
        wrapped(head, width=width),
        table(rows, headers=headers, align=align, width=width),
        listed(
            "Not predicted",
            [f"{reason} ({count})" for reason, count in skipped.most_common()],
            width=width,
        ),
    )


def kernels_json(reports: Sequence[KernelReport]) -> str:
    """Each table under its kind: its rows, and the errors of its groups."""
    return json.dumps({WORDS[one.kind]: _document(one) for one in reports}, indent=2)


def _document(report: KernelReport) -> dict[str, Any]:
    return {
        "rows": [_row(row) for row in report.rows],
        "groups": [
            {
                **dict(zip(report.group_names, group.group, strict=True)),
                **{key: value for key, value in asdict(group).items() if key != "group"},
            }
            for group in report.groups
        ],
    }


def _row(row: ScoredKernel) -> dict[str, Any]:
    return {
        "row": row.row,
        "status": "predicted" if row.skipped is None else "skipped",
        "reason": None if row.skipped is None else row.skipped.sentence,
        "measured_seconds": row.measured_seconds,
        "predicted_seconds": row.predicted_seconds,
        "error_fraction": row.error_fraction,
        "counts": row.counts,
    }
