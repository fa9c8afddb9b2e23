"""The preflight: under a minute before training in which nodes, ranks and links are tried.

    torchrun ... -m fsdpplan.trainer.preflight --run-folder DIR     # before a program of your own

Every rank has to come, to run on the same versions and GPUs, to get right sums from a tiny
all-reduce over each axis of the mesh, and to reach, inside its node and with other nodes, about
what the others reach. Then a tiny model steps on the mesh, as one process does. What fails is said
in one sentence; where it is the fault of few nodes their names go into `bad-nodes`, so that the job
can start again without them. It ends with exit code 5.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..config import PLAN_VARIABLE, PlanConfig, load_plan
from ..errors import PreflightFailed, RankError, TrainerError
from ..options import number, wants_numbers
from ..parallel.distributed import leave, require_world, start
from ..parallel.mesh import Meshes, build_meshes
from ..parallel.support import require_runnable
from ..private_torch import group_of
from ..rehearse.counting import Axis, layout_axes
from ..report import complain
from ..shared import trainer_options
from .findings import Findings
from .links import Nodes, gathered_speeds, judge_sums, measure, sent_bytes, sum_over
from .nccl import judge_transports, planned_adapters, uses_sockets, write_log
from .numbers import Numbers
from .report import append_bad_nodes, bad_nodes_words, planned_nodes, write_result
from .roll import Presence, host_name, judge_roll, presence, versions
from .speed import Promise, Where, judge_speeds, levels, levels_words, promised
from .watch import JOIN_FACTOR, Council, Watch

LINKS_FACTOR = 2.0
"""Slow links take longer than dead ones are waited for."""
TRIES = 2
"""A slow node is measured again: only what is slow each time is the node's fault."""


@dataclass(slots=True)
class Preflight:
    """One preflight on this rank. What it found so far is on rank 0."""

    plan: PlanConfig
    folder: Path | None
    seconds: float
    rank: int
    world: int
    cluster: bool = True
    """Try nodes, ranks and links."""
    numbers: bool = True
    """Step a tiny model."""
    adamw: str = "fused"
    """How the tiny model's optimizer computes."""
    trial: int = field(default_factory=count().__next__)
    """Of this process, which is in step with the others."""
    result: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """What was found good, for people."""
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Meshes:
        """Try everything. Raises PreflightFailed on all ranks; ends the process where ranks do not
        come."""
        reads_log = self.cluster and self._uses_nccl()
        nccl_log = write_log(self.folder, os.environ) if reads_log else None
        watch = Watch(
            rank=self.rank,
            world=self.world,
            host=host_name(),
            seconds=self.seconds,
            found=self._conclude,
            nodes=planned_nodes(self.folder),
            trial=self.trial,
        )
        watch.start("the start of the ranks")
        try:
            meshes = self._try(watch, nccl_log)
        except RuntimeError as error:  # whatever torch's collectives raise
            watch.fail(error)
        except TrainerError:
            watch.finish()
            raise
        watch.finish()
        self._conclude(Findings())
        return meshes

    def _try(self, watch: Watch, nccl_log: Path | None) -> Meshes:
        device = start(self.plan)
        watch.enter("the roll of the ranks")
        # rank 0 waits for all, and the watch for rank 0
        council = Council(
            rank=self.rank,
            world=self.world,
            seconds=2 * JOIN_FACTOR * self.seconds,
            trial=self.trial,
        )
        hosts = self._call_roll(council, device) if self.cluster else self._call_hosts(council)
        watch.know(hosts)
        watch.enter("making the process groups")
        meshes = build_meshes(self.plan.layout, device.type)
        if self.cluster:
            self._try_cluster(watch, council, meshes, device, hosts, nccl_log)
        if self.numbers:
            self._try_numbers(watch, council, meshes, device, hosts)
        return meshes

    def _try_cluster(
        self,
        watch: Watch,
        council: Council,
        meshes: Meshes,
        device: torch.device,
        hosts: Sequence[str],
        nccl_log: Path | None,
    ) -> None:
        self._try_axes(watch, council, meshes, device, hosts)
        nodes = Nodes.of(hosts)
        if nodes is None:
            self.warnings.append("ranks of one node do not follow each other: no link is measured")
        else:
            self._try_links(watch, council, nodes, device)
        if self._uses_nccl():
            watch.enter("reading NCCL's log")
            self._check_transports(council, nccl_log)

    def _try_numbers(
        self,
        watch: Watch,
        council: Council,
        meshes: Meshes,
        device: torch.device,
        hosts: Sequence[str],
    ) -> None:
        """A tiny model's step, in the groups of training."""
        verdict = Numbers(
            plan=self.plan, meshes=meshes, device=device, hosts=hosts, adamw=self.adamw
        ).run(watch, council)
        self.result["numbers"] = verdict["result"]
        self.lines["numbers"] = verdict["line"]
        self._act(council, verdict)

    def _uses_nccl(self) -> bool:
        return self.plan.cluster.device.kind == "cuda"

    def _call_hosts(self, council: Council) -> list[str]:
        """The host of each rank."""

        def judge(said: list[str]) -> dict[str, Any]:
            return {"hosts": said}

        hosts: list[str] = council.decide("hosts", host_name(), judge)["hosts"]
        self.result = {"ranks": self.world, "nodes": list(dict.fromkeys(hosts))}
        return hosts

    def _call_roll(self, council: Council, device: torch.device) -> list[str]:
        """Who is there; the host of each rank."""

        def judge(said: list[dict[str, Any]]) -> dict[str, Any]:
            roll = [Presence(**one) for one in said]
            hosts = [one.host for one in roll]
            self.result = {"ranks": self.world, "nodes": list(dict.fromkeys(hosts))}
            self.result["versions"] = versions(roll)
            return {"hosts": hosts, **judge_roll(roll, self.plan).document()}

        hosts: list[str] = self._decide(
            council, "roll", asdict(presence(device, self.rank)), judge
        )["hosts"]
        return hosts

    def _try_axes(
        self,
        watch: Watch,
        council: Council,
        meshes: Meshes,
        device: torch.device,
        hosts: Sequence[str],
    ) -> None:
        """A tiny all-reduce over each axis of more than one rank, in the groups of training."""
        seconds: dict[str, float] = {}
        wrong: list[str] = []
        groups: dict[str, list[str]] = {}
        for axis in tried_axes(meshes, self.plan):
            ranks = sorted(axis.ranks)
            watch.enter(f"the all-reduce over {axis.name}", group=ranks)
            is_right, seconds[axis.name] = sum_over(group_of(axis.group_name), device)
            groups[axis.name] = [hosts[rank] for rank in ranks]
            wrong += [] if is_right else [axis.name]

        def judge(said: list[dict[str, Any]]) -> dict[str, Any]:
            wrongs = [one["wrong"] for one in said]
            self.result["axes"] = {
                axis: {
                    "ranks": len(of),
                    "ok": not any(axis in each for each in wrongs),
                    "seconds": max(one["seconds"].get(axis, 0.0) for one in said),
                }
                for axis, of in groups.items()
            }
            return judge_sums(wrongs, [one["groups"] for one in said]).document()

        watch.enter("comparing the sums")
        value = {"wrong": wrong, "seconds": seconds, "groups": groups}
        self._decide(council, "axes", value, judge)

    def _try_links(
        self, watch: Watch, council: Council, nodes: Nodes, device: torch.device
    ) -> None:
        """Bandwidths, and a second time where some node is slow."""
        ranks: dict[Where, int] = {"inside": nodes.per_node, "between": len(nodes.hosts)}
        promises: dict[str, Promise | None] = {
            where: promised(
                self.plan.cluster,
                where,
                nodes=len(nodes.hosts),
                per_node=nodes.per_node,
                sent_bytes=sent_bytes(device.type, count),
            )
            for where, count in ranks.items()
        }

        def judge(rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
            speeds = gathered_speeds(rows)
            found = levels(speeds, promises)
            self.result["levels"] = [level.document() for level in found]
            self.lines["levels"] = levels_words(found)
            return judge_speeds(speeds, promises, is_cpu=device.type == "cpu").document()

        for attempt in range(TRIES):
            watch.enter("measuring the links", factor=LINKS_FACTOR)
            rows = measure(nodes, device)
            is_last = attempt == TRIES - 1
            verdict = council.decide(f"links {attempt}", rows, judge)
            if not verdict["problem"] or is_last:
                break
        self._act(council, verdict)

    def _check_transports(self, council: Council, log: Path | None) -> None:
        adapters = planned_adapters(self.plan.cluster)
        lines: list[str] = []
        if log is not None and log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        says_sockets = adapters is not None and uses_sockets(lines)

        def judge(hosts: list[str | None]) -> dict[str, Any]:
            self.result["transports_read"] = log is not None
            return judge_transports([host for host in hosts if host], adapters).document()

        self._decide(council, "transports", host_name() if says_sockets else None, judge)

    def _decide(
        self,
        council: Council,
        subject: str,
        value: Any,
        judge: Callable[[list[Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        verdict = council.decide(subject, value, judge)
        self._act(council, verdict)
        return verdict

    def _act(self, council: Council, verdict: dict[str, Any]) -> None:
        """All ranks do the same with what rank 0 found."""
        found = Findings.of(verdict)
        self.warnings += found.warnings
        if found.problem:
            if self.rank == 0:
                self._record(found)
            council.close()
            raise PreflightFailed(self._sentence(found))

    def _sentence(self, found: Findings) -> str:
        return f"preflight: {found.problem}{bad_nodes_words(self.folder, found.bad)}"

    def _record(self, found: Findings) -> None:
        seconds = time.monotonic() - self.began
        document = {
            "passed": not found.problem,
            "problem": found.problem or None,
            "seconds": round(seconds, 3),
            **self.result,
            "bad_nodes": dict(found.bad),
            "warnings": self.warnings,
        }
        append_bad_nodes(self.folder, found.bad)
        write_result(self.folder, document)
        if found.problem:
            return
        nodes = len(document["nodes"])
        passed = f"{self.world} ranks on {nodes} node{'s' if nodes > 1 else ''} in {seconds:.1f} s"
        said = "; ".join([passed, *filter(None, self.lines.values())])
        for text in (said, *self.warnings):
            print(f"preflight: {text}", file=sys.stderr, flush=True)

    def _conclude(self, found: Findings) -> None:
        """At the end, on rank 0; or where the watch ends it, on the rank that found out."""
        if found.problem:
            self._record(found)
            print(f"error: {self._sentence(found)}", file=sys.stderr, flush=True)
        elif self.rank == 0:
            self._record(found)


def preflight(
    plan: PlanConfig,
    *,
    folder: Path | None,
    seconds: float,
    cluster: bool = True,
    numbers: bool = True,
    adamw: str = "fused",
) -> Meshes | None:
    """Join the process group and try it, before anything else: nodes, ranks and links (`cluster`),
    and a tiny model's step (`numbers`). The meshes that it made, which training can go on with;
    None where nothing is tried: of one rank, or of ranks that met without a launcher's store."""
    world = plan.layout.world
    if world == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    if not (cluster or numbers):
        return None
    return Preflight(
        plan=plan,
        folder=folder,
        seconds=seconds,
        rank=int(os.environ["RANK"]),
        world=world,
        cluster=cluster,
        numbers=numbers,
        adamw=adamw,
    ).run()


_tried: set[PlanConfig] = set()
"""Plans whose numbers were right in this process."""


def preflight_of_program(plan: PlanConfig, wanted: bool | None = None) -> Meshes | None:
    """The numerical part, for `parallelize` in a program of the user's own: once for each plan,
    where ranks can reach the store of their launcher. A failure that nobody catches ends the
    program as it ends the trainer."""
    if wanted is None:
        wanted = wants_numbers() and plan not in _tried
    if not wanted or _is_fake():
        return None
    try:
        meshes = preflight(
            plan, folder=None, seconds=trainer_options.PREFLIGHT_SECONDS, cluster=False
        )
    except PreflightFailed:
        sys.excepthook = _ending(sys.excepthook)
        raise
    _tried.add(plan)
    return meshes


def _is_fake() -> bool:
    """Whether the other ranks are not there."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def _ending(hook: Callable[..., Any]) -> Callable[..., Any]:
    """An exception hook that ends the process with the preflight's exit code and sentence."""

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PreflightFailed):
            hook(kind, error, trace)
            return
        complain(f"error: {error}")
        leave(error.exit_code)

    return end


def tried_axes(meshes: Meshes, plan: PlanConfig) -> list[Axis]:
    """Axes of more than one rank, in the same order on all ranks."""
    return [axis for axis in layout_axes(meshes, plan.layout) if len(axis.ranks) > 1]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The preflight by itself, under torchrun."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m fsdpplan.trainer.preflight",
        description="Try nodes, ranks and links before a program of your own.",
    )
    parser.add_argument("--plan", metavar="FILE", help=f"otherwise the JSON in ${PLAN_VARIABLE}")
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="shared, for what is found")
    parser.add_argument(
        "--preflight-seconds",
        type=number(above=0),
        default=trainer_options.PREFLIGHT_SECONDS,
        metavar="N",
        help="most that ranks wait for each other (default: %(default)g)",
    )
    parser.add_argument(
        "--numbers",
        action=argparse.BooleanOptionalAction,
        default=wants_numbers(),
        help="step a tiny model and compare it with one process "
        f"({trainer_options.NUMBERS_VARIABLE}=0: not)",
    )
    options = parser.parse_args(arguments)
    try:
        plan = load_plan(options.plan)
        require_runnable(plan)
        require_world(plan)
        preflight(
            plan,
            folder=options.run_folder,
            seconds=options.preflight_seconds,
            numbers=options.numbers,
        )
        exit_code = 0
    except TrainerError as error:
        complain(f"error: {error}", every_rank=isinstance(error, RankError))
        exit_code = error.exit_code
    except Exception:
        traceback.print_exc()
        exit_code = 1
    leave(exit_code)
