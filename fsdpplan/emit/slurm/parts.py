"""The parts of a job script that are the same in every job: files of bash, in the folder `bash`,
and what each node runs of `fsdpplan.node`.

A job folder has those that its job needs as files, and its script calls them; a script that is one
file has them packed. What is switched off is in neither.
"""

from __future__ import annotations

from importlib.resources import files

from fsdpplan.emit.container import step_lines
from fsdpplan.emit.job import (
    MARGIN_SECONDS,
    STEPS_TO_LEAVE,
    Job,
    excluded_hosts,
    later_starts,
    requeues,
    saves_to,
    starts_again,
)
from fsdpplan.emit.nccl.adapters import adapter_words
from fsdpplan.emit.packed import packed_lines
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.emit.slurm.node_check import (
    NEAR_NAME,
    NODE_CHECK_NAME,
    binds,
    near_check,
    node_check,
)
from fsdpplan.spec.plan import Plan


def part_names(*, plan: Plan, job: Job) -> tuple[str, ...]:
    """The parts that a job needs, in their order."""
    needed = {
        "signals": True,
        "here": runs_here(plan),
        "check": True,
        "ranks": True,
        "left": True,
        "allocation": True,
        "records": True,
        "nodes": True,
        "meet": plan.cluster.nodes > 1,
        "pyxis": bool(step_lines(job.container, folder=job.folder)),
        "nccl": logs_nccl(plan=plan, job=job),
        "once": not starts_again(job),
        "again": starts_again(job),
        "requeue": requeues(job),
        "limit": heeds_limit(job),
        "watch": watches(job),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def part_text(name: str) -> str:
    """Text of a part. Its first line is for shellcheck, the second says what it does."""
    return (files("fsdpplan") / "emit" / "bash" / f"{name}.sh").read_text(encoding="utf-8")


def part_purpose(name: str) -> str:
    """What a part does, as the words after the name in its second line."""
    return part_text(name).split("\n")[1].partition(": ")[2].removesuffix(".")


def part_lines(*, plan: Plan, job: Job) -> list[str]:
    """Lines that call the parts of a job, from its folder or packed."""
    names = part_names(plan=plan, job=job)
    if job.folder is None:
        return packed_parts(names, plan=plan)
    width = max(map(len, names)) + len('. "$parts/.sh"')
    calls = ((f'. "$parts/{name}.sh"', part_purpose(name)) for name in names)
    programs = f'node_check=("$FSDPPLAN_JOB_FOLDER/{NODE_CHECK_NAME}") near=('
    return [
        "# How the job lives: these files are the same in every job.",
        'parts="$FSDPPLAN_JOB_FOLDER/parts"',
        programs + (f'"$FSDPPLAN_JOB_FOLDER/{NEAR_NAME}")' if binds(plan) else ")"),
        *(f"{call:{width}}  # {purpose}" for call, purpose in calls),
    ]


def packed_parts(names: tuple[str, ...], *, plan: Plan) -> list[str]:
    """Lines that carry parts and the programs of a node packed, and run them."""
    several = plan.cluster.nodes > 1
    near = f"(-c '{near_check()}')" if binds(plan) else "()"
    texts = [
        *("# ---- " + part_text(name).split("\n", 1)[1].removeprefix("# ") for name in names),
        "# ---- What a node looks for in itself.",
        f"node_check=(-c '{node_check(several=several)}')\n",
        "# ---- Whether it can keep ranks on the cores near their GPUs.",
        f"near={near}\n",
    ]
    purposes = [f"{name}: {part_purpose(name)}" for name in names]
    return packed_lines("\n".join(texts), contents=purposes)


def settings_lines(*, plan: Plan, job: Job) -> list[str]:
    """Lines that set what the parts read, each with what it means."""
    settings = [
        (
            f"needed={plan.cluster.nodes} ranks={plan.cluster.gpus_per_node}"
            f" spares={job.survival.spares}",
            "nodes, ranks on each, nodes to spare",
        ),
        (
            f"retries={later_starts(job)} may_requeue={_yes(requeues(job))}",
            "starts after the first one, at most; whether Slurm may make them",
        ),
    ]
    if heeds_limit(job):
        settings.append((_leaving(job), "when it is told to save, before the time limit"))
    if plan.cluster.nodes > 1:
        given = "''" if job.port is None else str(job.port)
        settings.append((f"port={given}", "of the rendezvous; empty: by the job's number"))
    if logs_nccl(plan=plan, job=job):
        adapters = shell_word(adapter_words(plan) or "")
        expected = f"adapters={adapters} gpudirect={_yes(bool(plan.cluster.gpudirect))}"
        settings.append((expected, "what NCCL is to use between nodes"))
    settings += [
        (f"excluded={shell_word(' '.join(excluded_hosts(job)))}", "nodes that it must not get"),
        (f"saves_to={shell_word(saves_to(job) or '')}", "checkpoints"),
    ]
    return [
        "# What the plan and its options ask for.",
        *(f"{setting}  # {meaning}" for setting, meaning in settings),
    ]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "''"


def logs_nccl(*, plan: Plan, job: Job) -> bool:
    """Whether the job has NCCL say how it connects nodes: unless somebody has a log of his own."""
    own = job.nccl_debug is not None or any(name.startswith("NCCL_DEBUG") for name, _ in job.env)
    return plan.cluster.device.kind == "cuda" and plan.cluster.nodes > 1 and not own


def _leaving(job: Job) -> str:
    return (
        f"signal_seconds={job.signal_seconds or 0} save_seconds={job.save_seconds or 0}"
        f" steps_to_leave={STEPS_TO_LEAVE} margin_seconds={MARGIN_SECONDS}"
    )


def heeds_limit(job: Job) -> bool:
    """Whether something is done about the job's time limit."""
    return saves_to(job) is not None or job.signal_seconds is not None


def watches(job: Job) -> bool:
    """Whether another node watches the one that the job's script runs on."""
    return job.survival.spares > 0 and requeues(job)


def runs_here(plan: Plan) -> bool:
    """Whether the plan may run on one host that no scheduler stands behind."""
    return plan.cluster.nodes == 1 or plan.cluster.device.kind == "cpu"
