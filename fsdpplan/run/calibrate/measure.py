"""Measure this machine: start the measuring program, follow it, keep its log whatever happens.

The script that starts the measuring program: by torchrun here, or by srun on all nodes.

What to measure for a plan: matmuls and attention of its blocks, the axes of its mesh.

What a person sees while a machine is measured, on stderr.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

from fsdpplan.cost.block.products import Product, block_products
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.attention import head_channels
from fsdpplan.cost.network.placement import shard_group
from fsdpplan.emit.safe_text import may_move, shell_word, shell_words
from fsdpplan.errors import LaunchError
from fsdpplan.run.engines.local import run_here
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.show import Display, LiveDisplay, PlainDisplay
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.measure.settings import (
    Attention,
    Axis,
    MeasuredDevice,
    MeasuredDtype,
    Settings,
    Shape,
    words,
)
from fsdpplan.topology.probe import require_torch

MODULE = "fsdpplan.topology.measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the processes run."""

    device: MeasuredDevice
    processes: int
    """On each node."""
    nodes: int = 1
    """Above 1: all nodes of the Slurm allocation that we are in."""


def measuring_script(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> str:
    """A bash script that measures with `arguments` of the measuring program, and ends with its
    exit code; 130 or 143 where it was told to end."""
    start = _on_nodes if ranks.nodes > 1 else _here
    lines = [
        "#!/bin/bash",
        "# srun calls the function below on other nodes; traps call functions (SC2317, SC2329).",
        "# shellcheck disable=SC2016,SC2317,SC2329",
        "set -euo pipefail",
        "job='' stopped=''",
        "stop() {",
        "  stopped=$1",
        '  [ -z "$job" ] || kill -TERM "$job" 2>/dev/null || true',
        "}",
        "trap 'stop 130' INT",
        "trap 'stop 143' TERM",
        "trap '' USR1",
        *_threads(ranks),
        *start(ranks, python=python, arguments=arguments),
        "job=$!",
        '[ -z "$stopped" ] || stop "$stopped"',
        "code=0",
        'wait "$job" || code=$?',
        "# A signal interrupts wait: wait for what it told to end.",
        'if [ -n "$stopped" ]; then wait "$job" || true; fi',
        'exit "${stopped:-$code}"',
    ]
    return "\n".join(lines) + "\n"


def _threads(ranks: Ranks) -> list[str]:
    """As in jobs: CPU processes compute with one thread, those of GPUs share the cores."""
    if ranks.device == "cpu":
        return ['export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"']
    return [
        f"share=$(($(nproc) / {ranks.processes}))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 1 ? share : 1))}"',
    ]


def _here(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> list[str]:
    lines = []
    if ranks.device == "cpu":
        lines = [
            "# All ranks are on this host: gloo needs no other interface, and no host name.",
            'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"',
        ]
    start = (python, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    processes = (f"--nproc-per-node={ranks.processes}", "-m", MODULE)
    return [*lines, f"{shell_words((*start, *processes, *arguments))} &"]


def _on_nodes(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> list[str]:
    """One task a node, which starts its ranks. Nodes are numbered in the order of the allocation,
    so that rank 0, which writes the log, is on the first one."""
    program = (f"--nproc-per-node={ranks.processes}", "-m", MODULE, *arguments)
    return [
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "head=${hosts%%$'\\n'*} port=$((20000 + SLURM_JOB_ID % 10000))",
        "start_ranks() {",
        "  local here=${SLURMD_NODENAME:-$HOSTNAME} number=0 host",
        "  for host in $1; do",
        '    if [ "$host" = "$here" ]; then break; fi',
        "    number=$((number + 1))",
        "  done",
        "  ulimit -l unlimited 2>/dev/null || true",
        f"  exec {shell_word(python)} -m torch.distributed.run --nnodes={ranks.nodes} \\",
        '    --node-rank="$number" --master-addr="$2" --master-port="$3" --local-addr="$here" \\',
        f"    {shell_words(program)}",
        "}",
        "# srun does not inherit the cores since SLURM 22.05: give each task those of the",
        "# smallest node, from a list such as 96(x3),48.",
        "cores=$(tr ',' '\\n' <<<\"${SLURM_JOB_CPUS_PER_NODE:-1}\" | sed 's/(.*//' | sort -n |"
        " sed -n 1p)",
        f"srun --nodes={ranks.nodes} --ntasks={ranks.nodes} --ntasks-per-node=1 \\",
        '  --cpus-per-task="$cores" --export=ALL --kill-on-bad-exit=1 \\',
        "  ${SLURM_STEP_ID:+--overlap} \\",
        '  bash -c "$(declare -f start_ranks); start_ranks \\"\\$@\\"" start \\',
        '  "$hosts" "$head" "$port" &',
    ]


def settings_for_plan(settings: Settings, plan: Plan) -> Settings:
    """`settings` with the shapes, number formats and axes of `plan`."""
    return replace(
        settings,
        dtypes=settings.dtypes or _dtypes(plan),
        shapes=plan_shapes(plan),
        attention=plan_attention(plan),
        axes=plan_axes(plan.layout),
    )


def plan_shapes(plan: Plan) -> tuple[Shape, ...]:
    """m, n, k of the matmuls of one block on one rank: forward, and in backward by input and by
    weight; each once. Grouped ones of experts are left out: they are no single matmul."""
    work = block_work(plan.case)
    shapes = (
        shape
        for product in block_products(work)
        if product.groups == 1
        for shape in _passes(product)
    )
    return tuple(dict.fromkeys(shapes))


def plan_attention(plan: Plan) -> tuple[Attention, ...]:
    """Attention of one block on one rank, if its heads are of a width."""
    model, layout = plan.model, plan.layout
    query, value = head_channels(model)
    if query != value:
        return ()
    kv_heads = -(-model.kv_heads // layout.tp)
    heads = -(-model.heads // layout.tp)
    return (
        Attention(
            batch=layout.micro_batch,
            heads=-(-heads // kv_heads) * kv_heads,
            kv_heads=kv_heads,
            seq_len=plan.training.seq_len,
            head_dim=model.head_dim,
        ),
    )


def plan_axes(layout: Layout) -> tuple[Axis, ...]:
    """Axes of the mesh with more than one rank, outermost first; behind them the ranks that FSDP
    shards over, where those are two axes."""
    strides = layout.inner_ranks
    axes = [
        Axis(name=axis, ranks=getattr(layout, axis), stride=strides[axis])
        for axis in MESH_AXES
        if getattr(layout, axis) > 1
    ]
    shards = shard_group(layout)
    if layout.cp > 1 and layout.dp_shard > 1:
        axes.append(Axis(name="dp_shard_cp", ranks=shards.ranks, stride=shards.stride))
    return tuple(axes)


def _passes(product: Product) -> Iterator[Shape]:
    rows = max(1, round(product.rows))
    yield rows, product.n, product.k
    yield rows, product.k, product.n
    yield product.n, product.k, rows


def _dtypes(plan: Plan) -> tuple[MeasuredDtype, ...]:
    """That of the matmuls, and that of attention where it is another one."""
    training = plan.training
    both = (training.precision, training.activation_dtype)
    return cast(tuple[MeasuredDtype, ...], tuple(dict.fromkeys(both)))


SAID = "measure: "
"""Begins every line of the measuring program; torchrun's own stay in the file."""
_DONE = re.compile(rf"(?:\d+: )?{SAID}(?P<done>\d+)/(?P<all>\d+) (?P<what>.+)")
_REFUSED = re.compile("srun: (?:error|fatal): ")
_SAID = re.compile(rf"(?:\d+: )?{SAID}(?P<text>.+)")


class PlainMeasuring(PlainDisplay):
    """For logs and pipes: the program's lines as they come."""

    def output(self, line: str) -> None:
        if said := _SAID.fullmatch(line):
            self.state(said["text"])


class LiveMeasuring(LiveDisplay):
    """For a person: one moving line, and above it whatever is no result."""

    def output(self, line: str) -> None:
        if done := _DONE.fullmatch(line):
            self._show(int(done["done"]), int(done["all"]), done["what"])
        elif said := _SAID.fullmatch(line):
            super().output(f"fsdpplan: {said['text']}")

    def state(self, text: str) -> None:
        super().output(f"fsdpplan: {text}")

    def _show(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            # Not before: its thread must not be there when the program is forked off.
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)


def measuring_display(stream: TextIO) -> Display:
    """A moving line where a person looks, plain lines otherwise."""
    return LiveMeasuring() if may_move(stream.isatty(), os.environ) else PlainMeasuring(stream)


def reason_in(console: str) -> str | None:
    """What the program printed about a failure: the last thing that it said beside results, or
    what srun refused."""
    lines = console.splitlines()
    said = [
        match["text"]
        for line in lines
        if (match := _SAID.fullmatch(line)) and not _DONE.fullmatch(line)
    ]
    refused = [line for line in lines if _REFUSED.match(line)]
    return next(reversed(said or refused), None)


INTERRUPTED, TERMINATED = 130, 143
_NEXT_TO_NOTHING_BYTES = 2**16


def measure(
    settings: Settings,
    *,
    ranks: Ranks,
    out: Path,
    environment: Mapping[str, str] | None = None,
    display: Display | None = None,
) -> Path:
    """Measure on `ranks` and return `out`, the log; what the program prints is beside it.

    `environment` is added to this process's own. Raises LaunchError where the program could not
    start or failed, KeyboardInterrupt after Ctrl-C; the rows up to there are in the log.
    """
    _require_allocation(ranks)
    require_torch("measuring")
    out = out.absolute()
    console = out.with_suffix(".log")
    _make_empty(out, console)
    script = measuring_script(
        ranks, python=sys.executable, arguments=("--out", str(out), *words(settings))
    )
    shown = display or measuring_display(sys.stderr)
    with shown, tempfile.TemporaryDirectory(prefix="fsdpplan-") as folder:
        follower = Follower(metrics=Path(folder, "none"), display=shown)
        follower.follow_log(console)
        path = Path(folder, "measure.sh")
        path.write_text(script, encoding="utf-8")
        code = run_here(
            script=path,
            log=console,
            folder=Path.cwd(),
            environment={**_own_environment(ranks), **(environment or {})},
            follower=follower,
            display=shown,
        )
        if code in (INTERRUPTED, TERMINATED):
            shown.state(_measured_until_now(out))
    _require_done(code, out=out, console=console)
    return out


def _require_allocation(ranks: Ranks) -> None:
    allocated = os.environ.get("SLURM_JOB_NUM_NODES")
    if ranks.nodes > 1 and allocated != str(ranks.nodes):
        there = f"this one has {allocated}" if allocated else "this is none"
        raise LaunchError(
            f"measuring {ranks.nodes} nodes needs a Slurm allocation of as many, and {there}: type "
            f"salloc --nodes={ranks.nodes}, then fsdpplan calibrate again"
        )


def _full_disk(out: Path) -> str | None:
    """The reason that a program cannot write down itself."""
    if shutil.disk_usage(out.parent).free >= _NEXT_TO_NOTHING_BYTES:
        return None
    return f"the disk that {out} is on is full: choose another one by --save"


def _make_empty(*files: Path) -> None:
    """An earlier log must not pass for this one's."""
    for path in files:
        try:
            path.write_text("", encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the log {path} cannot be written: {error.strerror}: choose another place by "
                "--save"
            ) from error


def _own_environment(ranks: Ranks) -> dict[str, str]:
    """This process's own; without an allocation's variables for a run on this host alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if ranks.nodes > 1 or not name.startswith("SLURM_")
    }


def _measured_until_now(out: Path) -> str:
    """After an interruption: where the rows are, and what to do with them. The first line says what
    was measured on."""
    if out.read_bytes().count(b"\n") < 2:
        return "nothing was measured yet"
    return (
        f"what was measured until now is in {out}; fsdpplan calibrate --from "
        f"{shlex.quote(str(out))} fits it"
    )


def _require_done(code: int, *, out: Path, console: Path) -> None:
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == TERMINATED:
        raise SystemExit(TERMINATED)
    if code:
        reason = _full_disk(out) or reason_in(console.read_text("utf-8", errors="replace"))
        said = f": {reason}" if reason else ""
        raise LaunchError(
            f"measuring failed with exit code {code}{said}; see all that it printed in {console}"
        )
    if not out.stat().st_size:
        raise LaunchError(
            f"the first node wrote its log to a {out} of its own: choose by --save a folder that "
            "this host and the nodes share"
        )
