"""Changes that a user can make to a saved plan, each as what to type, and what each brings when the
plan is searched again with it.

The cheapest come first. What it costs is counted so:

1. settings that leave the training as it is cost nothing;
2. settings that change its numbers or its batch cost no money, but a look at the loss;
3. hardware costs by how much more of it there is: GPUs by their number, links by their bandwidth, a
   GPU by the larger of its dense FLOP/s and its memory bandwidth, each over what is there now.

Of hardware the least is named that brings what is asked: the layouts that the plan lists are priced
with more and more of it, and where one of them gets there the whole search is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import ClusterOptions, ModelOptions, TrainingOptions
from fsdpplan.cli.resolve.again import Asked, asked_again, layout_options
from fsdpplan.cli.resolve.found import best_of, fits, priced, searched
from fsdpplan.cli.resolve.inputs import Inputs, case_of
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import with_inter
from fsdpplan.files.profiles.catalogue import load_device, load_node, profile_names
from fsdpplan.search.advice.difference import Difference, Priced, difference, kept_layout
from fsdpplan.search.vocabulary import OFFERED_MULTIPLE
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan

Kind = Literal["setting", "recipe", "hardware"]
"""By what it costs, the cheapest first."""

MORE_GPUS = (9 / 8, 5 / 4, 3 / 2, 7 / 4, 2, 3, 4)
"""Times as many GPUs that are tried."""

MOST_BANDWIDTH = 16.0
"""Times as fast that links between nodes are tried."""

BANDWIDTH_STEP = 1.02
"""To which the least factor of a bandwidth is found."""

CONFIRMED_STEP = 1.1
"""By which it grows where the search then takes a simpler layout, which is a little slower."""

MOST_DEVICES = 4
"""Other GPUs that are searched."""

LARGER_BATCHES = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Other inputs of a plan."""

    kind: Kind
    relative: float
    """Of what hardware grows: so many times as much; 1: nothing is bought."""
    words: str
    """What to type after `fsdpplan what-if PLAN`; empty: nothing but that."""
    asked: Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A change that was planned again."""

    change: Change
    best: Priced | None
    """The best layout then; None where nothing fits."""
    found: Difference | None
    """From the plan to it."""
    problem: str = ""
    """Why there is none."""

    @property
    def gain_fraction(self) -> float:
        """More tokens a second than the plan's."""
        return 0.0 if self.found is None else 1 / self.found.ratio - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried: the plan, what else was typed, and the gain that is wanted."""

    plan: Plan
    asked: Asked
    before: Priced
    gain_fraction: float
    say: Callable[[str], None]
    """Told of each search before it is made."""

    def change(self, kind: Kind, relative: float = 1.0, **options: Any) -> Change:
        """Of some options, laid over those that were typed."""
        groups = {
            "model": ModelOptions,
            "cluster": ClusterOptions,
            "training": TrainingOptions,
            "layout": LayoutOptions,
        }
        laid: dict[str, Any] = {"free": bool(options.pop("free", self.asked.free))}
        for name, group in groups.items():
            own = {key: value for key, value in options.items() if key in group.__slots__}  # type: ignore[attr-defined]
            laid[name] = replace(getattr(self.asked, name), **own)
        words = [] if laid["free"] == self.asked.free else ["--free"]
        words += [
            f"--{key.replace('_', '-')} {_text(key, value)}" for key, value in options.items()
        ]
        return Change(
            kind=kind,
            relative=relative,
            words=" ".join(words),
            asked=replace(self.asked, **laid),
        )

    def search(self, change: Change) -> Tried:
        """The best layout under the change."""
        self.say(change.words or "the same inputs")
        try:
            inputs = asked_again(self.plan, change.asked)
            found = searched(inputs)
        except SpecError as error:
            return Tried(change=change, best=None, found=None, problem=str(error))
        best = best_of(inputs, found)
        if best is None:
            return Tried(change=change, best=None, found=None, problem="nothing fits then")
        return Tried(change=change, best=best, found=difference(self.before, best))

    def reaches(self, change: Change) -> bool:
        """Whether one of the layouts that the plan lists gets there under it: no search."""
        return self.gain_of_listed(change) >= self.gain_fraction

    def gain_of_listed(self, change: Change) -> float:
        """The most that one of the plan's listed layouts gains under it; -1 where none can be."""
        try:
            inputs = asked_again(self.plan, change.asked)
        except SpecError:
            return -1.0
        rates = [one.token_seconds for one in _kept(self.plan, inputs)]
        return self.before.token_seconds / min(rates) - 1 if rates else -1.0


def _text(name: str, value: Any) -> str:
    return f"{value * 8 / 1e9:.0f}Gb/s" if name.endswith("_bw") else str(value)


def _kept(plan: Plan, inputs: Inputs) -> Iterator[Priced]:
    """The layouts that the plan lists, as far as they can be kept and fit."""
    layouts: dict[Layout, None] = dict.fromkeys(
        (plan.layout, *(one.layout for one in plan.alternatives))
    )
    for layout in layouts:
        kept = kept_layout(replace(plan.case, layout=layout), case_of(inputs, layout)).layout
        if kept is not None:
            one = priced(inputs, kept)
            if fits(one):
                yield one


def changes_that_gain(trial: Trial) -> tuple[Tried, ...]:
    """All changes, planned again: those that gain enough first, the cheapest of them first; then
    the others, by what they gain."""
    tried = [trial.search(change) for change in (*_settings(trial), *_recipes(trial))]
    tried += [one for one in (_batch(trial), _fabric(trial), _more_gpus(trial)) if one is not None]
    tried += _devices(trial)
    enough = [one for one in tried if one.gain_fraction >= trial.gain_fraction]
    others = [one for one in tried if one.gain_fraction < trial.gain_fraction]
    order: tuple[Kind, ...] = ("setting", "recipe", "hardware")
    return (
        *sorted(
            enough,
            key=lambda one: (
                order.index(one.change.kind),
                one.change.relative,
                -one.gain_fraction,
            ),
        ),
        *sorted(others, key=lambda one: (one.best is None, -one.gain_fraction)),
    )


def _settings(trial: Trial) -> Iterator[Change]:
    """What leaves the training as it is: other layouts, and rows that never learn."""
    plan, free = trial.plan, trial.asked.free
    pinned = layout_options(plan) != LayoutOptions()
    if pinned and not free:
        yield trial.change("setting", free=True)
    elif not plan.alternatives or plan.layout != plan.alternatives[0].layout:
        yield trial.change("setting")
    if trial.before.case.layout.activation_checkpointing != "none":
        yield trial.change("setting", activation_checkpointing="none")
    model = trial.before.case.model
    if model.vocab_multiple == 1 and model.vocab % OFFERED_MULTIPLE:
        yield trial.change("setting", vocab_multiple=OFFERED_MULTIPLE)


def _recipes(trial: Trial) -> Iterator[Change]:
    """What changes the numbers of the training."""
    training, device = trial.before.case.training, trial.before.case.cluster.device
    if training.precision == "bf16" and training.precision_switch == "none":
        if device.peak_fp8_flops_per_second is not None:
            yield trial.change("recipe", precision="fp8")
        if training.reduce_dtype == "fp32" and trial.before.case.layout.data_parallel > 1:
            yield trial.change("recipe", reduce_dtype="bf16")
    if training.optimizer == "adamw" and device.kind == "cuda":
        yield trial.change("recipe", optimizer="adamw_8bit")


def _batch(trial: Trial) -> Tried | None:
    """The least larger batch that gains enough, or the largest."""
    batch, tried = trial.before.case.training.global_batch, None
    for times in LARGER_BATCHES:
        tried = trial.search(trial.change("recipe", float(times), global_batch=times * batch))
        if tried.gain_fraction >= trial.gain_fraction:
            return tried
    return tried


def _fabric(trial: Trial) -> Tried | None:
    """The least bandwidth between nodes that gains enough; the most that is tried where none
    does."""
    cluster = trial.before.case.cluster
    now = node_bandwidth(cluster)
    try:
        with_inter(cluster, now)
    except SpecError:  # no network between nodes, or several
        return None

    def faster(factor: float) -> Change:
        gigabits = ceil(now * factor * 8 / 1e9)
        return trial.change("hardware", gigabits * 1e9 / 8 / now, inter_bw=gigabits * 1e9 / 8)

    low, high = 1.0, MOST_BANDWIDTH
    if not trial.reaches(faster(high)):
        return trial.search(faster(high))
    while high / low > BANDWIDTH_STEP:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if trial.reaches(faster(middle)) else (middle, high)
    tried = trial.search(faster(high))
    while tried.gain_fraction < trial.gain_fraction and high < MOST_BANDWIDTH:
        high = min(MOST_BANDWIDTH, high * CONFIRMED_STEP)
        tried = trial.search(faster(high))
    return tried


def node_bandwidth(cluster: Cluster) -> float:
    """What a GPU gets between nodes, as --inter-bw says it."""
    outer = cluster.levels[-1]
    return outer.port_bandwidth_bytes_per_second * outer.ports / cluster.gpus_per_node


def _same_batch(trial: Trial) -> dict[str, int]:
    """The batch stays: its default would follow the machines."""
    batch = trial.before.case.training.global_batch
    return {} if trial.asked.training.global_batch == batch else {"global_batch": batch}


def _more_gpus(trial: Trial) -> Tried | None:
    """The fewest more GPUs that gain enough, whole nodes of them; what gains most where none do."""
    cluster = trial.before.case.cluster
    unit = cluster.gpus_per_node if cluster.nodes > 1 else cluster.gpus
    counts = dict.fromkeys(ceil(cluster.gpus * times / unit) * unit for times in MORE_GPUS)
    least = cluster.gpus * (1 + trial.gain_fraction)
    more = [
        trial.change("hardware", count / cluster.gpus, gpus=count, **_same_batch(trial))
        for count in counts
        if count >= least
    ]
    for change in more:
        if trial.reaches(change):
            tried = trial.search(change)
            if tried.gain_fraction >= trial.gain_fraction:
                return tried
    best = max(more, key=trial.gain_of_listed, default=None)
    return None if best is None else trial.search(best)


def _devices(trial: Trial) -> list[Tried]:
    """Nodes with other GPUs, the least larger first: the first that gains enough, and those before
    it."""
    cluster = trial.before.case.cluster
    tried = []
    for relative, node in other_nodes(cluster, trial.before.case.training.precision)[:MOST_DEVICES]:
        change = trial.change("hardware", relative, hardware=node, **_same_batch(trial))
        tried.append(trial.search(change))
        if tried[-1].gain_fraction >= trial.gain_fraction:
            break
    return tried


def other_nodes(cluster: Cluster, precision: str) -> list[tuple[float, str]]:
    """Nodes of the catalogue with as many GPUs of the same vendor, which are larger: by how much,
    and their name."""
    own = cluster.device
    found: dict[str, float] = {}
    for name in profile_names("device"):
        profile = load_device(name)
        device, node = profile.device, profile.table_node
        if node is None or device.kind != own.kind or device.vendor != own.vendor:
            continue
        relative = _larger(device, own, precision)
        if relative > 1 and _has_as_many(load_node(node).gpus_per_node, cluster):
            found[node] = min(relative, found.get(node, relative))
    return sorted((relative, node) for node, relative in found.items())


def _has_as_many(node_gpus: int | None, cluster: Cluster) -> bool:
    """Whether nodes of so many can stand for those of `cluster`; of a single one, a part of it."""
    if node_gpus is None or cluster.nodes == 1:
        return (node_gpus or 0) >= cluster.gpus
    return node_gpus == cluster.gpus_per_node


def _larger(device: Device, own: Device, precision: str) -> float:
    """The larger of its FLOP/s and its memory bandwidth, over those of `own`."""
    try:
        flops = device.peak_flops_per_second(precision) / own.peak_flops_per_second(precision)
    except SpecError:
        return 0.0
    memory = device.memory_bandwidth_bytes_per_second / own.memory_bandwidth_bytes_per_second
    return max(flops, memory)
