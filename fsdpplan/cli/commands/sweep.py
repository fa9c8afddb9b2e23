"""`fsdpplan sweep`: how a training scales over numbers of GPUs, on one machine or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Each, Lists
from fsdpplan.cli.options.files import EvidenceOptions, Json
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.report import ReportFile
from fsdpplan.cli.options.scaling import GPU_COUNTS, Counts, SweepOptions
from fsdpplan.cli.resolve import Resolved
from fsdpplan.cli.resolve.cluster import DEFAULT_HARDWARE, node_gpus, resolve_cluster
from fsdpplan.cli.resolve.found import best_of, searched
from fsdpplan.cli.resolve.goal import numbers_of
from fsdpplan.cli.resolve.inputs import Inputs, Known, resolve_around
from fsdpplan.cli.resolve.model import resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.cli.views.page import require_report_place, written_report
from fsdpplan.cli.views.render import columns, tell
from fsdpplan.cli.views.side_by_side import sweep_csv, sweep_json, sweep_screen
from fsdpplan.cli.views.unfit import why_nothing_fits
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.report.side_by_side import sweep_report
from fsdpplan.search.scaling import Curve, Point
from fsdpplan.spec.model import Model
from fsdpplan.units import format_bandwidth

MACHINES = ("hardware", "gpu", "intra_bw", "inter_bw")
"""Options that may differ between machines, each with a value for each of them."""

MOST_MACHINES = 8
MOST_NODES = 64
"""So far a sweep goes where nobody says which numbers of GPUs."""


def sweep(
    *,
    model: ModelOptions,
    cluster: Annotated[
        Lists[ClusterOptions],
        Each(ClusterOptions, fields=MACHINES, instead={"gpus": GPU_COUNTS}),
    ],
    options: SweepOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    page: ReportFile,
    json: Json = False,
) -> None:
    """How a training scales over numbers of GPUs, with the knee.

    Strong scaling keeps the global batch, weak scaling that of a GPU. Without --gpus it goes from
    one GPU to 64 nodes. With several --hardware, or several links or GPUs in them, each machine has
    its curves, and they stand side by side.
    """
    if options.csv and json:
        raise SpecError("--csv and --json contradict each other: give one of them")
    require_report_place(page.report)
    machines = _machines(cluster)
    prices = _prices(options.price, machines)
    given: tuple[Counts, ...] = cluster.values.get("gpus", ())
    counts = given[0] if given else _up_to_nodes(machines)
    points = {name: _points(counts, one) for name, one in machines.items()}
    most = max(numbers[-1] for numbers in points.values())
    ask = Asking(
        model=resolve_model(model),
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
        most=most,
    )
    batch = _batch(ask, machines, points, most)
    kinds = ("strong", "weak") if options.scaling in (None, "both") else (options.scaling,)
    number = sum(map(len, points.values())) * len(kinds)
    turn = count(1)

    def point(name: str, gpus: int, kind: str) -> Point:
        working.say(f"searching: {name}, {gpus:,} GPUs, {kind} ({next(turn)} of {number})")
        return ask.point(machines[name], gpus, *_share(batch, gpus, most, kind))

    curves = [
        Curve(
            hardware=name,
            scaling=kind,
            price_per_gpu_hour=prices[name],
            points=tuple(point(name, gpus, kind) for gpus in points[name]),
        )
        for name in machines
        for kind in kinds
    ]
    said = [
        *([] if given else [f"up to {MOST_NODES} nodes, {most:,} GPUs (--gpus)"]),
        *(
            []
            if training.global_batch
            else [f"a global batch of {batch:,} sequences on {most:,} GPUs (--global-batch)"]
        ),
    ]
    if page.report is not None:
        made = sweep_report(ask.model.value.name, curves, assumptions=said)
        tell(written_report(made, page.report))
    if options.csv:
        typer.echo(sweep_csv(curves), nl=False)
    elif json:
        typer.echo(sweep_json(ask.model.value, curves))
    else:
        screen = sweep_screen(ask.model.value, curves, said, width=columns())
        typer.echo(screen)
    if not any(curve.rates for curve in curves):
        tell(f"nothing fits on any of these; {curves[0].points[-1].problem}")
        raise typer.Exit(NoFeasibleLayout.exit_code)


def _up_to_nodes(machines: dict[str, ClusterOptions]) -> Counts:
    """From one GPU to `MOST_NODES` of the largest nodes, where nobody says which numbers."""
    largest = max(node_gpus(one) or 1 for one in machines.values())
    return Counts(numbers=(1, MOST_NODES * largest), is_range=True)


def _machines(cluster: Lists[ClusterOptions]) -> dict[str, ClusterOptions]:
    """The machines by what they are called: their profile, and what else differs among them."""
    named = {name: values for name, values in cluster.values.items() if name in MACHINES}
    number = max(map(len, named.values()), default=1)
    if number > MOST_MACHINES:
        raise SpecError(f"{number} machines are too many: give {MOST_MACHINES} at most")
    for name, values in named.items():
        if len(values) not in (1, number):
            raise SpecError(
                f"--{name.replace('_', '-')} has {len(values)} values where another option has "
                f"{number}: give one for all, or one for each"
            )
    found: dict[str, ClusterOptions] = {}
    for index in range(number):
        one = cluster.at(index, gpus=None)
        one = replace(one, hardware=one.hardware or DEFAULT_HARDWARE)
        differing = [name for name, values in named.items() if len({*values}) > 1]
        words = [
            one.hardware or "",
            *(
                f"{name.replace('_', '-')} {_said(getattr(one, name))}"
                for name in differing
                if name != "hardware"
            ),
        ]
        found[", ".join(words)] = one
    return found


def _said(value: object) -> str:
    return format_bandwidth(value) if isinstance(value, float) else str(value)


def _prices(
    given: tuple[float, ...] | None, machines: dict[str, ClusterOptions]
) -> dict[str, float | None]:
    """The price of a GPU hour of each machine."""
    if given is None:
        return dict.fromkeys(machines)
    if len(given) not in (1, len(machines)):
        raise SpecError(
            f"--price has {len(given)} values for {len(machines)} machines: give one for all, or "
            "one for each"
        )
    each = given if len(given) > 1 else given * len(machines)
    return dict(zip(machines, each, strict=True))


def _points(asked: Counts, machines: ClusterOptions) -> tuple[int, ...]:
    node = node_gpus(machines) or 1  # a name that nothing has is refused here
    return numbers_of(asked, node, machines.hardware or "")


def _of_use(machines: ClusterOptions, most: int) -> ClusterOptions:
    """`machines` without the bandwidth between nodes at points of a single one, where larger points
    have a use for it."""
    node = node_gpus(machines) or 1
    if machines.inter_bw is None or not (machines.gpus or 0) <= node < most:
        return machines
    return replace(machines, inter_bw=None)


def _share(batch: int, gpus: int, most: int, kind: str) -> tuple[int, str]:
    """The global batch of a point, and what is wrong with it."""
    if kind == "strong":
        return batch, ""
    share, left = divmod(batch * gpus, most)
    if left or not share:
        return batch, f"{batch:,} sequences x {gpus:,} / {most:,} GPUs is no whole number"
    return share, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is asked at each point."""

    model: Resolved[Model]
    training: TrainingOptions
    layout: LayoutOptions
    torch: TorchOptions
    evidence: EvidenceOptions
    most: int
    """GPUs of the largest point."""
    seen: dict[tuple[Any, ...], Point] = field(default_factory=dict)
    """Points that were searched: both curves have the last one."""
    releases: list[Resolved[Any]] = field(default_factory=list)
    """The release of torch, once it was asked for."""

    def release(self) -> Resolved[Any]:
        """The release of torch: another Python is asked once."""
        if not self.releases:
            self.releases.append(resolve_torch(self.torch))
        return self.releases[0]

    def inputs(self, machines: ClusterOptions, gpus: int, batch: int | None) -> Inputs:
        """All that a search is given. Raises SpecError where there are no such machines."""
        machines = _of_use(replace(machines, gpus=gpus), self.most)
        return resolve_around(
            Known(model=self.model, cluster=resolve_cluster(machines), larger=None),
            training=replace(self.training, global_batch=batch),
            layout=self.layout,
            torch=self.release,
            evidence=self.evidence,
        )

    def point(self, machines: ClusterOptions, gpus: int, batch: int, problem: str) -> Point:
        """The answer at one point."""
        if problem:
            return Point(gpus=gpus, global_batch=None, problem=problem)
        key = (machines, gpus, batch)
        if key not in self.seen:
            self.seen[key] = _point(lambda: self.inputs(machines, gpus, batch), gpus, batch)
        return self.seen[key]


def _point(ask: Callable[[], Inputs], gpus: int, batch: int) -> Point:
    try:
        inputs = ask()
        found = searched(inputs)
    except SpecError as error:
        return Point(gpus=gpus, global_batch=batch, problem=str(error))
    best = best_of(inputs, found)
    problem = "" if best else why_nothing_fits(inputs, found.result)
    return Point(gpus=gpus, global_batch=batch, priced=best, problem=problem)


def _batch(
    ask: Asking,
    machines: dict[str, ClusterOptions],
    points: dict[str, tuple[int, ...]],
    most: int,
) -> int:
    """The global batch on the most GPUs: what was typed, or the default of the first machines that
    have so many."""
    if ask.training.global_batch is not None:
        return ask.training.global_batch
    refused: SpecError | None = None
    for name, numbers in points.items():
        if numbers[-1] == most:
            try:
                return ask.inputs(machines[name], most, None).training.global_batch
            except SpecError as error:
                refused = error
    assert refused is not None
    raise refused
