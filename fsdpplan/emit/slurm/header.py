"""The head of a job script: which plan it runs and what was predicted. Written and read here."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from textwrap import dedent

from fsdpplan.emit.job import Job, trained_words
from fsdpplan.emit.safe_text import comment, literal_word, shell_word
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import MESH_AXES
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.torch_features import torch_need
from fsdpplan.units import format_gib, format_percent, format_seconds

PLAN_DELIMITER = "FSDPPLAN_PLAN_END"
"""Ends the plan in the script. JSON has no bare words, so no plan holds such a line."""

METRICS_LINE = "export FSDPPLAN_METRICS="
"""Begins the line of a script that says where its metrics go."""

FOLDER_LINE = "export FSDPPLAN_JOB_FOLDER="
"""Begins the line of a job folder's script that says where the folder is."""

PLAN_NAME = "fsdpplan.json"
"""File of the plan, in a job folder and beside a script."""

PLAN_KEY = "plan.json"
"""Where the ConfigMap of a manifest has the plan."""

MAX_PLAN_BYTES = 120_000
"""Linux passes at most 128 KiB in one variable (MAX_ARG_STRLEN in execve(2))."""

MAX_SCRIPT_BYTES = 2**20
"""No script of ours comes near it."""

_HEADER = re.compile(
    r"# fsdpplan job script, format (?P<format>\d+): fsdpplan (?P<version>\S+), "
    r"plan sha256 (?P<digest>[0-9a-f]{64})"
)
_TRAINED = re.compile(r"# (?P<does>Trains|Runs): (?P<what>.+)")
_HEADER_LINES = 12
"""No header is longer."""
_PLAN = re.compile(
    rf"^FSDPPLAN_PLAN=\$\(cat <<'{PLAN_DELIMITER}'\n(?P<json>.*?)\n{PLAN_DELIMITER}\n\)$",
    re.DOTALL | re.MULTILINE,
)

_PLAN_OF_MANIFEST = re.compile(
    rf"^kind: ConfigMap\n(?:(?!---$).*\n)*?  {re.escape(PLAN_KEY)}: \|\n"
    r"(?P<lines>(?:    .*\n|\n)+)",
    re.MULTILINE,
)
"""A manifest's first document is a ConfigMap with the plan as a literal block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a job script says of itself in its second line."""

    version: str
    """fsdpplan that wrote it."""
    digest: str
    """sha256 of the plan's JSON text."""


def plan_digest(plan_json: str) -> str:
    """sha256 of the plan's JSON text, in hexadecimal."""
    return hashlib.sha256(plan_json.rstrip("\n").encode()).hexdigest()


def header_lines(*, plan: Plan, plan_json: str, version: str, job: Job | None = None) -> list[str]:
    """Comment lines: identity, layout, prediction, and what the job's program does; `job` is None
    where that program is neither fsdpplan's nor the user's."""
    cluster, estimate = plan.cluster, plan.estimate
    step = estimate.step_seconds
    device = cluster.device.unit
    return [
        f"# fsdpplan job script, format 1: fsdpplan {version}, "
        f"plan sha256 {plan_digest(plan_json)}",
        comment(
            f"{plan.model.name} on {cluster.name}: {cluster.nodes} x {cluster.gpus_per_node} "
            f"= {cluster.gpus} ranks"
        ),
        comment(f"Layout: {layout_words(plan)}"),
        *([] if plan.training.torch is None else [comment(f"Torch: {torch_words(plan)}")]),
        comment(
            f"Predicted step: {format_seconds(step.expected)} (80 % band "
            f"{format_seconds(step.lower, beside=step.expected)} to "
            f"{format_seconds(step.upper, beside=step.expected)}), "
            f"{estimate.tokens_per_second:,.0f} tokens/s, "
            f"MFU {format_percent(estimate.mfu_fraction)} of {plan.training.peak_words}"
        ),
        comment(
            f"Predicted memory a {device}: {format_gib(estimate.memory.peak_allocated_bytes)} "
            f"allocated, {format_gib(estimate.memory.peak_reserved_bytes)} reserved, of "
            f"{format_gib(cluster.device.memory_bytes)}"
        ),
        *([] if job is None else [comment(trained_words(job))]),
    ]


def torch_words(plan: Plan) -> str:
    """The release that was planned for, where it came from, and the oldest that will do."""
    source = "assumed" if plan.known_torch is None else plan.torch_source
    planned, need = plan.training.torch_release, torch_need(plan.case)
    if planned is None or planned < need.oldest:  # the job has a program of its own
        return f"{planned} ({source})"
    return f"{planned} ({source}); needs {need.oldest} or newer" + (
        f", for {need.because}" if need.because else ""
    )


def layout_words(plan: Plan) -> str:
    """The layout in one line: its degrees above 1 and its policies."""
    layout = plan.layout
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1]
    parts = [" x ".join(degrees) or "one rank", layout.sharding]
    if layout.sharding == "fsdp":
        parts.append(f"reshard {layout.reshard_after_forward}")
    parts.append(f"micro-batch {layout.micro_batch} x {layout.num_microbatches}")
    parts.append(f"checkpointing {layout.recomputation}")
    return ", ".join(parts)


def plan_lines(plan_json: str) -> list[str]:
    """Lines that put the plan into the environment of every rank."""
    _require_passable_size(plan_json)
    if "\0" in plan_json or PLAN_DELIMITER in plan_json.splitlines():
        raise SpecError(
            f"the plan's JSON text has a NUL or the script's own delimiter in it: write names "
            f"without them, and without {PLAN_DELIMITER}"
        )
    return [
        "# The plan travels in the environment: no rank needs a file for it.",
        f"FSDPPLAN_PLAN=$(cat <<'{PLAN_DELIMITER}'",
        *plan_json.rstrip("\n").split("\n"),
        PLAN_DELIMITER,
        ")",
        "export FSDPPLAN_PLAN",
    ]


def plan_file_lines(*, plan_json: str, folder: str) -> list[str]:
    """Lines of the script of a job folder: the same, from the folder's file of the plan."""
    _require_passable_size(plan_json)
    return [
        "# Where the files are that this script calls: Slurm runs a copy of it from elsewhere.",
        FOLDER_LINE + shell_word(folder),
        f'[ -r "$FSDPPLAN_JOB_FOLDER/{PLAN_NAME}" ] ||',
        '  refuse "there is no job folder $FSDPPLAN_JOB_FOLDER: after moving it, correct the line'
        ' of that name in its job.sbatch"',
        "# The plan travels in the environment of every rank, and is the one named above.",
        f'FSDPPLAN_PLAN=$(<"$FSDPPLAN_JOB_FOLDER/{PLAN_NAME}")',
        '[ "$(printf %s "$FSDPPLAN_PLAN" | sha256sum | cut -c 1-64)" = \\',
        f"  {plan_digest(plan_json)} ] ||",
        f'  refuse "$FSDPPLAN_JOB_FOLDER/{PLAN_NAME} was changed: emit the folder again"',
        "export FSDPPLAN_PLAN",
    ]


def _require_passable_size(plan_json: str) -> None:
    size = len(plan_json.encode())
    if size > MAX_PLAN_BYTES:
        raise SpecError(
            f"the plan is {size:,} bytes of JSON; a script can pass on {MAX_PLAN_BYTES:,}: "
            "drop its alternatives"
        )


def job_plan(plan: Plan) -> Plan:
    """The plan that a job carries: without the layouts that it does not run, and without what
    decided no more than an option of its trainer."""
    return replace(plan, alternatives=(), failures=None, terms=None)


def read_header(script: str) -> Header | None:
    """The header of a job script, or None when it is not one of ours."""
    for line in script.splitlines()[:5]:
        if match := _HEADER.fullmatch(line):
            return Header(version=match["version"], digest=match["digest"])
    return None


def read_trained(script: str) -> str | None:
    """What a script's or manifest's header says of its program, in the words of a sentence."""
    for line in script.splitlines()[:_HEADER_LINES]:
        if match := _TRAINED.fullmatch(line):
            return f"{match['does'].lower()} {match['what']}"
    return None


def read_own_program(script: str) -> str | None:
    """The program of the user's own that a script's or manifest's header names; None: another."""
    for line in script.splitlines()[:_HEADER_LINES]:
        if (match := _TRAINED.fullmatch(line)) and match["does"] == "Runs":
            return match["what"]
    return None


def script_digest(script: str) -> str:
    """sha256 of the plan that a script runs: of the one inside it, else what its header says."""
    inside, header = read_plan_json(script), read_header(script)
    if inside is None and header is not None:
        return header.digest
    return plan_digest(inside or "")


def read_plan_json(script: str) -> str | None:
    """The JSON text of the plan inside a job script or manifest, or None when there is none."""
    if match := _PLAN.search(script):
        return match["json"]
    match = _PLAN_OF_MANIFEST.search(script)
    return None if match is None else dedent(match["lines"]).rstrip("\n")


def read_metrics_path(script: str) -> str | None:
    """The metrics file that a job script sets itself, or None when it leaves that open."""
    return _word_after(METRICS_LINE, script)


def read_job_folder(script: str) -> str | None:
    """The job folder whose files a script calls, or None when it holds all itself."""
    return _word_after(FOLDER_LINE, script)


def _word_after(beginning: str, script: str) -> str | None:
    before, _, after_plan = script.partition(f"\n{PLAN_DELIMITER}\n")
    for line in (after_plan or before).splitlines():
        if line.startswith(beginning):
            return literal_word(line.removeprefix(beginning))
    return None
