"""A calibration: the profile that it starts from, and what becomes of what was measured."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.errors import GateFailed, SpecError
from fsdpplan.files.clusters import Flags, LoadedCluster, cluster_of
from fsdpplan.files.profiles.catalogue import (
    load_device,
    load_machines,
    load_node,
    profile_for_gpus,
)
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.profiles.measured import NumberSource, ProfileHead, measured_profile_text
from fsdpplan.files.profiles.nodes import ClusterProfile, NodeProfile
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run import detect
from fsdpplan.spec.cluster import DeviceKind
from fsdpplan.spec.measurement import MeasuredMachine, Measurement
from fsdpplan.topology import probe
from fsdpplan.validate.calibrate.calibrated import Calibration, calibrated
from fsdpplan.validate.calibrate.check_machine import gates, slow_parts
from fsdpplan.validate.compare.gates import Gate

CPU = "cpu"

DEFAULT_TOLERANCE = 0.2

DOUBLINGS = 12
"""Nodes are doubled so often at most to reach all levels of a profile."""

NAMED = 3
"""Slow parts that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The profile whose numbers hold where nothing was measured."""

    profile: NodeProfile | ClusterProfile
    folder: Path | None
    """Where its relatives may lie."""
    words: str
    """Where it is from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, and the cluster that the profile makes of it."""

    rows: tuple[Measurement, ...]
    machine: MeasuredMachine
    start: Start
    loaded: LoadedCluster
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A calibration that was written."""

    measured: Measured
    calibration: Calibration
    place: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A machine beside its profile."""

    measured: Measured
    tolerance: float
    gates: tuple[Gate, ...]
    slow: tuple[Gate, ...]


def named_start(hardware: str | None) -> Start | None:
    if hardware is None:
        return None
    profile, folder = load_machines(hardware)
    return Start(profile=profile, folder=folder, words=f"profile {hardware}")


def start_of_log(machine: MeasuredMachine) -> Start:
    """The catalogue's profile of what the log was measured on."""
    name: str | None = CPU
    if machine.device_kind == "cuda":
        name = profile_for_gpus([machine.device_name] * machine.ranks_per_node)
    if name is None:
        raise SpecError(
            f"no profile has {machine.ranks_per_node} x {machine.device_name}: say by --hardware "
            "which one to start from"
        )
    start = named_start(name)
    assert start is not None
    return start


def detected_start() -> Start:
    """What this machine is."""
    if not probe.visible_gpus():
        raise SpecError(
            "no GPU was found here: measure CPU processes by --hardware cpu --processes 4, or fit "
            "a log of another machine by --from"
        )
    survey = detect.survey_of_recordings([detect.this_host()])
    return Start(profile=detect.found_node(survey), folder=None, words="what was found here")


def visible_devices(kind: DeviceKind, start: Start) -> int:
    """Processes where the user does not say how many: one a GPU."""
    if kind == "cpu":
        raise SpecError("CPU processes have no usual number: say how many, such as --processes 4")
    gpus = len(probe.visible_gpus())
    if not gpus:
        raise SpecError(
            f"{start.words} has GPUs, but none was found here: measure on such a machine, or fit "
            "its log by --from"
        )
    return gpus


def device_of(start: Start) -> DeviceProfile:
    node = _node(start)
    return node.own_device or load_device(node.device, beside=start.folder)


def _node(start: Start) -> NodeProfile:
    if isinstance(start.profile, NodeProfile):
        return start.profile
    return load_node(start.profile.node_types[0].node, beside=start.folder)


def start_cluster(start: Start, machine: MeasuredMachine) -> LoadedCluster:
    """The nodes that were measured, and so many more of them that all levels of the profile are
    there: those that were not reached stay in it."""
    nodes = len(machine.hosts)
    found = _nodes_of(start, machine, nodes)
    for _ in range(DOUBLINGS):
        nodes *= 2
        try:
            larger = _nodes_of(start, machine, nodes)
        except SpecError:  # it cannot be so large
            break
        if len(larger.cluster.levels) > len(found.cluster.levels):
            found = larger
    return found


def _nodes_of(start: Start, machine: MeasuredMachine, nodes: int) -> LoadedCluster:
    per_node = machine.ranks_per_node
    flags = Flags(gpus=nodes * per_node, gpus_per_node=per_node)
    return cluster_of(start.profile, start.folder, flags)


def fitted(measured: Measured, *, place: Path) -> Fitted:
    """Fit the numbers, and write the profile."""
    calibration = calibrated(measured.rows, measured.loaded.cluster)
    calibration = replace(calibration, notes=(*_other_name(measured), *calibration.notes))
    text = measured_profile_text(
        cluster=calibration.cluster,
        sources={**_taken_over(measured.loaded), **calibration.sources},
        head=_head(measured, place),
    )
    write_text_atomically(place, text, advice="choose another place by --save")
    return Fitted(measured=measured, calibration=calibration, place=place)


def _other_name(measured: Measured) -> tuple[str, ...]:
    """A sentence where the driver calls the device otherwise than the profile: its peaks may be
    another one's."""
    known, name = device_of(measured.start).nvml_names, measured.machine.device_name
    if not known or name in known:
        return ()
    return (
        f"measured on {name}, but {measured.start.words} is of {' or '.join(known)}: shares are of "
        "its peaks; name the right one with --hardware",
    )


def _taken_over(loaded: LoadedCluster) -> dict[str, NumberSource]:
    return {field: NumberSource(key="taken_over", what=said) for field, said in loaded.sources}


def _head(measured: Measured, place: Path) -> ProfileHead:
    machine = measured.machine
    is_cpu = machine.device_kind == "cpu"
    return ProfileHead(
        name=place.stem,
        description=f"{machine_words(machine)}; from {measured.start.words}",
        device_description=f"{machine.device_name}, as measured",
        nvml_names=() if is_cpu else (machine.device_name,),
        any_size=_node(measured.start).gpus_per_node is None,
    )


def machine_words(machine: MeasuredMachine) -> str:
    """What was measured on, in a line."""
    what = "processes on " if machine.device_kind == "cpu" else "x "
    hosts = machine.hosts[0] if len(machine.hosts) == 1 else f"{len(machine.hosts)} hosts"
    nccl = f", NCCL {machine.nccl}" if machine.nccl else ""
    return (
        f"{machine.world} {what}{machine.device_name}, {hosts}, measured {machine.date[:10]} "
        f"({machine.backend}, torch {machine.torch}{nccl})"
    )


def next_words(fitted: Fitted) -> str:
    """Where the profile is, and what to do with it."""
    place = shlex.quote(str(fitted.place))
    machine = fitted.measured.machine
    params = "10e6" if machine.device_kind == "cpu" else "8e9"
    return (
        f"saved as {fitted.place} (measured: {fitted.measured.log}); next: fsdpplan recommend "
        f"--hardware {place} --gpus {machine.world} --params {params}"
    )


def checked(measured: Measured, *, tolerance: float | None) -> Checked:
    """Compare all that was measured with the profile, and equals with each other."""
    limit = DEFAULT_TOLERANCE if tolerance is None else tolerance
    found = gates(measured.rows, measured.loaded.cluster, tolerance=limit)
    return Checked(measured=measured, tolerance=limit, gates=found, slow=slow_parts(found))


def failure(checked: Checked) -> GateFailed | None:
    """What is slow, the worst first; None: the machine is healthy."""
    if not checked.slow:
        return None
    worst = sorted(checked.slow, key=lambda gate: gate.limit / gate.factor)
    named = [
        f"{gate.where} {'are' if gate.kind == 'device' else 'is'} {gate.factor:.2f}x slower in "
        f"{gate.what} than {_expected(gate)} (limit {gate.limit:.2f}x)"
        for gate in worst[:NAMED]
    ]
    more = f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    advice = "fsdpplan detect says what is degraded"
    if any(gate.against == "equals" for gate in worst):
        advice = "leave the node out by emit-launch --exclude"
    return GateFailed(f"{'; '.join(named)}{more}: {advice}, or allow more by --tolerance")


def _expected(gate: Gate) -> str:
    return "the profile says" if gate.against == "profile" else "its equals"
