"""What happens on each node of a job: check it, then hand over to torchrun.

The text is two bash functions. They run here, or on every node through
`srun bash -c "$(declare -f check_node ...); check_node ..."`: their variables expand on the node,
and shellcheck reads them like the rest of the script.
"""

from __future__ import annotations

from fsdpplan.emit.job import Job, Trainer
from fsdpplan.emit.quoting import shell_word, shell_words
from fsdpplan.spec.plan import Plan

NODE_CHECK = """\
import importlib.util, socket, sys

here, version, gpus, head = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


def refuse(text):
    print(f"fsdpplan: {here}: {text}", file=sys.stderr, flush=True)
    sys.exit(5)


if importlib.util.find_spec("torch") is None:
    refuse(f"{sys.executable} has no torch: give the right one by --python or --env-setup")
if version:
    try:
        import fsdpplan
    except ImportError as error:
        refuse(f"{sys.executable} cannot import fsdpplan ({error}): install fsdpplan {version} "
               "there, or emit a job folder with its own trainer by --out DIR")
    if fsdpplan.__version__ != version:
        refuse(f"fsdpplan {fsdpplan.__version__} is installed here, fsdpplan {version} wrote the "
               "script: install that one, or emit the script again")
if gpus:
    import torch

    visible = torch.cuda.device_count()
    if visible < gpus:
        refuse(f"{visible} GPUs are visible, the plan uses {gpus} a node: ask for as many, or try "
               "the layout on CPU processes by fsdpplan run --smoke")
if head:
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(head, None)})
    except OSError as error:
        refuse(f"cannot resolve {head}, the first host of the allocation ({error}): all nodes "
               "must know its name")
    if here != head and all(a.startswith("127.") or a == "::1" for a in found):
        refuse(f"{head}, the first host of the allocation, resolves to {found[0]} here, which is "
               "this node itself: correct /etc/hosts or the name service")
print(f"fsdpplan: {here} is ready", flush=True)
"""
"""Python program that ends with exit code 5 and one line when the node cannot do its part.

Arguments: the node's name, the fsdpplan version that must be importable (empty: none must),
GPUs a node, and the host of the rendezvous (empty on one node).
"""


def node_functions(*, plan: Plan, job: Job, version: str) -> list[str]:
    """Lines of `check_node`, and of `start_ranks NODES RANKS`: NODES take part, and this one starts
    RANKS processes."""
    several = plan.cluster.nodes > 1
    return [
        "# Says why this node cannot do its part, if it cannot.",
        "check_node() {",
        *_indent(["set -euo pipefail", "local here=${SLURMD_NODENAME:-$HOSTNAME}"]),
        *_indent(_locked_memory(plan)),
        *_indent(_files(job)),
        *_indent(_check(plan=plan, job=job, version=version)),
        "}",
        "",
        "# Starts the ranks of this node.",
        "start_ranks() {",
        *_indent(["set -euo pipefail", "local nodes=$1 ranks=$2"]),
        *_indent(_ignore_usr1()),
        *_indent(_raise_locked_memory(plan)),
        *_indent(_threads(plan)),
        *_indent(_rendezvous(plan) if several else _standalone(plan)),
        *_indent(_torchrun(plan=plan, job=job)),
        "}",
    ]


def program_words(job: Job) -> str:
    """The program that torchrun starts, as shell words."""
    program = job.program
    if not isinstance(program, Trainer):
        # torchrun would take a leading dash for an option of its own.
        script = f"./{program.script}" if program.script.startswith("-") else program.script
        return shell_words((script, *program.words()))
    entry: tuple[str, ...] = ("-m", "fsdpplan.trainer")
    if job.trainer_folder is not None:
        entry = (f"{job.trainer_folder}/__main__.py",)
    return shell_words((*entry, *program.words()))


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
        "# A small limit on locked memory fails late, inside NCCL.",
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


def _files(job: Job) -> list[str]:
    """Files that every node must see."""
    program = job.program
    if isinstance(program, Trainer):
        entry = None if job.trainer_folder is None else f"{job.trainer_folder}/__main__.py"
        paths = [path for path in (entry, program.data) if path is not None]
    else:
        paths = [program.script]
    return [
        f"[ -r {shell_word(path)} ] || refuse {shell_word(path)} "
        '"cannot be read on $here: put it where every node sees it"'
        for path in paths
    ]


def _check(*, plan: Plan, job: Job, version: str) -> list[str]:
    installed = isinstance(job.program, Trainer) and job.trainer_folder is None
    needed = shell_word(version if installed else "")
    gpus = plan.cluster.gpus_per_node if plan.cluster.device.kind == "cuda" else 0
    head = '"${FSDPPLAN_HEAD:-}"'
    return [
        f"local python={shell_word(job.python)}",
        f'"$python" -c {_verbatim(NODE_CHECK)} \\',
        f'  "$here" {needed} {gpus} {head}',
    ]


def _standalone(plan: Plan) -> list[str]:
    lines = ["local rendezvous=(--standalone --local-addr=127.0.0.1)"]
    return lines + (_loopback_for_gloo() if plan.cluster.device.kind == "cpu" else [])


def _loopback_for_gloo() -> list[str]:
    return [
        "# All ranks are on this host: gloo needs no other interface, and no host name.",
        'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"',
    ]


def _rendezvous(plan: Plan) -> list[str]:
    """Several nodes meet at the first host; CPU ranks may stand on one host in their place."""
    joined = [
        "# Said outright, not guessed from names: who hosts the store, and by which name the other",
        "# nodes reach this one.",
        "local here=${SLURMD_NODENAME:-$HOSTNAME} is_host=false",
        'if [ "$here" = "${FSDPPLAN_HEAD:-}" ]; then is_host=true; fi',
        "local rendezvous=(--rdzv-backend=c10d",
        '  --rdzv-endpoint="${FSDPPLAN_HEAD:-}:${FSDPPLAN_PORT:-}" --rdzv-id="${FSDPPLAN_RUN:-}"',
        '  --rdzv-conf="is_host=$is_host" --local-addr="$here")',
    ]
    if plan.cluster.device.kind == "cuda":
        return joined
    alone = [*_loopback_for_gloo(), "rendezvous=(--standalone --local-addr=127.0.0.1)"]
    return [*joined, 'if [ "$nodes" = 1 ]; then', *_indent(alone), "fi"]


def _torchrun(*, plan: Plan, job: Job) -> list[str]:
    metrics = ""
    if isinstance(job.program, Trainer):
        metrics = ' ${FSDPPLAN_METRICS:+--metrics="$FSDPPLAN_METRICS"}'
    command = [
        f"local start=({shell_word(job.python)} -m torch.distributed.run",
        '  --nnodes="$nodes" --nproc-per-node="$ranks" "${rendezvous[@]}"',
        f"  {program_words(job)}{metrics})",
    ]
    here = ["# exec: signals reach torchrun itself.", 'exec "${start[@]}"']
    nodes = [
        "# SLURM signals every process of a step. A node that is ended because another one failed",
        "# gives 1, as torchrun does: its 143 would hide the other one's code.",
        "trap : TERM",
        "local code=0",
        '"${start[@]}" || code=$?',
        'if [ "$code" = 143 ]; then code=1; fi',
        'return "$code"',
    ]
    if plan.cluster.nodes == 1:
        return [*command, *here]
    if plan.cluster.device.kind == "cuda":
        return [*command, *nodes]
    return [*command, 'if [ "$nodes" = 1 ]; then', *_indent(here), "fi", *nodes]


def _verbatim(text: str) -> str:
    """Text of several lines between single quotes; ours, and without any of them."""
    assert "'" not in text
    return f"'{text}'"


def _indent(lines: list[str]) -> list[str]:
    """Two spaces before each line, but not inside the quoted program."""
    return [f"  {line}" for line in lines]
