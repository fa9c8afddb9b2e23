"""What the commands do, from Python: `import fsdpplan` has these functions and the nouns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fsdpplan.answers import (
    Bill,
    Check,
    Comparison,
    Goodput,
    Point,
    Replanned,
    Rules,
    Sensitivities,
    Sweep,
    WhatIf,
    Why,
    like,
)
from fsdpplan.cost.bill import bill as bill_of
from fsdpplan.cost.estimate import estimate as predicted
from fsdpplan.cost.goodput import goodput as goodput_of
from fsdpplan.cost.reshard import moved
from fsdpplan.emit.job import Job
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files import catalogue, clusters
from fsdpplan.files.huggingface.config import read_hf_config
from fsdpplan.files.plans import write_plan
from fsdpplan.files.prices import price_of
from fsdpplan.run.known import known_draw, known_reliability, with_best_interval
from fsdpplan.run.launch import launch_text
from fsdpplan.run.plans import new_plan, read_plan
from fsdpplan.search.advice.difference import Priced, kept_layout
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.search.advice.measurement import measurements
from fsdpplan.search.advice.sensitivity import sensitivities as sensitivities_of
from fsdpplan.search.advice.why import Wanted
from fsdpplan.search.advice.why import why as why_of
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend as ranked_layouts
from fsdpplan.search.rules.legality import legal_layout_problem, question_problem
from fsdpplan.search.scaling import fits_at_all, node_counts
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Draw, Estimate, Failures, Plan, Terms
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import require_positive, require_positive_int
from fsdpplan.topology.probe import default_torch
from fsdpplan.validate.calibrate.calibrated import measured_error
from fsdpplan.validate.check import lock as locks
from fsdpplan.validate.check.conditions import check as condition
from fsdpplan.validate.check.quantities import plan_quantities

MOST_GPUS = 4096
"""More are not looked at by `min_gpus`."""


def load_model(name: str | Path) -> Model:
    """A model of the catalogue by its name, or of a Hugging Face `config.json` by its path.

    Raises SpecError, with the nearest names.
    """
    if isinstance(name, Path) or name.endswith(".json"):
        return read_hf_config(name).model
    return catalogue.load_model(name)


def load_cluster(hardware: str | Path, *, gpus: int | None = None, **flags: Any) -> Cluster:
    """`gpus` devices of a hardware profile, by name or path; all that it has if None.

    `flags` lie over it: `gpus_per_node`, `domain_gpus` (of each NVLink domain that joins nodes),
    `device`, `host_memory_bytes` (of a node), `intra_bandwidth_bytes_per_second` and
    `inter_bandwidth_bytes_per_second`, per GPU and one direction. Raises ProfileNotFound, with the
    nearest names, and SpecError for a size that the machines cannot have.
    """
    return clusters.load_cluster(str(hardware), gpus=gpus, **flags).cluster


def recommend(model: Model, cluster: Cluster, training: Training, **pins: Any) -> Plan:
    """The best plan, with its runners-up as `alternatives`.

    `pins` fix parts of the layout by the names of its fields: `tp=8`, `sharding="fsdp"`. Without
    `training.torch` the plan is for the PyTorch installed here, or else for the newest that was
    tested. Past runs are not asked. Raises SpecError for what no layout can obey, NoFeasibleLayout
    where none fits.
    """
    fixed, training = Pins(**pins), _with_torch(training)
    problem = question_problem(model=model, cluster=cluster, training=training, pins=fixed)
    if problem is not None:
        raise SpecError(problem)
    found = ranked_layouts(model=model, cluster=cluster, training=training, pins=fixed)
    if not found.ranked:
        raise NoFeasibleLayout(
            f"no layout of {model.name} on {cluster.gpus} x {cluster.device.name} fits: use more "
            "GPUs, other pins or a smaller batch; `fsdpplan recommend` says what is nearest",
            rejected=dict(found.rejected),
        )
    return new_plan(
        model=model,
        cluster=cluster,
        training=training,
        chosen=found.ranked[0],
        ranked=found.ranked,
    )


def _with_torch(training: Training) -> Training:
    """`training` under the release of PyTorch that commands take, too, where none is said."""
    return training if training.torch else replace(training, torch=str(default_torch()))


def estimate(model: Model, cluster: Cluster, training: Training, layout: Layout) -> Estimate:
    """Time, memory and communication of one layout. Raises SpecError where it is not legal."""
    case = Case(model=model, cluster=cluster, training=_with_torch(training), layout=layout)
    problem = legal_layout_problem(case)
    if problem is not None:
        raise SpecError(problem)
    return predicted(case)


def emit_launch(
    plan: Plan, target: Target = "slurm", *, job: Job | None = None, pods: Pods | None = None
) -> str:
    """The text that launches `plan`: the job script, or what another target takes.

    `job` is what is asked of the scheduler and the program, `pods` of Kubernetes. A program that
    saves, and is not told how often, does so as often as keeps most (`goodput`). Raises SpecError
    for what the target cannot express.
    """
    settled, _ = with_best_interval(job or Job(), plan, target=target)
    return launch_text(target, plan=plan, job=settled, pods=pods)


def load_plan(path: str | Path) -> Plan:
    """The plan of a file. Raises SpecError where it is not sound."""
    return read_plan(path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` as JSON, whole or not at all: what `emit-launch`, `run` and `explain` read.
    Raises SpecError where it cannot be written."""
    write_plan(plan, path)


def min_gpus(model: Model, hardware: str | Path, training: Training, **pins: Any) -> Plan:
    """The best plan on the fewest GPUs of a profile on which a layout fits: equal parts of a node,
    then whole nodes, each tried from below.

    Raises NoFeasibleLayout where none up to 4,096 does.
    """
    node = load_cluster(hardware).gpus_per_node
    for gpus in node_counts(node, most=MOST_GPUS):
        cluster, fixed = load_cluster(hardware, gpus=gpus), Pins(**pins)
        if question_problem(model=model, cluster=cluster, training=training, pins=fixed):
            continue
        asked = Question(model=model, cluster=cluster, training=training, pins=fixed, learner=None)
        if fits_at_all(asked):
            return recommend(model, cluster, training, **pins)
    raise NoFeasibleLayout(
        f"no layout of {model.name} fits on up to {MOST_GPUS:,} GPUs of {hardware}: take GPUs with "
        "more memory, or fix less of the layout",
        rejected={},
    )


def compare(before: Plan, after: Plan) -> Comparison:
    """Two plans side by side, both predicted again by this version: terms, and whether they can be
    told apart."""
    return Comparison(before=_priced(before.case), after=_priced(after.case))


def what_if(
    plan: Plan,
    *,
    model: Model | None = None,
    cluster: Cluster | None = None,
    training: Training | None = None,
    gpus: int | None = None,
    **pins: Any,
) -> WhatIf:
    """A plan under other inputs: its own layout then, and the best one. `gpus` are as many of the
    profile that its machines are of. Raises SpecError for inputs that no layout can obey; where
    nothing fits, that is an answer."""
    machines = _machines(plan, gpus) if cluster is None else cluster
    asked = replace(plan.case, cluster=machines)
    asked = replace(asked, model=model or plan.model, training=training or plan.training)
    kept = kept_layout(plan.case, asked)
    same = None if kept.layout is None else _priced(replace(asked, layout=kept.layout))
    try:
        best = recommend(asked.model, asked.cluster, asked.training, **pins)
    except NoFeasibleLayout:
        best = None
    return WhatIf(before=_priced(plan.case), same=same, same_problem=kept.problem, best=best)


def sweep(
    model: Model,
    hardware: str | Path,
    training: Training,
    *,
    gpus: Iterable[int],
    scaling: Literal["strong", "weak"] = "strong",
    **pins: Any,
) -> Sweep:
    """The best plan on each number of GPUs. `strong`: the global batch stays; `weak`: it is that of
    the most GPUs, and the others have their share. Raises nothing for a number that cannot be
    planned: its point says why."""
    numbers = sorted(set(gpus))
    points = []
    for number in numbers:
        batch = training.global_batch
        if scaling == "weak":
            batch, left = divmod(batch * number, numbers[-1])
            if left or not batch:
                problem = f"no whole share of {training.global_batch} sequences"
                points.append(Point(gpus=number, plan=None, problem=problem))
                continue
        try:
            cluster = load_cluster(hardware, gpus=number)
            plan = recommend(model, cluster, replace(training, global_batch=batch), **pins)
        except (SpecError, NoFeasibleLayout) as error:
            points.append(Point(gpus=number, plan=None, problem=str(error)))
        else:
            points.append(Point(gpus=number, plan=plan))
    return Sweep(name=f"{model.name} on {hardware}, {scaling} scaling", points=tuple(points))


def replan(
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    **pins: Any,
) -> Replanned:
    """A plan for more or fewer GPUs that keeps the global batch, and so the schedule: a run of the
    old one goes on from its checkpoint. Raises NoFeasibleLayout where no layout keeps it: give
    another `global_batch`."""
    machines = _machines(plan, gpus) if cluster is None else cluster
    training = replace(plan.training, global_batch=global_batch or plan.training.global_batch)
    new = recommend(plan.model, machines, training, **pins)
    return Replanned(before=_priced(plan.case), plan=new, moved=moved(plan.case, new.case))


def check(
    plan: Plan, *conditions: str, lock: str | Path | None = None, write_lock: bool = False
) -> Check:
    """Hold a plan against conditions such as "mfu >= 0.38 and peak_reserved <= 72GiB", and against
    its lock. `write_lock` writes that anew where the conditions hold. Raises SpecError for a
    condition or a lock that cannot be read; one that does not hold is an answer."""
    quantities = plan_quantities(plan)
    held = tuple(condition(text, quantities) for text in conditions)
    if lock is None:
        return Check(conditions=held, differs=())
    from fsdpplan.run.detect import software_here  # asks the machine, where there is a lock

    place, now = Path(lock), locks.locked(plan, software_here())
    if write_lock and all(one.holds for one in held):
        locks.write_lock(now, place)
    return Check(conditions=held, differs=locks.lock_differences(locks.read_lock(place), now))


def why(
    plan: Plan,
    *,
    pins: Mapping[str, Any] | None = None,
    split: Iterable[str] = (),
    **wanted: Any,
) -> Why:
    """Why not a layout that has what is `wanted` (`tp=4`, `activation_checkpointing="none"`), or
    more than one rank on each axis of `split`; and where it would be recommended, each input by
    itself. `pins` fix the rest of both. It searches many times: fewer layouts are faster.

    Raises NoFeasibleLayout where nothing fits, SpecError where nothing is wanted.
    """
    axes = tuple(axis for axis in split if axis not in wanted)
    words = [f"{name} {value}" for name, value in wanted.items()] + [f"{axis} > 1" for axis in axes]
    if not words:
        raise SpecError('nothing is wanted: say a part of a layout, such as tp=4 or split=("tp",)')
    if unknown := [axis for axis in axes if axis not in MESH_AXES and axis != "ep"]:
        raise SpecError(f"split: {unknown[0]!r} is no axis: use {', '.join(MESH_AXES)} or ep")
    asked_for = Wanted(words=", ".join(words), pins=Pins(**wanted), split=axes)
    asked = Question(
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        pins=asked_for.freed(Pins(**(pins or {}))),
        learner=None,
    )
    found = why_of(
        asked, asked_for, resized=lambda gpus: _machines(plan, gpus), say=lambda words: None
    )
    if found is None:
        raise NoFeasibleLayout(
            f"no layout of {plan.model.name} fits on {plan.cluster.gpus} x "
            f"{plan.cluster.device.name}: use more GPUs, or fix less of the layout",
            rejected={},
        )
    return like(Why, found)


def sensitivities(plan: Plan) -> Sensitivities:
    """How the step and the peak of the plan's layout follow each input, from both sides, and what
    deserves to be measured."""
    case = plan.case
    error = case.cluster.device.error
    measured = measured_error() if case.cluster.device.kind == "cuda" else error
    return Sensitivities(
        case=case,
        found=sensitivities_of(case, resized=lambda gpus: _machines(plan, gpus)),
        measurements=measurements(case, measured=measured),
    )


def bill(
    plan: Plan,
    *,
    tokens: int | None = None,
    price: float | None = None,
    provider: str | None = None,
    node_watts: float | None = None,
    pue: float | None = None,
    co2_grams_per_kwh: float | None = None,
    deadline_seconds: float | None = None,
) -> Bill:
    """What a training on `tokens` takes; what is None is as the plan says.

    `price` is of a GPU hour; `provider` names one of the table in its place. Any of `node_watts`,
    `pue` and `co2_grams_per_kwh` asks for the energy.

    Raises SpecError where tokens, price or power are not known.
    """
    if price is not None and provider is not None:
        raise SpecError("price and provider contradict each other: give one of them")
    if provider is not None:
        price = price_of(provider, plan.cluster.device.name).usd_per_gpu_hour
    known = plan.terms or Terms()
    draw = known.draw
    if node_watts is not None:
        draw = Draw(node_watts=node_watts)
    elif draw is None and (pue is not None or co2_grams_per_kwh is not None):
        draw, _ = known_draw(plan.cluster)
    for name, value in {
        "price": price,
        "node_watts": node_watts,
        "deadline_seconds": deadline_seconds,
    }.items():
        if value is not None:
            require_positive(**{name: value})
    if pue is not None and not 1 <= pue < 10:
        raise SpecError(f"pue must be at least 1 and below 10, not {pue!r}")
    if co2_grams_per_kwh is not None and not 0 <= co2_grams_per_kwh < 10_000:
        raise SpecError(
            f"co2_grams_per_kwh must be at least 0 and below 10000, not {co2_grams_per_kwh!r}"
        )
    typed: dict[str, Any] = {
        "price": price,
        "draw": draw,
        "pue": pue,
        "co2_grams_per_kwh": co2_grams_per_kwh,
        "deadline_seconds": deadline_seconds,
    }
    terms = replace(known, **{name: one for name, one in typed.items() if one is not None})
    training = replace(plan.training, tokens=plan.training.tokens if tokens is None else tokens)
    found = bill_of(replace(plan.case, training=training), plan.estimate, terms)
    if found is None:
        raise SpecError("a bill is of a whole training: say its tokens, such as tokens=2 * 10**12")
    return like(Bill, found, terms=terms)


def goodput(
    plan: Plan,
    *,
    every_steps: int | None = None,
    in_background: bool = True,
    **failures: float,
) -> Goodput:
    """What failures leave of the time of a run that saves each `every_steps`, by default as often
    as keeps most. `failures` lie over what the plan knows: `gpu_mtbf_seconds`,
    `node_mtbf_seconds`, `storage_bytes_per_second`, `restart_seconds`, `requeue_seconds`; what
    nobody said is as published.

    Raises SpecError where nobody has published how such machines fail.
    """
    if every_steps is not None:
        require_positive_int(every_steps=every_steps)
    known = known_reliability(
        plan.cluster,
        replace(plan.failures or Failures(), **failures),
        in_background=in_background,
    )
    found = goodput_of(plan.case, plan.estimate, known.value, every_steps=every_steps)
    return like(Goodput, found, reliability=known.value, sources=known.sources)


def rules(plan: Plan) -> Rules:
    """The rules of the field that the plan breaks, by this version: each with its number, its
    source and what to do."""
    return Rules(broken=broken_rules(plan.case, plan.estimate))


def _priced(case: Case) -> Priced:
    return Priced(case=case, estimate=predicted(case))


def _machines(plan: Plan, gpus: int | None) -> Cluster:
    """As many GPUs of the profile that the plan's machines are of."""
    if gpus is None or gpus == plan.cluster.gpus:
        return plan.cluster
    name = plan.cluster.name
    if load_cluster(name, gpus=plan.cluster.gpus) != plan.cluster:
        raise SpecError(
            f"the plan's machines are not those of profile {name} as it is: give cluster= in place "
            "of gpus="
        )
    return load_cluster(name, gpus=gpus)
