"""Every node of a Slurm allocation, read at the same time by srun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.files.machines import machine_from_json
from fsdpplan.run.detect_node import texts_in
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import expand_host_list
from fsdpplan.spec.topology import Finding
from fsdpplan.topology.survey import Survey, survey_of

NODES_SECONDS = 120.0
"""How long all nodes have to answer: the first import on a cold file system takes its time."""
END_SECONDS = 10.0
"""How long srun has to end a step in which a node does not answer."""
_LEFT_OUT = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_LABELIO",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_STDERRMODE",
    "SLURM_STDOUTMODE",
    "SLURM_STEP_GRES",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
    "SRUN_CPUS_PER_TASK",
)
"""What a job says of its own tasks, which srun would take for ours: a task might then see one GPU
of eight, or its lines stand elsewhere (srun(1), "INPUT ENVIRONMENT VARIABLES")."""


_ENDED = re.compile("Killed|Terminated|forcing job termination|Job step aborted")


def survey_of_allocation(*, seconds: float = NODES_SECONDS) -> Survey:
    """Every node of the allocation that this process is in.

    Raises ProbeError outside of an allocation, and where no node answers in time.
    """
    nodes = _allocated_nodes()
    said, errors = _answers(_command(len(nodes)), seconds=seconds)
    texts = texts_in(said.splitlines())
    machines: list[Machine] = []
    unread: list[Finding] = []
    for node in nodes:
        try:
            machines.append(_machine(texts.get(node), node, errors))
        except SpecError as error:
            unread.append(_unread(node, str(error)))
    if not machines:
        raise ProbeError(
            f"none of the {len(nodes)} nodes could be read ({_why(errors, nodes[0])}): try srun "
            f"{sys.executable} -P -m fsdpplan.run.detect_node to see why"
        )
    return survey_of(machines, unread=unread)


def _allocated_nodes() -> tuple[str, ...]:
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if listed and shutil.which("srun") is None:
        raise ProbeError(
            "detect --nodes reads the nodes of this allocation by srun, which is not on PATH: type "
            "it where srun is, or give recordings of the hosts by --from"
        )
    if not listed:
        raise ProbeError(
            "detect --nodes reads the nodes of a Slurm allocation, and this is none: take one, as "
            "by salloc --nodes=4 --exclusive --gpus-per-node=8, or give recordings of several "
            "hosts by --from"
        )
    return expand_host_list(listed)


def _command(nodes: int) -> list[str]:
    """One task a node; a node that fails leaves the others alone. Inside another step (an
    interactive shell) srun would wait for its cores."""
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",  # a site may let srun end the others soon after the first one
        "--quit-on-interrupt",
        "--export=ALL",
        *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),
        sys.executable,
        "-P",  # a json.py in the folder at hand is not ours
        "-m",
        "fsdpplan.run.detect_node",
    ]


def _answers(command: Sequence[str], *, seconds: float) -> tuple[str, str]:
    """What the command printed on stdout and on stderr until its end, or until it is ended."""
    environment = {name: text for name, text in os.environ.items() if name not in _LEFT_OUT}
    # files, not pipes: what srun leaves behind cannot keep them open for us
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )
        except OSError as error:
            raise ProbeError(
                f"srun cannot be started: {error.strerror or error}; give recordings of the "
                "hosts by --from"
            ) from error
        in_time = _ended(process, seconds)
        said, errors = _text(out), _text(err)
    if in_time:
        return said, errors
    # that the step was ended is no reason why
    kept = [line for line in errors.splitlines() if not _ENDED.search(line)]
    return said, "\n".join([*kept, f"no answer within {seconds:.0f} s"])


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ended by itself in time; it has ended in either case."""
    try:
        process.wait(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _machine(text: str | None, node: str, errors: str) -> Machine:
    """What a node said, under Slurm's name for it, which `--exclude` understands.

    Raises SpecError where that is nothing, or not what this version says.
    """
    if text is None:
        raise SpecError(_why(errors, node))
    machine = machine_from_json(text, where="what it said")
    return replace(machine, host=replace(machine.host, name=node))


def _why(errors: str, node: str) -> str:
    """The last line of srun's errors about the node, else the last of all."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    own = [line for line in lines if re.search(rf"\b{re.escape(node)}\b", line)]
    return (own or lines or ["no answer in time"])[-1][:200]


def _unread(node: str, why: str) -> Finding:
    return Finding(
        kind="node_unread",
        severity="broken",
        host=node,
        where=node,
        text=f"{node} did not say what it is ({why})",
        consequence="a job with it may not start",
        remedy=f"look at it by srun --nodelist={node} hostname, or leave it out: "
        f"emit-launch --exclude {node}",
        slowdown=None,
    )
