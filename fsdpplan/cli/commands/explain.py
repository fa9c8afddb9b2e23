"""`fsdpplan explain`: what stands behind a saved plan: its terms, its environment, or why not
another layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.failures import GoodputOptions, is_asked
from fsdpplan.cli.options.files import DEFAULT_PLAN, EvidenceOptions, Json, LedgerOptions, PlanFile
from fsdpplan.cli.options.parse import whole
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.options.wanted import offered, wanted
from fsdpplan.cli.resolve.again import as_planned, machines_of
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout, question_of
from fsdpplan.cli.resolve.job import ranked
from fsdpplan.cli.resolve.torch import given_torch, settled_plan
from fsdpplan.cli.views.answer import NOTHING_MORE, estimate_document_of, goodput_said
from fsdpplan.cli.views.explained import (
    Explanation,
    explained_document,
    explained_screen,
    runners_up,
)
from fsdpplan.cli.views.render import blocks, columns, facts, listed, tell, wrapped
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cli.views.why import why_json, why_screen
from fsdpplan.cost.explained import explained_step, learned_term
from fsdpplan.cost.explained_memory import explained_memory
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.cloud import CloudScript, Gap, cloud_scripts, gap_of
from fsdpplan.emit.nccl.environment import environment, left_unset
from fsdpplan.emit.nccl.rules import Variable
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import rules_document
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.field_rules import RULES, broken_rules
from fsdpplan.search.advice.why import Wanted, Why, why
from fsdpplan.search.pins import Pins
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import BrokenRule, Plan
from fsdpplan.units import format_gib, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Which layout of the plan, and what of it."""

    HEADING: ClassVar[str] = "Explain"

    nccl: Annotated[
        bool | None,
        Flag(
            name="--nccl",
            help="The variables that its job gets, with reason, versions and source, and those "
            "that are left alone.",
        ),
    ] = None
    why: Annotated[
        Wanted | None,
        Flag(
            name="--why",
            metavar="WORDS",
            parse=wanted,
            help='Why not a layout with this, such as "tp 4", "pp 2 ep 8", hsdp, "no recompute" or '
            "micro_batch=2: the best that has it, the terms that lost it, and what each input by "
            "itself would have to be for it to be recommended.",
            offered=offered,
        ),
    ] = None
    rules: Annotated[
        bool | None,
        Flag(
            name="--rules",
            help="All rules of the field that it breaks: number, limit, source, what to do.",
        ),
    ] = None
    torch: Torch = None
    rank: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Another layout of the plan's list."),
    ] = None


ANY_JOB = Job()
"""No option of a job changes what the topology gives reasons for."""


def explain(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    options: ExplainOptions,
    evidence: EvidenceOptions,
    failures: GoodputOptions,
    json: Json = False,
) -> None:
    """Explain a plan: its terms, its environment, or why not another.

    By --nccl its environment, by --why another layout, by --rules the rules of the field that it
    breaks.
    """
    _require_one(options, failures)
    chosen = ranked(plan, options.rank, own_program=True)
    _require_use(options, evidence, has_failures=is_asked(failures) or chosen.failures is not None)
    settled = settled_plan(chosen, given_torch(options.torch), own_program=False)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    if options.why is not None:
        text = why_text(chosen, options.why, evidence, as_json=json)
    elif options.rules:
        text = rules_json(chosen) if json else rules_screen(chosen, width=columns())
    elif options.nccl:
        text = nccl_json(chosen) if json else nccl_screen(chosen, width=columns())
    else:
        said = goodput_said(_one_layout(chosen), failures, evidence, width=columns())
        text = (
            terms_json(chosen, more=said.document)
            if json
            else blocks(terms_screen(chosen, width=columns()), said.screen)
        )
    typer.echo(text)


def _require_one(options: ExplainOptions, failures: GoodputOptions) -> None:
    """Refuse options that contradict each other."""
    pages = {"--nccl": options.nccl, "--why": options.why is not None, "--rules": options.rules}
    asked = [name for name, given in pages.items() if given]
    if len(asked) > 1:
        raise SpecError(f"{asked[0]} and {asked[1]} are of different pages: give one of them")
    if asked and is_asked(failures):
        raise SpecError(
            f"{asked[0]} shows what failures do not change: leave it out, or their options"
        )
    if options.why is not None and options.rank is not None:
        raise SpecError(
            f"--rank {options.rank} and --why contradict each other: --why compares with what is "
            "recommended; leave one of them out"
        )


def _require_use(options: ExplainOptions, evidence: EvidenceOptions, *, has_failures: bool) -> None:
    """Refuse past runs where nothing is asked of them: a search learns from them, and of failures
    the ledger says how long saves took."""
    if options.why is not None:
        return
    is_shown = has_failures and not options.nccl and not options.rules
    used = {one.name for one in fields(LedgerOptions)} if is_shown else set()
    given = [one.name for one in fields(evidence) if getattr(evidence, one.name) is not None]
    if ignored := [name for name in given if name not in used]:
        raise SpecError(
            f"--{ignored[0].replace('_', '-')} is for --why, which searches: give both, or leave "
            "it out"
        )


def why_text(plan: Plan, asked_for: Wanted, evidence: EvidenceOptions, *, as_json: bool) -> str:
    """The answer to `--why`."""
    inputs = as_planned(plan, evidence)
    asked = question_of(inputs)
    answer = why(
        replace(asked, pins=asked_for.freed(asked.pins)),
        asked_for,
        resized=machines_of(plan, inputs),
        say=lambda what: working.say(f"searching: {what}"),
    )
    if answer is None:
        raise NoFeasibleLayout(
            f"no layout of {plan.model.name} fits on {plan.cluster.gpus} x "
            f"{plan.cluster.device.name} any more: plan again with fsdpplan recommend",
            rejected={},
        )
    return _why_text(answer, inputs, as_json=as_json)


def _why_text(answer: Why, inputs: Inputs, *, as_json: bool) -> str:
    return why_json(answer, inputs) if as_json else why_screen(answer, inputs, width=columns())


def terms_screen(plan: Plan, *, width: int) -> str:
    """The prediction, its terms with their formulas, and where each of its inputs came from."""
    return blocks(
        estimate_screen(_one_layout(plan), width=width, rest="--rules has all"),
        wrapped(_moved(plan), width=width),
        explained_screen(explanation(plan), width=width),
        listed("Where the inputs came from", _sources(plan), width=width),
    )


def explanation(plan: Plan) -> Explanation:
    """The terms of the plan's layout, and its runners-up."""
    learned = learned_term(plan.estimate)
    return Explanation(
        step=(*explained_step(plan.case), *learned),
        memory=explained_memory(plan.case),
        runners_up=runners_up(plan),
        chosen=Priced(case=plan.case, estimate=plan.estimate),
        reason=next((one.reason for one in plan.alternatives if one.layout == plan.layout), ""),
    )


def _moved(plan: Plan) -> str:
    """That a plan of another version was predicted otherwise; empty: it was not."""
    terms = explained_step(plan.case)
    today, then = sum(term.value for term in terms), plan.estimate.time.total_seconds
    if abs(today / then - 1) < LEAST_MOVE:
        return ""
    return (
        f"The plan was predicted by another version: {format_seconds(then)} a step, where the "
        f"terms below, of this version, add up to {format_seconds(today)}."
    )


LEAST_MOVE = 1e-6
"""Of a step: less is what rounding leaves."""


def _sources(plan: Plan) -> list[str]:
    """One sentence a source, with all that came from it."""
    fields: dict[str, list[str]] = {}
    for field, source in plan.sources:
        fields.setdefault(source, []).append(field)
    return [f"{', '.join(names)}: {source}" for source, names in fields.items()]


def terms_json(plan: Plan, *, more: Mapping[str, Any] = NOTHING_MORE) -> str:
    """The same fields as `estimate --json`, the terms with their formulas, and `more`."""
    document = {
        **estimate_document_of(_one_layout(plan), more=more),
        **explained_document(explanation(plan)),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _one_layout(plan: Plan) -> OneLayout:
    inputs = Inputs(
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        pins=Pins(),
        sources=plan.sources,
        assumptions=plan.assumptions,
        warnings=plan.warnings,
        rules=broken_rules(plan.case, plan.estimate),
        failures=plan.failures,
    )
    return OneLayout(
        inputs=inputs,
        layout=plan.layout,
        estimate=plan.estimate,
        available_bytes=available_bytes(cluster=plan.cluster, training=plan.training),
    )


def rules_screen(plan: Plan, *, width: int) -> str:
    """Every rule of the field that the plan breaks, the dearest first."""
    broken = broken_rules(plan.case, plan.estimate)
    if not broken:
        return f"It breaks none of the {len(RULES)} rules of the field."
    return blocks(*(_rule(one, width) for one in broken))


def _rule(one: BrokenRule, width: int) -> str:
    pairs = [("broken", one.says), ("do", one.advice)]
    if one.gain_seconds:
        pairs.append(("gain", f"{format_seconds(one.gain_seconds)} of a step for the same tokens"))
    if one.gain_bytes:
        pairs.append(("gain", f"{format_gib(one.gain_bytes)} of the fullest GPU"))
    if one.risks_run:
        pairs.append(("at risk", "the run, not its time"))
    pairs.append(("source", one.source))
    return f"{one.rule}\n{facts(pairs, width=width)}"


def rules_json(plan: Plan) -> str:
    """The same as the `rules` of a plan."""
    broken = broken_rules(plan.case, plan.estimate)
    return json.dumps({"rules": rules_document(broken)}, indent=2, allow_nan=False)


def nccl_screen(plan: Plan, *, width: int) -> str:
    """The variables of the plan's job, the cloud's scripts, and what is left alone."""
    variables = environment(plan=plan, job=ANY_JOB)
    unset = left_unset(plan=plan, job=ANY_JOB)
    gap = gap_of(plan, ANY_JOB)
    return blocks(
        wrapped(_known(plan), width=width),
        "" if gap is None else _gap(gap, width),
        *(_variable(variable, width) for variable in variables),
        *(_script(script, width) for script in cloud_scripts(plan)),
        listed(
            "Left alone on purpose",
            (f"{', '.join(item.names)}: {item.why}" for item in unset),
            width=width,
        ),
    )


def _known(plan: Plan) -> str:
    """What the advice rests on."""
    cluster, network = plan.cluster, plan.cluster.network
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.gpus_per_node}"
    by = "nothing known of their network"
    if network is not None:
        by = f"joined by {network.transport} ({network.evidence})"
    known = f"; {by}{_priced_path(cluster)}" if cluster.nodes > 1 else ""
    return f"Environment of {plan.model.name} on {nodes} x {cluster.device.name}{known}."


def _priced_path(cluster: Cluster) -> str:
    """How data gets from a GPU to another node, as the price of collectives counts it."""
    if cluster.gpudirect is None:
        return ""
    if cluster.gpudirect:
        return "; priced with GPUDirect: ports read device memory"
    between = [level for level in cluster.levels if cluster.joins_nodes(level)]
    without = [level.name for level in between if not level.gpudirect]
    over = f" over {', '.join(without)}" if len(without) < len(between) else ""
    return f"; priced without GPUDirect{over}: data passes through host memory"


def _gap(gap: Gap, width: int) -> str:
    """What the job lacks to use the network, and where to have it from."""
    what = f"{gap.what[0].upper()}{gap.what[1:]}"
    return blocks(
        wrapped(f"{what}.", width=width),
        listed("Still needed", gap.needs, width=width),
        wrapped(f"{gap.remedy}.", width=width),
    )


def _variable(variable: Variable, width: int) -> str:
    where = " (each node for itself)" if variable.on_node else ""
    pairs = (
        ("value", f"{variable.value}{where}"),
        ("reason", variable.reason),
        ("versions", variable.versions),
        ("source", variable.source),
    )
    return f"{variable.name}\n{facts(pairs, width=width)}"


def _script(script: CloudScript, width: int) -> str:
    pairs = (
        ("run", f"{script.path} (each node, {'always' if script.found else 'where it exists'})"),
        ("reason", script.reason),
        ("versions", script.versions),
        ("source", script.source),
    )
    return f"The cloud's own script\n{facts(pairs, width=width)}"


def nccl_json(plan: Plan) -> str:
    """What `explain --nccl --json` prints."""
    gap = gap_of(plan, ANY_JOB)
    return json.dumps(
        {
            "gpudirect": plan.cluster.gpudirect,
            "lacks": None if gap is None else asdict(gap),
            "variables": [
                {
                    "name": variable.name,
                    "value": variable.value,
                    "literal": not variable.expands,
                    "where": "node" if variable.on_node else "script",
                    "kind": variable.kind,
                    "reason": variable.reason,
                    "versions": variable.versions,
                    "source": variable.source,
                }
                for variable in environment(plan=plan, job=ANY_JOB)
            ],
            "scripts": [
                {
                    "path": script.path,
                    "reason": script.reason,
                    "versions": script.versions,
                    "source": script.source,
                    "required": script.found,
                }
                for script in cloud_scripts(plan)
            ],
            "left_unset": [
                {"names": list(item.names), "why": item.why, "source": item.source}
                for item in left_unset(plan=plan, job=ANY_JOB)
            ],
        },
        indent=2,
    )
