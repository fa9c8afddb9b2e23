"""`fsdpplan trace`: a plan's predicted step as a trace, beside a measured one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json, PlanFile, PlanNamed, plan_place
from fsdpplan.cli.options.parse import path, whole
from fsdpplan.cli.resolve.job import ranked
from fsdpplan.cli.views.render import columns
from fsdpplan.cli.views.trace import (
    Written,
    overlay_json,
    overlay_screen,
    written_json,
    written_screen,
)
from fsdpplan.cost.timeline.timeline import DETAILED_MICROBATCHES, step_timeline
from fsdpplan.errors import SpecError
from fsdpplan.files.traces import read_trace, write_trace
from fsdpplan.files.writing import require_place
from fsdpplan.run.trace.chrome import trace_document
from fsdpplan.run.trace.overlay import axis_groups, overlaid, overlay_document
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is written, and what it is laid over."""

    HEADING: ClassVar[str] = "Trace"

    named: PlanNamed = None
    out: Annotated[
        Path | None,
        Flag(
            name="--out",
            metavar="FILE",
            parse=path,
            help="Write trace-event JSON there, which ui.perfetto.dev opens; compressed where the "
            "name ends in .gz. With --overlay both steps, on one time axis.",
        ),
    ] = None
    overlay: Annotated[
        Path | None,
        Flag(
            name="--overlay",
            metavar="FILE",
            parse=path,
            help="A trace of torch.profiler, also .gz, such as a run's trace-rank-0.json: where it "
            "and the plan differ most, and which input would explain it.",
        ),
    ] = None
    rank: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=0, least=0),
            help="Whose trace that is, counted from 0. Default: what it says, else 0.",
        ),
    ] = None
    microbatches: Annotated[
        int | None,
        Flag(
            name="--micro-batches",
            metavar="N",
            parse=whole(example=8),
            help=f"Show so many kernel by kernel, and the last one; the others pass by pass. "
            f"Default: {DETAILED_MICROBATCHES}.",
        ),
    ] = None


def trace(*, plan: PlanFile = "", options: TraceOptions, json: Json = False) -> None:
    """The predicted step as a trace, beside a measured one.

    One rank of each pipeline stage: kernels, collectives with bytes and groups, waits, memory.
    """
    if options.out is None and options.overlay is None:
        raise SpecError(
            "trace writes or compares: give --out plan.trace.json, or --overlay with a trace of "
            "torch.profiler"
        )
    if options.rank is not None and options.overlay is None:
        raise SpecError("--rank says whose trace --overlay is: give both, or leave it out")
    if options.microbatches is not None and options.overlay is not None:
        raise SpecError(
            "--overlay shows every micro-batch kernel by kernel: leave out --micro-batches"
        )
    if options.out is not None:
        require_place(options.out, advice="choose another --out")
    saved = ranked(plan_place(plan, options.named), None, own_program=True)
    share, case = max(saved.case.phases, key=lambda phase: phase[0])  # the part with most steps
    if options.overlay is None:
        assert options.out is not None
        written = _write(
            case,
            options.out,
            options.microbatches,
            share=share,
            expected_seconds=saved.estimate.step_seconds.expected,
        )
        typer.echo(written_json(written) if json else written_screen(written, width=columns()))
        return
    measured = read_trace(options.overlay)
    found = overlaid(case, measured, rank=options.rank, say=working.say)
    if options.out is not None:
        write_trace(options.out, overlay_document(found, case, measured))
    if json:
        typer.echo(overlay_json(found, options.out))
    else:
        typer.echo(overlay_screen(found, options.out, width=columns()))


def _write(
    case: Case, out: Path, microbatches: int | None, *, share: float, expected_seconds: float
) -> Written:
    shown = DETAILED_MICROBATCHES if microbatches is None else microbatches
    timeline = step_timeline(case, detailed=shown)
    document = trace_document(
        timeline, case.layout, name=out.name, groups=axis_groups(case, timeline.rank)
    )
    size = write_trace(out, document)
    return Written(
        out=out,
        size_bytes=size,
        events=len(document["traceEvents"]),
        timeline=timeline,
        case=case,
        shown_microbatches=min(shown, case.layout.num_microbatches),
        share=share,
        expected_seconds=expected_seconds,
    )
