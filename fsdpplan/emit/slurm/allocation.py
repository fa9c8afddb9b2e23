"""A job inside a Slurm allocation: what is its own of how it lives there."""

from __future__ import annotations

from fsdpplan.emit.container import step_lines
from fsdpplan.emit.job import Job, starts_again, trial_words, tries_first
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.emit.slurm.node import CONTAINER_JOIN_SECONDS
from fsdpplan.emit.slurm.parts import heeds_limit, logs_nccl, watches
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import Plan

LAST_NODE_SECONDS = 300
"""How much longer than the first node the last one may be checked: the head waits 30 s for a node
and 180 s for what it says, and one whose file system hangs is not waited for."""


def attempt_lines(*, plan: Plan, job: Job) -> list[str]:
    """Lines of `run_attempt`, which the parts call: it leaves the exit code in `code`."""
    nodes = plan.cluster.nodes
    label = " --label" if nodes > 1 else ""
    inside = ' "${container[@]}"' if step_lines(job.container, folder=job.folder) else ""
    again = starts_again(job)
    wait = LAST_NODE_SECONDS + (0 if job.container is None else CONTAINER_JOIN_SECONDS)
    return [
        "# One start on the nodes that were chosen: `step` is the srun for them.",
        "run_attempt() {",
        *(f"  {line}" for line in step_lines(job.container, folder=job.folder)),
        "  code=0 trained=''" if again else "  code=0",
        "  # First all nodes are looked at, so that each one that fails is named.",
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=0 --wait={wait} \\',
        '    bash -c "$(for_nodes); check_node" || code=$?',
        *(["  require_pyxis"] if inside else []),
        '  [ "$code" = 0 ] || return 0',
        *_preflight(nodes=nodes, job=job, inside=inside + label),
        "  # A signal that came meanwhile counts now.",
        '  if [ -n "$stopped$told" ]; then code=1; return; fi',
        *(["  watch_script"] if watches(job) else []),
        *(["  watch_limit"] if heeds_limit(job) else []),
        *(["  watch_nccl"] if logs_nccl(plan=plan, job=job) else []),
        "  # A task that fails ends the others.",
        *(["  trained=yes"] if again else []),
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=1 \\',
        f"    bash -c {_start_ranks()} &",
        "  follow",
        "}",
        *(["meet() { :; }"] if nodes == 1 else []),
    ]


def in_allocation(*, job: Job) -> list[str]:
    """Lines that check the allocation, and live in it."""
    return [
        "enter_allocation",
        *said_lines(job),
        "live",
    ]


def said_lines(job: Job) -> list[str]:
    """A line that says first of all that the job is a trial, where it is one. It names no options:
    what looks for them in a script finds those that were given."""
    said = trial_words(job)
    return [] if said is None else [f"echo {shell_word(f'fsdpplan: {said}')} >&2"]


def _start_ranks(word: str = "") -> str:
    return f'"$(for_nodes); start_ranks $needed $ranks{word}"'


def _preflight(*, nodes: int, job: Job, inside: str) -> list[str]:
    """Lines that try the links before a program of the user's own; the trainer does so itself."""
    if isinstance(job.program, Trainer) or not tries_first(job, nodes=nodes):
        return []
    return [
        f'  "${{step[@]}}"{inside} --kill-on-bad-exit=1 \\',
        f"    bash -c {_start_ranks(' preflight')} ||",
        "    code=$?",
        '  [ "$code" = 0 ] || return 0',
    ]
