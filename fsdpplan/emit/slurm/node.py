"""What happens on each node of a job: check it, then hand over to torchrun.

The text is two bash functions. They run here, or on every node through
`srun bash -c "$(declare -f check_node ...); check_node ..."`: their variables expand on the node,
and shellcheck reads them like the rest of the script.
"""

from __future__ import annotations

from fsdpplan.emit.container import missing_lines, prefix_words
from fsdpplan.emit.job import Job, saves_to, tries_first
from fsdpplan.emit.nccl.cloud import CloudScript, cloud_scripts
from fsdpplan.emit.nccl.rules import library_of
from fsdpplan.emit.safe_text import paragraph, shell_word, shell_words
from fsdpplan.emit.slurm.node_check import assumptions, binds, near_check, node_check
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.torch_features import NUMA_BINDING

TRAINER_NAME = "trainer"
NODE_CHECK_NAME = "parts/node_check.py"
NEAR_NAME = "parts/near.py"
"""What a job folder has of them."""

JOIN_SECONDS = 60
"""How long the nodes wait for each other, after all of them have been checked."""
CONTAINER_JOIN_SECONDS = 600
"""The same where each has to unpack an image first."""


def node_functions(*, plan: Plan, job: Job, version: str) -> list[str]:
    """Lines of `check_node`, and of `start_ranks NODES RANKS`: NODES take part, and this one starts
    RANKS processes."""
    several = plan.cluster.nodes > 1
    return [
        *check_function(plan=plan, job=job, version=version),
        "",
        "# Starts the ranks of this node.",
        "start_ranks() {",
        *_indent(["set -euo pipefail", "local nodes=$1 ranks=$2"]),
        *_indent(_ignore_usr1()),
        *_indent(prepare_lines(plan)),
        *_indent(_rendezvous(plan=plan, job=job) if several else _standalone(plan)),
        *_indent(_near(plan=plan, job=job)),
        *_indent(_torchrun(plan=plan, job=job)),
        "}",
    ]


def check_function(*, plan: Plan, job: Job, version: str) -> list[str]:
    """Lines of `check_node` alone, which calls `refuse`."""
    return [
        "# Says why this node cannot do its part, if it cannot.",
        "check_node() {",
        *_indent(["set -euo pipefail", "local here=${SLURMD_NODENAME:-$HOSTNAME}"]),
        *_indent(_locked_memory(plan)),
        *_indent(_check(plan=plan, job=job, version=version)),
        "}",
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


def _ignore_usr1() -> list[str]:
    return [
        "# torchrun's agent would die of USR1. Its workers inherit that it is ignored, and set a",
        "# handler of their own.",
        "trap '' USR1",
    ]


def _pins_memory(plan: Plan) -> bool:
    return plan.cluster.device.kind == "cuda" and plan.cluster.nodes > 1


def _raise_locked_memory(plan: Plan) -> list[str]:
    if not _pins_memory(plan):
        return []
    return [
        "# Adapters that read device memory pin it. SLURM passes on the limit of the submitting",
        "# host, often the smaller one.",
        "ulimit -l unlimited 2>/dev/null || true",
    ]


def _locked_memory(plan: Plan) -> list[str]:
    if not _pins_memory(plan):
        return []
    return [
        f"# A small limit on locked memory fails late, inside {library_of(plan.cluster.device)}.",
        "if ! ulimit -l unlimited 2>/dev/null; then",
        '  echo "fsdpplan: $here: only $(ulimit -l) kB may be locked; InfiniBand may fail:'
        ' raise memlock in limits.conf" >&2',
        "fi",
    ]


def _threads(plan: Plan) -> list[str]:
    if plan.cluster.device.kind != "cuda":
        return []
    return [
        "# Threads a rank on the CPU: its share of the cores. torchrun would set 1.",
        "local share=$(($(nproc) / ranks))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 1 ? share : 1))}"',
    ]


def _check(*, plan: Plan, job: Job, version: str) -> list[str]:
    installed = isinstance(job.program, Trainer) and job.folder is None
    needed = shell_word(version if installed else "")
    gpus = plan.cluster.gpus_per_node if plan.cluster.device.kind == "cuda" else 0
    met = '"${FSDPPLAN_HEAD:-}" "${FSDPPLAN_HOSTS:-}"'
    assumed = "".join(f" {shell_word(word)}" for word in assumptions(plan=plan, job=job))
    return [
        *_unseen_folder(job),
        *missing_lines(job.container),
        f"local python=({_python(plan=plan, job=job)})",
        f'"${{python[@]}}" {_check_program(plan=plan, job=job)} \\',
        f'  "$here" {needed} {gpus} {met}{assumed}',
    ]


def _unseen_folder(job: Job) -> list[str]:
    if job.folder is None:
        return []
    return [
        f'[ -r "$FSDPPLAN_JOB_FOLDER/{TRAINER_NAME}/__main__.py" ] ||',
        '  refuse "$here: $FSDPPLAN_JOB_FOLDER cannot be read here: put the job folder where every'
        ' node sees it"',
    ]


def _check_program(*, plan: Plan, job: Job) -> str:
    if job.folder is not None:
        return f'"$FSDPPLAN_JOB_FOLDER/{NODE_CHECK_NAME}"'
    return f"-c {_verbatim(node_check(several=plan.cluster.nodes > 1))}"


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
    path, folder, first = shell_word(script.path), "", []
    if script.libraries is not None:
        libraries = shell_word(script.libraries)
        folder = f"NCCL_LIB_DIR={libraries} "
        first = [f'  export LD_LIBRARY_PATH={libraries}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"']
    here = 'echo "fsdpplan: ${SLURMD_NODENAME:-$HOSTNAME}:"'
    return [
        f"if [ -r {path} ]; then",
        "  set +u",
        f'  {folder}. {path} || {here} {path} "ended with an error" >&2',
        "  set -u",
        *first,
        "else",
        f'  {here} {path} "is missing: NCCL may fall back to sockets" >&2',
        "fi",
    ]


def _standalone(plan: Plan) -> list[str]:
    lines = ["local rendezvous=(--standalone --local-addr=127.0.0.1)"]
    return lines + (_loopback_for_gloo() if plan.cluster.device.kind == "cpu" else [])


def _loopback_for_gloo() -> list[str]:
    return [
        "# All ranks are on this host: gloo needs no other interface, and no host name.",
        'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"',
    ]


def _rendezvous(*, plan: Plan, job: Job) -> list[str]:
    """Several nodes meet at the first host; CPU ranks may stand on one host in their place."""
    seconds = JOIN_SECONDS if job.container is None else CONTAINER_JOIN_SECONDS
    joined = [
        "# Said outright: who hosts the store, and by which name others reach it. torch numbers",
        "# nodes by these names as text: before the others' stands their place in Slurm's order.",
        "local here=${SLURMD_NODENAME:-$HOSTNAME} is_host=false name",
        'printf -v name \'~%06d.%s\' "${SLURM_NODEID:-0}" "$here"',
        'if [ "$here" = "${FSDPPLAN_HEAD:-}" ]; then is_host=true name=$here; fi',
        "local rendezvous=(--rdzv-backend=c10d",
        '  --rdzv-endpoint="${FSDPPLAN_HEAD:-}:${FSDPPLAN_PORT:-}" --rdzv-id="${FSDPPLAN_RUN:-}"',
        f'  --rdzv-conf="is_host=$is_host,join_timeout={seconds},read_timeout=60"'
        ' --local-addr="$name")',
    ]
    if plan.cluster.device.kind == "cuda":
        return joined
    alone = [*_loopback_for_gloo(), "rendezvous=(--standalone --local-addr=127.0.0.1)"]
    return [*joined, 'if [ "$nodes" = 1 ]; then', *_indent(alone), "fi"]


def _near(*, plan: Plan, job: Job) -> list[str]:
    """Lines that have torchrun bind each rank, where this node can do that."""
    if not binds(plan):
        return []
    program = f"-c {_verbatim(near_check())}"
    if job.folder is not None:
        program = f'"$FSDPPLAN_JOB_FOLDER/{NEAR_NAME}"'
    since = NUMA_BINDING.since
    return [
        f"# Ranks stay on the cores near their GPUs if this node can do that (torch >= {since}).",
        f"if {_python(plan=plan, job=job)} {program}; then rendezvous+=(--numa-binding=node); fi",
    ]


def _torchrun(*, plan: Plan, job: Job) -> list[str]:
    command = [
        *_program(plan=plan, job=job),
        f"local start=({_python(plan=plan, job=job)} -m torch.distributed.run",
        '  --nnodes="$nodes" --nproc-per-node="$ranks" "${rendezvous[@]}" "${program[@]}")',
    ]
    here = ["# exec: signals reach torchrun itself.", 'exec "${start[@]}"']
    nodes = [
        "# SLURM signals every process of a step. A node that is ended because another one failed",
        "# gives 1, as torchrun does: its 143 would hide the other one's code.",
        "trap : TERM",
        "local code=0 mark=FSDPPLAN_START=${SLURM_JOB_ID:-}.${SLURM_STEP_ID:-}.${SLURM_PROCID:-}",
        'env "$mark" "${start[@]}" || code=$?',
        *(name_is_gone() if plan.cluster.nodes > 1 else []),
        '[ "$code" = 0 ] || end_left_ranks "$mark"',
        'if [ "$code" = 143 ]; then code=1; fi',
        'return "$code"',
    ]
    if plan.cluster.nodes == 1:
        return [*command, 'if [ -z "${SLURM_STEP_ID:-}" ]; then', *_indent(here), "fi", *nodes]
    if plan.cluster.device.kind == "cuda":
        return [*command, *nodes]
    return [*command, 'if [ "$nodes" = 1 ]; then', *_indent(here), "fi", *nodes]


def name_is_gone() -> list[str]:
    """Lines that say in a sentence what torchrun says in a traceback, after a minute or two: the
    name of the first host was known when the nodes met, and is not any more."""
    return [
        'if [ "$code" != 0 ] && command -v getent >/dev/null &&',
        '  ! getent hosts "$FSDPPLAN_HEAD" >/dev/null; then',
        '  echo "fsdpplan: $here: cannot resolve $FSDPPLAN_HEAD, the first host, any more:"'
        ' "mend the name service or /etc/hosts, and submit again" >&2',
        "fi",
    ]


def _program(*, plan: Plan, job: Job) -> list[str]:
    """Lines that set `program`; of a user's own, its trial may be asked for in its place."""
    first = tries_first(job, nodes=plan.cluster.nodes)
    words = program_words(job)
    folder = '--run-folder="$FSDPPLAN_RUN_FOLDER"'
    if not isinstance(job.program, Trainer):
        lines = [f"local program=({words})"]
        if first:
            trial = f"-m fsdpplan.trainer.preflight {folder}"
            lines.append(f'if [ "${{3:-}}" = preflight ]; then program=({trial}); fi')
        return lines
    tried = "--preflight " if first else ""
    if first or saves_to(job) is not None:
        tried += f"{folder} "
    metrics = '${FSDPPLAN_METRICS:+--metrics="$FSDPPLAN_METRICS"}'
    return [f"local program=({words}", f"  {tried}{metrics})"]


def _python(*, plan: Plan, job: Job) -> str:
    """The Python of the ranks, as shell words."""
    prefix = prefix_words(job.container, device=plan.cluster.device, folder=job.folder)
    return prefix + shell_word(job.python)


def _verbatim(text: str) -> str:
    """Text of several lines between single quotes; ours, and without any of them."""
    assert "'" not in text
    return f"'{text}'"


def _indent(lines: list[str]) -> list[str]:
    """Two spaces before each line, but not inside the quoted program."""
    return [f"  {line}" for line in lines]
