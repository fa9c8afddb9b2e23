"""The parts of a job script that are the same in every job: files of bash, in the folder `bash`.

A job folder has those that its job needs as files, and its script sources them; a script that is
one file has their text. What is switched off is in neither.
"""

from __future__ import annotations

from importlib.resources import files

from fsdpplan.emit.job import (
    MARGIN_SECONDS,
    STEPS_TO_LEAVE,
    Job,
    later_starts,
    requeues,
    saves_to,
    starts_again,
)
from fsdpplan.emit.nccl.adapters import adapter_words
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.spec.plan import Plan


def part_names(*, plan: Plan, job: Job) -> tuple[str, ...]:
    """The parts that a job needs, in their order."""
    needed = {
        "signals": True,
        "here": runs_here(plan),
        "left": True,
        "allocation": True,
        "records": True,
        "nodes": True,
        "meet": plan.cluster.nodes > 1,
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
    """Lines that source the parts, or that are their text."""
    names = part_names(plan=plan, job=job)
    if job.folder is not None:
        width = max(map(len, names)) + len('. "$parts/.sh"')
        calls = ((f'. "$parts/{name}.sh"', part_purpose(name)) for name in names)
        return [
            "# How the job lives: these files are the same in every job.",
            'parts="$FSDPPLAN_JOB_FOLDER/parts"',
            *(f"{call:{width}}  # {purpose}" for call, purpose in calls),
        ]
    texts = ("\n".join(part_text(name).rstrip("\n").split("\n")[1:]) for name in names)
    return "\n\n".join(f"# ---- {text.removeprefix('# ')}" for text in texts).split("\n")


def settings_lines(*, plan: Plan, job: Job) -> list[str]:
    """Lines that set what the parts read."""
    requeue = "yes" if requeues(job) else "''"
    given = "''" if job.port is None else str(job.port)
    return [
        "# What the plan and its options ask for.",
        " ".join(
            (
                f"needed={plan.cluster.nodes} ranks={plan.cluster.gpus_per_node}",
                f"spares={job.survival.spares} retries={later_starts(job)}",
                *([f"may_requeue={requeue}"] if starts_again(job) or heeds_limit(job) else []),
                *(_leaving(job) if heeds_limit(job) else []),
                *([] if plan.cluster.nodes == 1 else [f"port={given}"]),
            )
        ),
        f"saves_to={shell_word(saves_to(job) or '')}" + _expected_of_nccl(plan=plan, job=job),
    ]


def logs_nccl(*, plan: Plan, job: Job) -> bool:
    """Whether the job has NCCL say how it connects nodes: unless somebody has a log of his own."""
    own = job.nccl_debug is not None or any(name.startswith("NCCL_DEBUG") for name, _ in job.env)
    return plan.cluster.device.kind == "cuda" and plan.cluster.nodes > 1 and not own


def _expected_of_nccl(*, plan: Plan, job: Job) -> str:
    if not logs_nccl(plan=plan, job=job):
        return ""
    gpudirect = "yes" if plan.cluster.gpudirect else "''"
    return f" adapters={shell_word(adapter_words(plan) or '')} gpudirect={gpudirect}"


def _leaving(job: Job) -> tuple[str, ...]:
    return (
        f"signal_seconds={job.signal_seconds or 0} save_seconds={job.save_seconds or 0}",
        f"steps_to_leave={STEPS_TO_LEAVE} margin_seconds={MARGIN_SECONDS}",
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
