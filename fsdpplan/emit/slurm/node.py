"""What a job says of each node: the Python of its ranks, their program, what comes before it.

The rest is the same in every job: `bash/check.sh` looks at a node, `bash/ranks.sh` hands over to
torchrun.
"""

from __future__ import annotations

from fsdpplan.emit.container import prefix_words
from fsdpplan.emit.job import Job, saves_to, tries_first
from fsdpplan.emit.nccl.cloud import CloudScript, cloud_scripts
from fsdpplan.emit.safe_text import paragraph, shell_word, shell_words
from fsdpplan.emit.slurm.node_check import assumptions
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import Plan

TRAINER_NAME = "trainer"
"""What a job folder has of it."""

JOIN_SECONDS = 60
"""How long the nodes wait for each other, after all of them have been checked."""
CONTAINER_JOIN_SECONDS = 600
"""The same where each has to unpack an image first."""


def node_lines(*, plan: Plan, job: Job, version: str) -> list[str]:
    """Lines that say what runs on each node of a job, and of `prepare_node`."""
    seconds = JOIN_SECONDS if job.container is None else CONTAINER_JOIN_SECONDS
    own = not isinstance(job.program, Trainer)
    trial = '-m fsdpplan.trainer.preflight --run-folder="$FSDPPLAN_RUN_FOLDER"'
    if not own or not tries_first(job, nodes=plan.cluster.nodes):
        trial = ""
    return [
        "# What runs on each node, and what its check takes for granted.",
        *check_lines(plan=plan, job=job, version=version),
        f"program=({program_words(job)}{_preflight_words(plan=plan, job=job)})",
        f"""reports={"''" if own else "yes"} join_seconds={seconds} trial=({trial})""",
        "prepare_node() {",
        *(f"  {line}" for line in prepare_lines(plan) or [":"]),
        "}",
    ]


def check_lines(*, plan: Plan, job: Job, version: str) -> list[str]:
    """Lines that set what `check_node` reads, beside `needed`."""
    installed = isinstance(job.program, Trainer) and job.folder is None
    gpus = plan.cluster.gpus_per_node if plan.cluster.device.kind == "cuda" else 0
    prefix = prefix_words(job.container, device=plan.cluster.device, folder=job.folder)
    return [
        f"python=({prefix}{shell_word(job.python)}) gpus={gpus}"
        f" fsdpplan_version={shell_word(version if installed else '')}",
        f"assumed=({' '.join(map(shell_word, assumptions(plan=plan, job=job)))})",
    ]


def prepare_lines(plan: Plan) -> list[str]:
    """Lines of a function's body that come before torchrun, where `ranks` is the ranks here."""
    return [
        *_raise_locked_memory(plan),
        *_threads(plan),
        *_cloud(cloud_scripts(plan)),
    ]


def program_words(job: Job) -> str:
    """The program that torchrun starts, as shell words."""
    program = job.program
    if not isinstance(program, Trainer):
        # torchrun would take a leading dash for an option of its own.
        script = f"./{program.script}" if program.script.startswith("-") else program.script
        return shell_words((script, *program.words()))
    entry = "-m fsdpplan.trainer"
    if job.folder is not None:
        entry = f'"$FSDPPLAN_JOB_FOLDER/{TRAINER_NAME}/__main__.py"'
    return " ".join((entry, *map(shell_word, program.words())))


def _preflight_words(*, plan: Plan, job: Job) -> str:
    """What else the reference trainer of a job in Slurm is told."""
    if not isinstance(job.program, Trainer):
        return ""
    first = tries_first(job, nodes=plan.cluster.nodes)
    folder = ' --run-folder="$FSDPPLAN_RUN_FOLDER"' if first or saves_to(job) is not None else ""
    return (" --preflight" if first else "") + folder


def _raise_locked_memory(plan: Plan) -> list[str]:
    if plan.cluster.device.kind != "cuda" or plan.cluster.nodes == 1:
        return []
    return [
        "# Adapters pin device memory. SLURM passes on the submitting host's limit, often smaller.",
        "ulimit -l unlimited 2>/dev/null || true",
    ]


def _threads(plan: Plan) -> list[str]:
    if plan.cluster.device.kind != "cuda":
        return []
    return [
        "# Threads a rank on the CPU: its share of the cores. torchrun would set 1.",
        "local share=$(($(nproc) / ranks))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 1 ? share : 1))}"',
    ]


def _cloud(scripts: tuple[CloudScript, ...]) -> list[str]:
    """Lines that run the cloud's scripts; what the user has exported stays."""
    if not scripts:
        return []
    lines = [
        "local chosen",
        "chosen=$(export -p | sed -n 's/^declare -x NCCL_/export NCCL_/p')",
    ]
    for script in scripts:
        lines += [
            *paragraph(f"{script.reason[0].upper()}{script.reason[1:]} ({script.source})."),
            *_run_script(script),
        ]
    return [*lines, 'eval "$chosen"']


def _run_script(script: CloudScript) -> list[str]:
    path, folder, first = shell_word(script.path), "", ["  set -u"]
    if script.libraries is not None:
        libraries = shell_word(script.libraries)
        folder = f"NCCL_LIB_DIR={libraries} "
        own = f'LD_LIBRARY_PATH={libraries}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
        first = [f"  set -u; export {own}"]
    here = 'echo "fsdpplan: ${SLURMD_NODENAME:-$HOSTNAME}:"'
    return [
        f"if [ -r {path} ]; then",
        f'  set +u; {folder}. {path} || {here} {path} "ended with an error" >&2',
        *first,
        f'else {here} {path} "is missing: NCCL may fall back to sockets" >&2; fi',
    ]
