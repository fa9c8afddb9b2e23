"""`fsdpplan what-if`: a saved plan under other inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import (
    DEFAULT_PLAN,
    EvidenceOptions,
    Json,
    PlanFile,
)
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.parse import fraction, path
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.resolve.again import (
    Asked,
    as_planned,
    asked_again,
    is_changed,
    machines_by_number,
)
from fsdpplan.cli.resolve.found import advised, best_of, fits, plan_of, priced, searched
from fsdpplan.cli.resolve.gains import Trial, changes_that_gain
from fsdpplan.cli.resolve.inputs import Inputs, case_of
from fsdpplan.cli.views.difference import WhatIf, what_if_json, what_if_screen
from fsdpplan.cli.views.gains import Gains, gains_json, gains_screen
from fsdpplan.cli.views.render import columns, note, tell
from fsdpplan.cli.views.sensitivity import Followed, sensitivity_json, sensitivity_screen
from fsdpplan.cli.views.unfit import nothing_fits
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.run.plans import read_plan
from fsdpplan.search.advice.difference import Priced, kept_layout
from fsdpplan.search.advice.measurement import measurements
from fsdpplan.search.advice.sensitivity import sensitivities
from fsdpplan.spec.plan import Plan
from fsdpplan.validate.calibrate.calibrated import measured_error

NOT_SAVED = "PLAN"
"""What stands for the best layout under other inputs, which is no saved plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """What else of the plan may change, and where the best is saved."""

    HEADING: ClassVar[str] = "What if"

    free: Annotated[
        bool | None,
        Flag(name="--free", help="Search what the plan fixed of its layout, too."),
    ] = None
    save: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help="Save the best layout then as a plan. Default: nothing is written.",
        ),
    ] = None
    sensitivities: Annotated[
        bool | None,
        Flag(
            name="--sensitivities",
            help="What 1 % of each input changes, and what most deserves a measurement: of the "
            "plan, or of the best layout under other inputs.",
        ),
    ] = None
    gain: Annotated[
        float | None,
        Flag(
            metavar="10%",
            parse=fraction,
            help="What brings so many more tokens a second, the cheapest first: settings, then "
            "hardware; each is planned again.",
        ),
    ] = None


def what_if(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    options: WhatIfOptions,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    json: Json = False,
) -> None:
    """A saved plan under other inputs: what changes, by terms.

    The plan's own layout under them, and the best one then. Exit code 3 where nothing fits then.
    """
    _refuse_contradictions(options)
    saved = read_plan(plan)
    asked = Asked(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
        free=bool(options.free),
    )
    if options.sensitivities:
        followed = _followed(saved, asked, plan)
        if json:
            typer.echo(sensitivity_json(followed))
            return
        screen = sensitivity_screen(followed, width=columns())
        typer.echo(screen)
        return
    if options.gain is not None:
        gains = _gains(saved, asked, plan, options.gain)
        screen = gains_screen(gains, width=columns()) if not json else ""
        typer.echo(screen or gains_json(gains))
        return
    now, then = as_planned(saved, evidence), asked_again(saved, asked)
    found = searched(then)
    if found.result.ranked:
        then = advised(then, found)
    before = priced(now, saved.layout)
    kept = kept_layout(before.case, case_of(then, saved.layout))
    same = None if kept.layout is None else priced(then, kept.layout)
    answer = WhatIf(
        inputs=then,
        before=before,
        same=same,
        same_problem=kept.problem or _too_large(same, then),
        best=best_of(then, found),
    )
    if json:
        typer.echo(what_if_json(answer))
    else:
        screen = what_if_screen(answer, width=columns())
        typer.echo(screen)
    if not found.result.ranked:
        tell(str(nothing_fits(then, found.result)))
        raise typer.Exit(NoFeasibleLayout.exit_code)
    if options.save is not None:
        write_plan(plan_of(then, found.result, found.result.ranked[0]), options.save)
        note(f"saved as {options.save}")


def _refuse_contradictions(options: WhatIfOptions) -> None:
    if options.sensitivities and options.gain is not None:
        raise SpecError("--sensitivities and --gain are two answers: give one of them")
    given = "--sensitivities" if options.sensitivities else "--gain"
    if (options.sensitivities or options.gain is not None) and options.save is not None:
        raise SpecError(f"{given} saves no plan: leave --save out")
    if options.gain == 0:
        raise SpecError("--gain asks for more than nothing: type such as --gain 10%")


def _followed(saved: Plan, asked: Asked, place: str) -> Followed:
    """What the plan follows, or what the best layout does under other inputs."""
    inputs, subject = _subject(saved, asked)
    error = inputs.cluster.device.error
    # CPU processes keep their errors, whatever is measured
    measured = measured_error() if inputs.cluster.device.kind == "cuda" else error
    return Followed(
        inputs=inputs,
        subject=subject,
        found=sensitivities(subject.case, resized=machines_by_number(saved, asked.cluster)),
        measurements=measurements(
            subject.case, measured=measured, told_stack=inputs.learner is not None
        ),
        plan=NOT_SAVED if is_changed(asked) else place,
    )


def _gains(saved: Plan, asked: Asked, place: str, gain_fraction: float) -> Gains:
    """What brings so much more."""
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        working.say(f"planning with {words}")

    _, before = _subject(saved, asked)
    trial = Trial(plan=saved, asked=asked, before=before, gain_fraction=gain_fraction, say=say)
    tried = changes_that_gain(trial)
    return Gains(
        plan=place,
        before=before,
        wanted_fraction=gain_fraction,
        tried=tried,
        searches=len(said),
    )


def _subject(saved: Plan, asked: Asked) -> tuple[Inputs, Priced]:
    """The plan as it is, or the best layout under other inputs. Raises NoFeasibleLayout where none
    fits then."""
    if not is_changed(asked):
        now = as_planned(saved, asked.evidence)
        return now, priced(now, saved.layout)
    then = asked_again(saved, asked)
    found = searched(then)
    best = best_of(then, found)
    if best is None:
        raise nothing_fits(then, found.result)
    return advised(then, found), best


def _too_large(same: Priced | None, inputs: Inputs) -> str:
    if same is None or fits(same):
        return ""
    return "it does not fit"
