"""The program of one rank: join the others, measure, leave."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

from fsdpplan.errors import FsdpPlanError
from fsdpplan.spec.measurement import MeasuredMachine
from fsdpplan.topology.measure.attention import attention_cells
from fsdpplan.topology.measure.collectives import (
    Groups,
    axis_groups,
    call_cells,
    level_groups,
    pair_cells,
    pair_rounds,
)
from fsdpplan.topology.measure.compute import matmul_cells
from fsdpplan.topology.measure.memory import copy_cells, launch_cells, memory_cells
from fsdpplan.topology.measure.ranks import Ranks, cpu_name, host_name, host_room_bytes, join
from fsdpplan.topology.measure.runner import Cell, Log, Runner
from fsdpplan.topology.measure.settings import Settings, parse

if TYPE_CHECKING:
    import torch

ROOM_FRACTION = 0.5
"""Share of the free memory that one measurement may need."""


def main() -> NoReturn:
    """Measure as the arguments say, and end with the exit code of what went wrong."""
    # A signal ends this process at once, also where it waits for other ranks: what is known is in
    # the log.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # until torch is imported, of which nothing is garbage
    try:
        settings, out = parse(sys.argv[1:])
        ranks = join(settings.device)
        gc.freeze()
        gc.enable()
        log = Log(out) if ranks.rank == 0 else None
    except FsdpPlanError as error:
        print(f"measure: {error}", file=sys.stderr, flush=True)
        # no rank may wait here for the interpreter to end a process group
        os._exit(error.exit_code)
    try:
        _measure(settings, ranks=ranks, log=log)
    except Exception:
        traceback.print_exc()
        ranks.leave(1)
    ranks.leave(0)


def _measure(settings: Settings, *, ranks: Ranks, log: Log | None) -> None:
    began = time.monotonic()
    machine = _machine(ranks)
    if log is not None:
        log.write(machine)
    runner = Runner(ranks=ranks, log=log, seconds=settings.seconds, began=began)
    levels = level_groups(world=ranks.world, ranks_per_node=ranks.ranks_per_node)
    axes, notes = axis_groups(settings.axes, world=ranks.world, known=levels)
    for note in (*notes, *_differences(ranks)):
        runner.say(note)
    cells = list(_cells(settings, ranks=ranks, groups=(*levels, *axes)))
    runner.run(cells, room_bytes=_room_bytes(ranks))


def _cells(settings: Settings, *, ranks: Ranks, groups: tuple[Groups, ...]) -> Iterator[Cell]:
    """All that can be measured, in the order of a pass."""
    yield from launch_cells(ranks.device)
    yield from memory_cells(ranks.device)
    yield from copy_cells(ranks.device)
    yield from matmul_cells(settings, ranks.device)
    yield from attention_cells(settings, ranks.device)
    if ranks.talks:
        rounds = pair_rounds(world=ranks.world, ranks_per_node=ranks.ranks_per_node)
        yield from pair_cells(rounds, sizes=settings.sizes, ranks=ranks)
        yield from call_cells(groups, sizes=settings.sizes, ranks=ranks)


def _machine(ranks: Ranks) -> MeasuredMachine:
    """What is measured on, as rank 0 sees it."""
    import torch

    hosts = ranks.texts(host_name())[:: ranks.ranks_per_node]
    is_cuda = ranks.device.type == "cuda"
    properties = torch.cuda.get_device_properties(ranks.device) if is_cuda else None
    return MeasuredMachine(
        world=ranks.world,
        ranks_per_node=ranks.ranks_per_node,
        hosts=tuple(hosts),
        device_kind="cuda" if is_cuda else "cpu",
        device_name=_device_name(ranks.device),
        memory_bytes=properties.total_memory if properties else None,
        multiprocessors=properties.multi_processor_count if properties else None,
        backend="nccl" if is_cuda else "gloo",
        torch=str(torch.__version__),
        nccl=_nccl_version() if is_cuda else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _nccl_version() -> str:
    import torch

    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name()


def _differences(ranks: Ranks) -> Iterator[str]:
    """In words, which ranks have another device than rank 0."""
    names = ranks.texts(_device_name(ranks.device))
    for rank, name in enumerate(names):
        if name != names[0]:
            yield f"rank {rank} has a {name}, rank 0 a {names[0]}: the log names the latter"


def _room_bytes(ranks: Ranks) -> float:
    """Memory that one rank may use for one measurement; the least of all ranks."""
    import torch

    if ranks.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(ranks.device)[0])
    else:
        free = host_room_bytes() / ranks.ranks_per_node
    (most_lacking,) = ranks.largest(-free)
    return -ROOM_FRACTION * most_lacking
