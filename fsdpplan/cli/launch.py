"""From a saved plan to its launch script."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.cli.job_options import JobOptions
from fsdpplan.cost.step import estimate
from fsdpplan.emit.alerts import alert_rules
from fsdpplan.emit.header import job_plan, plan_digest
from fsdpplan.emit.job import Job, excluded_hosts, left_out, trial_words
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target, render
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import carried_json, read_plan
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run.launch import require_program
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.host_list import compress_host_list
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.units import format_percent, format_seconds

OTHER_TRAINERS = frozenset({"torchtitan", "megatron", "accelerate"})
"""Targets whose program is neither fsdpplan's nor the user's."""
SAME_PYTHON = frozenset({"slurm", "ssh"})
"""Targets whose hosts see this one's Python, as far as anybody knows."""


def ranked(path: str, rank: int | None, *, own_program: bool) -> Plan:
    """The plan in a file, with another layout of its list where `rank` asks for one."""
    plan = saved_plan(path)
    if rank is not None:
        plan = _with_rank(plan, rank, path)
    if not plan.estimate.runnable and not own_program:
        raise SpecError(
            f"fsdpplan's own trainer is FSDP2's and cannot run {path}, which is for "
            f"{plan.training.traits.words}: give a program of yours with --script, or plan again "
            "with --runtime fsdp2"
        )
    return plan


def saved_plan(path: str) -> Plan:
    """The plan in a file, or what to type where there is none."""
    if not os.path.exists(Path(path)):
        raise SpecError(
            f"there is no plan {path}: type fsdpplan recommend --params 8e9 --gpus 8 first, which "
            f"saves one, or name another"
        )
    return read_plan(path)


def _with_rank(plan: Plan, rank: int, path: str) -> Plan:
    chosen = next((line for line in plan.alternatives if line.rank == rank), None)
    if chosen is None:
        raise SpecError(
            f"{path} has no rank {rank}: type --rank with one from 1 to {len(plan.alternatives)}"
        )
    return replace(plan, layout=chosen.layout, estimate=chosen.estimate)


def with_this_python(job: Job, *, given: JobOptions) -> Job:
    """`job`, run by the Python that runs this program: it has torch, `python3` on PATH may not.

    Unless a Python was named, lines that set up the environment will put theirs on PATH, or it is
    one in a container.
    """
    if given.python is not None or given.env_setup or job.container is not None:
        return job
    return replace(job, python=sys.executable)


def without_excluded(plan: Plan, job: Job) -> Plan:
    """`plan` as it is predicted where the job leaves weak nodes out; scripts carry no list."""
    out = [node for node in weak_nodes(plan.cluster) if node in excluded_hosts(job)]
    if not out:
        return plan
    cluster = without_nodes(plan.cluster, out)
    predicted = estimate(replace(plan.case, cluster=cluster))
    return replace(plan, cluster=cluster, estimate=predicted, alternatives=())


def price_of_weak_nodes(plan: Plan, job: Job) -> tuple[str, ...]:
    """Sentences on nodes that hold the others back: what it brings that some are left out, and
    what it costs that others are kept."""
    excluded = excluded_hosts(job)
    weak = weak_nodes(plan.cluster)
    out = tuple(node for node in weak if node in excluded)
    kept = tuple(node for node in weak if node not in excluded)
    without = without_nodes(plan.cluster, out)
    sentences = []
    if out:
        slow, fast = _step_seconds(plan, plan.cluster), _step_seconds(plan, without)
        sentences.append(
            f"without {_nodes(plan, out)} a step takes {format_seconds(fast)}; kept, "
            f"{'it' if len(out) == 1 else 'they'} would make it {_longer(slow, fast)}"
        )
    if kept:
        slow = _step_seconds(plan, without)
        fast = _step_seconds(plan, without_nodes(without, kept))
        sentences.append(
            f"keeping {_nodes(plan, kept)} makes a step {_longer(slow, fast)} in place of "
            f"{format_seconds(fast)}; --exclude {compress_host_list(kept)} takes other nodes"
        )
    return tuple(sentences)


def _nodes(plan: Plan, nodes: tuple[str, ...]) -> str:
    """The nodes, and what is weak about them."""
    texts = (spot.text for spot in plan.cluster.weak if set(spot.nodes) & {*nodes})
    return f"{compress_host_list(nodes)} ({'; '.join(dict.fromkeys(texts))})"


def _step_seconds(plan: Plan, cluster: Cluster) -> float:
    return estimate(replace(plan.case, cluster=cluster)).step_seconds.expected


def _longer(slow_seconds: float, fast_seconds: float) -> str:
    more = format_percent(slow_seconds / fast_seconds - 1)
    return f"{more} longer: {format_seconds(slow_seconds)}"


def trial_sentence(job: Job) -> str | None:
    """That the job is no more than a trial, and the options by which it would be."""
    words, options = trial_words(job), left_out(job)
    if words is None:
        return None
    listed = " and ".join(filter(None, (", ".join(options[:-1]), options[-1])))
    return f"the job {words}: {listed} {'says' if len(options) == 1 else 'say'} otherwise"


def write_alerts(path: Path, plan: Plan) -> None:
    """Write the plan's rules for Prometheus."""
    digest = plan_digest(carried_json(job_plan(plan)))
    write_text_atomically(path, alert_rules(plan, digest=digest), advice="choose another --alerts")


def emitted(target: Target, plan: Plan, job: Job, pods: Pods) -> str:
    """The text that launches `plan` at `target`."""
    if target not in OTHER_TRAINERS:
        require_program(plan, job)
    carried = job_plan(plan)
    order = Order(
        plan=carried, plan_json=carried_json(carried), job=job, version=__version__, pods=pods
    )
    return render(target, order)


def require_meaning(
    target: Target, *, out: Path | None, alerts: Path | None, rehearsed: bool
) -> None:
    """Refuse what a target has no use for."""
    if out is not None and target != "slurm":
        raise SpecError(
            f"--out writes a job folder for Slurm: leave it out for --target {target}, and put "
            "what is printed into a file"
        )
    if target not in OTHER_TRAINERS:
        return
    for flag, given in (("--rehearsed", rehearsed), ("--alerts", alerts is not None)):
        if given:
            raise SpecError(
                f"{flag} is about fsdpplan's own trainer, which --target {target} does not run: "
                "leave it out"
            )


def script_json(script: str, target: Target, plan: Plan, job: Job, out: Path | None) -> str:
    """What `emit-launch --json` prints."""
    return json.dumps(
        {
            "script": script,
            "target": target,
            "folder": None if out is None else os.path.abspath(out),
            "plan_sha256": plan_digest(carried_json(job_plan(plan))),
            "job_name": job.job_name,
            "nodes": plan.cluster.nodes,
            "ranks": plan.cluster.gpus,
        },
        indent=2,
    )
