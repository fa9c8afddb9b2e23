"""`fsdpplan verify`: a finished run against its plan, with limits that decide the exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import fraction, path
from fsdpplan.cli.views.outcome import (
    QuantityJson,
    WaitsJson,
    comparison_table,
    row_document,
    waits_document,
    waits_words,
)
from fsdpplan.cli.views.render import blocks, columns, listed, table, tell, wrapped
from fsdpplan.errors import ErrorJson, GateFailed, error_document
from fsdpplan.files.plans import EstimateJson, LayoutJson, estimate_document, layout_document
from fsdpplan.run import verify as finished
from fsdpplan.run.compare import AxisComparison
from fsdpplan.run.verify import FinishedRun, Gate, Limits
from fsdpplan.units import format_gb, format_seconds, parse_bytes, parse_seconds

RunPlace = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's folder or its metrics file. Default: the newest in fsdpplan-runs.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Which plan, and what the run must keep to."""

    HEADING: ClassVar[str] = "Verify"

    plan_file: Annotated[
        Path | None,
        Flag(
            name="--plan",
            metavar="PATH",
            parse=path,
            help="The plan that it ran. Default: that of the script beside its metrics.",
        ),
    ] = None
    min_mfu: Annotated[
        float | None,
        Flag(metavar="40%", parse=fraction, help="Least MFU; exit 6 below it."),
    ] = None
    max_reserved: Annotated[
        int | None,
        Flag(
            metavar="75GiB",
            parse=parse_bytes,
            help="Most memory reserved on any GPU; exit 6 above it.",
        ),
    ] = None
    max_error: Annotated[
        float | None,
        Flag(
            metavar="15%",
            parse=fraction,
            help="Most that the predicted step time may be off; exit 6 above it.",
        ),
    ] = None
    min_overlap: Annotated[
        float | None,
        Flag(
            metavar="95%",
            parse=fraction,
            help="Least share of communication that is hidden in profiled steps; exit 6 below it.",
        ),
    ] = None
    max_idle: Annotated[
        float | None,
        Flag(
            metavar="100ms",
            parse=parse_seconds,
            help="Most of a profiled step in which no kernel runs; exit 6 above it.",
        ),
    ] = None


def verify(*, run: RunPlace = "", options: VerifyOptions, json: Json = False) -> None:
    """Compare a finished run with its plan; gates."""
    found = verified(run, options)
    failed = failure(found)
    if json:
        typer.echo(verified_json(found, failed))
    else:
        typer.echo(verified_screen(found, width=columns()))
    if failed is not None:
        tell(str(failed))
        raise typer.Exit(failed.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One run, and whether it kept to its limits."""

    run: FinishedRun
    gates: tuple[Gate, ...]


def verified(place: str, options: VerifyOptions) -> Verified:
    """The run that is asked for."""
    run = finished.finished_run(
        Path(place) if place else None, plan_file=options.plan_file, folder=Path.cwd()
    )
    limits = Limits(
        min_mfu_fraction=options.min_mfu,
        max_reserved_bytes=options.max_reserved,
        max_error_fraction=options.max_error,
        min_overlap_fraction=options.min_overlap,
        max_idle_seconds=options.max_idle,
    )
    return Verified(run=run, gates=finished.gates(run, limits))


def failure(found: Verified) -> GateFailed | None:
    """What is past its limit; None where nothing is."""
    failed = [gate.words for gate in found.gates if not gate.passed]
    if not failed:
        return None
    return GateFailed(
        f"{'; '.join(failed)}: fsdpplan explain shows what the plan counted on, or set another "
        "limit"
    )


class VerifyJson(WaitsJson):
    """What `verify --json` prints."""

    metrics: str
    """The file of the run."""
    plan_sha256: str
    layout: LayoutJson
    predicted: EstimateJson
    measured: dict[str, float | None]
    """By quantity, and the `steps` that were measured."""
    comparison: list[QuantityJson]
    communication: list[Annotated[dict[str, Any], AxisComparison]]
    gates: list[Annotated[dict[str, Any], Gate]]
    warnings: list[str]
    error: NotRequired[ErrorJson]
    """Where a gate fails."""


def verified_json(found: Verified, failed: GateFailed | None) -> str:
    """What `verify --json` prints."""
    run = found.run
    rows = finished.comparison(run)
    waits = waits_document(finished.communication(run), run.measured.profiled)
    document: VerifyJson = {
        "metrics": str(run.metrics),
        "plan_sha256": run.plan_sha256,
        "layout": layout_document(run.plan.layout),
        "predicted": estimate_document(run.plan.estimate),
        "measured": {row.quantity: row.measured for row in rows}
        | {"steps": run.measured.measured_steps},
        "comparison": [row_document(row) for row in rows],
        "communication": [asdict(one) for one in finished.communication(run)],
        "overlap": waits["overlap"],
        "waits": waits["waits"],
        "idle_seconds": waits["idle_seconds"],
        "gates": [asdict(gate) for gate in found.gates],
        "warnings": list(run.notes),
    }
    if failed is not None:
        document["error"] = error_document(failed)
    return json.dumps(document, indent=2, allow_nan=False)


def verified_screen(found: Verified, *, width: int) -> str:
    """Predicted against measured, collective by collective where that is known, and the gates."""
    run = found.run
    rows = finished.comparison(run)
    inside = {True: "inside", False: "outside"}.get(bool(rows[0].inside_band), "")
    return blocks(
        wrapped(
            f"{run.plan.model.name} on {run.plan.cluster.gpus} x {run.plan.cluster.device.name}: "
            f"{run.metrics}",
            width=width,
        ),
        comparison_table(rows, width=width),
        _communication(finished.communication(run), width),
        waits_words(finished.communication(run), run.measured.profiled, width=width),
        wrapped(
            f"The step time of {run.measured.measured_steps} steps is {inside} the 80 % band.",
            width=width,
        ),
        listed("Gates", (_gate_words(gate) for gate in found.gates), width=width),
        listed("Warnings", run.notes, width=width),
    )


def _gate_words(gate: Gate) -> str:
    flag = "--" + gate.name.replace("_", "-")
    return f"{flag}: passed" if gate.passed else f"{flag}: FAILED: {gate.words}"


def _communication(rows: tuple[AxisComparison, ...], width: int) -> str:
    if not rows:
        return ""
    cells = [
        (
            f"{row.collective} over {row.axis}",
            _seconds(row.predicted_seconds),
            _seconds(None if row.measured is None else row.measured.seconds),
            _seconds(row.predicted_exposed_seconds),
            _seconds(None if row.measured is None else row.measured.exposed_seconds),
            ""
            if row.measured is None or row.measured.bytes is None
            else format_gb(row.measured.bytes),
        )
        for row in rows
    ]
    headers = ("a step", "predicted", "measured", "exposed: predicted", "measured", "volume")
    align = ("left", "right", "right", "right", "right", "right")
    return table(cells, headers=headers, align=align, width=width)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)
