"""Detect: this host or recorded hosts, and the profile of what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.files.clusters import Flags, LoadedCluster, cluster_of
from fsdpplan.files.profiles.detected import DetectedNode, node_of
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.files.seems import seems
from fsdpplan.files.table import path_text, read_text
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.topology.conclude.gpus import gpus_of
from fsdpplan.topology.conclude.machine import machine_of, software_of
from fsdpplan.topology.conclude.slow_hosts import common_levels, weak_spots
from fsdpplan.topology.probe import record_host, record_software
from fsdpplan.topology.read.gpu_names import UNNAMED_GPU
from fsdpplan.topology.read.pasted import (
    Pasted,
    is_pasted,
    is_rocm,
    recording_of_pasted,
    says_gpus,
)
from fsdpplan.topology.read.reading import host_files
from fsdpplan.topology.read.recording import Recording, recording_from_json
from fsdpplan.topology.read.surroundings import other_accelerators_of
from fsdpplan.topology.survey import Survey, survey_of

LIMIT_BYTES = 16 * 2**20
VISIBLE = "CUDA_VISIBLE_DEVICES"


def this_host() -> Recording:
    """What is read of this host."""
    return record_host()


def software_here() -> dict[str, str | None]:
    """Versions of torch, of its NCCL and of the driver here; None where they are not known."""
    found = software_of(record_software())
    return {"torch": found.torch, "nccl": found.nccl, "driver": found.driver}


def other_accelerators_here() -> tuple[str, ...]:
    """Accelerators of this host that are not NVIDIA's, in words; a look at a few files."""
    files, _ = host_files(Path("/"))
    return other_accelerators_of(Recording(files=files))


def recorded_hosts(paths: Sequence[Path]) -> list[Recording]:
    """The hosts that the files tell of: a recording each, and what was pasted of one.

    Texts that were pasted are of one host, but for those that each show what joins its GPUs.
    Raises SpecError, headed by the file, for a file that is neither.
    """
    texts = [(path, read_text(path, limit_bytes=LIMIT_BYTES, what="recording")) for path in paths]
    pasted = [(path, text) for path, text in texts if not _is_json(text)]
    for path, text in pasted:
        if not is_pasted(text):
            raise SpecError(f"{path_text(path)}: {_not_read(text)}")
    hosts = [path for path, text in pasted if says_gpus(text)]
    if len(hosts) > 1 and len(hosts) < len(pasted):
        lost = next(path for path, _ in pasted if path not in hosts)
        raise SpecError(
            f"{path_text(lost)} does not say of which of {len(hosts)} hosts it is: put it into the "
            "file of its host"
        )
    together = [pasted] if pasted and len(hosts) < 2 else [[each] for each in pasted]
    return [_recorded(path, text) for path, text in texts if _is_json(text)] + [
        recording_of_pasted(
            [Pasted(text=text, where=path_text(path)) for path, text in each],
            host=(hosts or [each[0][0]])[0].stem if len(hosts) < 2 else each[0][0].stem,
        )
        for each in together
    ]


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[", "")


def _recorded(path: Path, text: str) -> Recording:
    try:
        return recording_from_json(text)
    except SpecError as error:
        other = "" if '"schema_version"' in text else f"; {seems(text)}"
        raise SpecError(f"{path_text(path)}: {error}{other}") from error


def _not_read(text: str) -> str:
    """Why a text is no host, and what is read instead."""
    rocm = (
        " (AMD's topology is not read: name the hardware with --hardware)" if is_rocm(text) else ""
    )
    return (
        f"{seems(text)}{rocm}; read are recordings (fsdpplan detect --record FILE), the output of "
        "nvidia-smi topo -m, nvidia-smi -L and ibstat, and what NCCL_TOPO_DUMP_FILE writes"
    )


def survey_of_recordings(recordings: Sequence[Recording]) -> Survey:
    """What follows from recorded hosts, of the GPUs that a program would see there."""
    survey = survey_of([machine_of(recording) for recording in recordings])
    hiding = [
        machine.host.name
        for machine, recording in zip(survey.machines, recordings, strict=True)
        if hidden_gpus(recording)
    ]
    findings = [f for f in survey.findings if f.kind != "gpu_missing" or f.host not in hiding]
    return replace(survey, findings=tuple(findings))


def hidden_gpus(recording: Recording) -> int:
    """How many GPUs of the host CUDA_VISIBLE_DEVICES hides from programs."""
    others = {name: text for name, text in recording.environment.items() if name != VISIBLE}
    return len(gpus_of(replace(recording, environment=others))) - len(gpus_of(recording))


def found_node(survey: Survey, *, name: str | None = None, date: str | None = None) -> NodeProfile:
    """The node profile of what was surveyed; `date`: of the reading, where it was not today.

    Raises ProbeError where there is no GPU that fsdpplan can plan for, or too little is known of
    what joins them.
    """
    machine, topology = survey.machines[survey.typical], survey.topologies[survey.typical]
    if not machine.gpus:
        raise ProbeError(_no_gpu(machine))
    if any(gpu.name == UNNAMED_GPU for gpu in machine.gpus):
        raise ProbeError(
            f"nothing says which GPUs the {len(machine.gpus)} of {machine.host.name} are: put what "
            "nvidia-smi -L prints into the file, or name the hardware with --hardware"
        )
    if len(machine.gpus) > 1 and topology.inside_bytes_per_second is None:
        raise ProbeError(
            f"what joins the {len(machine.gpus)} GPUs of {machine.host.name}, or how fast it is, "
            "could not be read: "
            "run nvidia-smi topo -m to see whether the driver says it, or name the hardware with "
            "--hardware"
        )
    taking_part = [survey.machines[index].host for index in survey.taking_part]
    hosts = compress_host_list(host.name for host in taking_part)
    found = DetectedNode(
        name=name or machine.host.name,
        hosts=hosts,
        gpus=machine.gpus,
        levels=common_levels(survey),
        nvlink_switch=all(island.kind == "nvswitch" for island in topology.islands),
        network=survey.network,
        weak=weak_spots(survey),
        date=date or datetime.now(UTC).date().isoformat(),
        host_memory_bytes=min(
            (size for host in taking_part if (size := host.memory_bytes) is not None),
            default=None,
        ),
    )
    return node_of(found)


def found_cluster(survey: Survey, flags: Flags) -> LoadedCluster:
    """The cluster that was found, with the user's flags laid over it."""
    return cluster_of(found_node(survey), None, flags)


def allocated_nodes(survey: Survey) -> int:
    """Nodes of the Slurm allocation around the typical host; 1 outside of one."""
    slurm = survey.machines[survey.typical].slurm
    return max(1, len(slurm.nodes)) if slurm is not None and slurm.job_id is not None else 1


def _no_gpu(machine: Machine) -> str:
    host = machine.host.name
    if machine.other_accelerators:
        return (
            f"{host} has {' and '.join(machine.other_accelerators)}, which fsdpplan cannot plan "
            "for as found: name declared hardware with --hardware (`fsdpplan profiles` lists it)"
        )
    nvml = next((each for each in machine.unread if each.startswith("NVML")), None)
    if nvml is not None:
        return (
            f"the GPUs of {host} could not be read ({nvml}): run nvidia-smi to see why, or name "
            "the hardware with --hardware"
        )
    return (
        f"no GPU was found on {host}: run detect on a node that has some, or name the hardware "
        "with --hardware"
    )
