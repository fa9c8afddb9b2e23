"""`fsdpplan replan`: a saved plan for more or fewer GPUs, for a run that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer

from fsdpplan.cli.options.files import DEFAULT_PLAN, EvidenceOptions, Json, PlanFile
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import ClusterOptions
from fsdpplan.cli.options.replan import ReplanOptions
from fsdpplan.cli.resolve.again import as_planned
from fsdpplan.cli.resolve.found import advised, best_of, plan_of, priced, searched
from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.resolve.other_gpus import cannot_keep, inputs_elsewhere, nearest_batch
from fsdpplan.cli.views.render import columns, note
from fsdpplan.cli.views.replan import Other, Replanned, replan_json, replan_screen
from fsdpplan.cli.views.unfit import nothing_fits
from fsdpplan.cost.reshard import moved
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.run.elastic import standing
from fsdpplan.run.plans import read_plan
from fsdpplan.spec.plan import Plan


def replan(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    options: ReplanOptions,
    cluster: ClusterOptions,
    layout: LayoutOptions,
    evidence: EvidenceOptions,
    json: Json = False,
) -> None:
    """Plan a saved plan again for more or fewer GPUs: a run goes on.

    The global batch and the schedule stay; what reading the checkpoint in the new layout takes is
    priced. The new plan is saved, for emit-launch and run.
    """
    if cluster.gpus is None and cluster.hardware is None:
        raise SpecError("replan is for other GPUs: say how many, such as --gpus 56")
    saved = read_plan(plan)

    def ask(batch: int | None = None) -> Inputs:
        return inputs_elsewhere(
            saved,
            options=options,
            cluster=cluster,
            layout=layout,
            evidence=evidence,
            global_batch=batch,
        )

    inputs = ask()
    found = searched(inputs)
    even = _even(inputs, ask)
    if not found.result.ranked and even is not None:
        raise NoFeasibleLayout(cannot_keep(inputs), rejected=dict(found.result.rejected))
    if not found.result.ranked:
        raise nothing_fits(inputs, found.result)
    inputs = advised(inputs, found)
    said = f"planned again from {plan}, which was for {saved.cluster.gpus} GPUs (replan)"
    inputs = replace(inputs, assumptions=(said, *inputs.assumptions))
    best = best_of(inputs, found)
    assert best is not None, "something fits"
    new = plan_of(inputs, found.result, found.result.ranked[0])
    before = priced(as_planned(saved, evidence), saved.layout)
    stands = None if options.checkpoint_dir is None else standing(options.checkpoint_dir, new)
    place = options.save or _beside(plan, new)
    if place.resolve() == Path(plan).resolve():
        raise SpecError(f"--save {place} would replace the plan itself: name another file")
    write_plan(new, place)
    answer = Replanned(
        inputs=inputs,
        before=before,
        after=best,
        other=even,
        moved=moved(
            before.case, best.case, saved_bytes=None if stands is None else stands.saved_bytes
        ),
        storage_bytes_per_second=options.storage_bw,
        standing=stands,
        place=str(place),
    )
    typer.echo(replan_json(answer) if json else replan_screen(answer, width=columns()))
    note(f"saved as {shlex.quote(str(place))}")


def _beside(plan: str, new: Plan) -> Path:
    place = Path(plan)
    return place.with_name(f"{place.stem}-{new.cluster.gpus}gpus.json")


def _even(inputs: Inputs, ask: Callable[[int], Inputs]) -> Other | None:
    """What the nearest batch that all GPUs share evenly would bring, where this one they do not."""
    gpus, batch = inputs.cluster.gpus, inputs.training.global_batch
    other = nearest_batch(batch, gpus)
    if other == batch:
        return None
    try:
        asked = ask(other)
        found = best_of(asked, searched(asked))
    except SpecError:  # of what else the plan fixed
        return None
    return None if found is None else Other(global_batch=other, priced=found)
