"""`fsdpplan explain`: what stands behind a saved plan: its terms, or its environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.failures import GoodputOptions, is_asked
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, LedgerOptions, PlanFile
from fsdpplan.cli.options.parse import whole
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout
from fsdpplan.cli.resolve.job import ranked
from fsdpplan.cli.resolve.torch import given_torch, settled_plan
from fsdpplan.cli.views.answer import NOTHING_MORE, estimate_json, goodput_said
from fsdpplan.cli.views.render import blocks, columns, facts, listed, tell, wrapped
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.cloud import CloudScript, Gap, cloud_scripts, gap_of
from fsdpplan.emit.nccl.environment import environment, left_unset
from fsdpplan.emit.nccl.rules import Variable
from fsdpplan.errors import SpecError
from fsdpplan.search.pins import Pins
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import Plan


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
    failures: GoodputOptions,
    ledger: LedgerOptions,
    json: Json = False,
) -> None:
    """Explain a plan: its terms, or by --nccl its environment."""
    chosen = ranked(plan, options.rank, own_program=True)
    settled = settled_plan(chosen, given_torch(options.torch), own_program=False)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    said = goodput_said(_one_layout(chosen), failures, ledger, width=columns())
    if options.nccl and is_asked(failures):
        raise SpecError(
            "--nccl shows the environment of the job, which failures do not change: leave it out, "
            "or the options of failures"
        )
    if options.nccl:
        text = nccl_json(chosen) if json else nccl_screen(chosen, width=columns())
    elif json:
        text = terms_json(chosen, more=said.document)
    else:
        text = blocks(terms_screen(chosen, width=columns()), said.screen)
    typer.echo(text)


def terms_screen(plan: Plan, *, width: int) -> str:
    """Time, memory and communication of the plan, and where each of its inputs came from."""
    return blocks(
        estimate_screen(_one_layout(plan), width=width),
        listed("Where the inputs came from", _sources(plan), width=width),
    )


def _sources(plan: Plan) -> list[str]:
    """One sentence a source, with all that came from it."""
    fields: dict[str, list[str]] = {}
    for field, source in plan.sources:
        fields.setdefault(source, []).append(field)
    return [f"{', '.join(names)}: {source}" for source, names in fields.items()]


def terms_json(plan: Plan, *, more: Mapping[str, Any] = NOTHING_MORE) -> str:
    """The same fields as `estimate --json`, and `more`."""
    return estimate_json(_one_layout(plan), more=more)


def _one_layout(plan: Plan) -> OneLayout:
    inputs = Inputs(
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        pins=Pins(),
        sources=plan.sources,
        assumptions=plan.assumptions,
        warnings=plan.warnings,
        failures=plan.failures,
    )
    return OneLayout(
        inputs=inputs,
        layout=plan.layout,
        estimate=plan.estimate,
        available_bytes=available_bytes(cluster=plan.cluster, training=plan.training),
    )


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
