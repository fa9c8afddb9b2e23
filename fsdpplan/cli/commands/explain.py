"""`fsdpplan explain`: what stands behind a saved plan: its terms, or its environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, PlanFile
from fsdpplan.cli.options.parse import whole
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout
from fsdpplan.cli.resolve.job import ranked
from fsdpplan.cli.resolve.torch import given_torch, settled_plan
from fsdpplan.cli.views.answer import estimate_json
from fsdpplan.cli.views.render import blocks, columns, facts, listed, tell, wrapped
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.cloud import CloudScript, Gap, cloud_scripts, gap_of
from fsdpplan.emit.nccl.environment import environment, left_unset
from fsdpplan.emit.nccl.rules import Variable
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import rules_document
from fsdpplan.search.advice.field_rules import RULES, broken_rules
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


def explain(*, plan: PlanFile = DEFAULT_PLAN, options: ExplainOptions, json: Json = False) -> None:
    """Explain a plan: its terms, or by --nccl its environment.

    By --rules: the rules of the field that it breaks.
    """
    if options.nccl and options.rules:
        raise SpecError("--nccl and --rules are of different pages: give one of them")
    chosen = ranked(plan, options.rank, own_program=True)
    settled = settled_plan(chosen, given_torch(options.torch), own_program=False)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    if options.rules:
        text = rules_json(chosen) if json else rules_screen(chosen, width=columns())
    elif options.nccl:
        text = nccl_json(chosen) if json else nccl_screen(chosen, width=columns())
    elif json:
        text = terms_json(chosen)
    else:
        text = terms_screen(chosen, width=columns())
    typer.echo(text)


def terms_screen(plan: Plan, *, width: int) -> str:
    """Time, memory and communication of the plan, and where each of its inputs came from."""
    return blocks(
        estimate_screen(_one_layout(plan), width=width, rest="--rules has all"),
        listed("Where the inputs came from", _sources(plan), width=width),
    )


def _sources(plan: Plan) -> list[str]:
    """One sentence a source, with all that came from it."""
    fields: dict[str, list[str]] = {}
    for field, source in plan.sources:
        fields.setdefault(source, []).append(field)
    return [f"{', '.join(names)}: {source}" for source, names in fields.items()]


def terms_json(plan: Plan) -> str:
    """The same fields as `estimate --json`."""
    return estimate_json(_one_layout(plan))


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
