"""`fsdpplan detect`: what this machine, or every node of an allocation, is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.views.hosts import findings_block, hosts_blocks
from fsdpplan.cli.views.profiles import profile_document
from fsdpplan.cli.views.render import blocks, columns, note, tell, wrapped
from fsdpplan.errors import FsdpPlanError, SpecError
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.files.profiles.saved import node_text
from fsdpplan.files.table import path_text
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run import detect as reading
from fsdpplan.run.engines.allocation import survey_of_allocation
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.topology import Finding, Topology
from fsdpplan.topology.read.recording import Recording, recording_json
from fsdpplan.topology.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectOptions:
    """Which hosts to read, and what to keep."""

    HEADING: ClassVar[str] = "Hosts"

    nodes: Annotated[
        bool | None,
        Flag(name="--nodes", help="Every node of the Slurm allocation that this is in."),
    ] = None
    recordings: Annotated[
        tuple[Path, ...],
        Flag(
            name="--from",
            metavar="FILE",
            parse=path,
            many=True,
            help="A host that --record wrote, or the output of nvidia-smi topo -m, nvidia-smi "
            "-L, ibstat, or NCCL_TOPO_DUMP_FILE, in place of this one; may be repeated.",
        ),
    ] = ()
    save: Annotated[
        str | None,
        Flag(
            metavar="NAME|PATH",
            parse=line,
            help="Write the cluster profile, for --hardware: NAME.toml here, or a path.",
        ),
    ] = None
    record: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Write all that was read of this host, to look at it elsewhere.",
        ),
    ] = None


def detect(*, options: DetectOptions, json: Json = False) -> None:
    """What this machine and its network are, and their profile."""
    seen = look(options)
    said = keep(seen, options)
    if json:
        typer.echo(detect_json(seen))
    else:
        typer.echo(detect_screen(seen, width=columns()))
    for sentence in said:
        note(sentence)
    if options.save is not None and seen.problem is not None:
        tell(f"nothing is saved in {options.save}: {seen.problem}")
        raise typer.Exit(seen.problem.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was read, and the profile that follows."""

    survey: Survey
    hidden: tuple[str, ...]
    """Sentences on GPUs that programs do not see."""
    recording: Recording | None
    """Of this host; None where others were read."""
    profile: NodeProfile | None
    problem: FsdpPlanError | None
    """Why there is no profile."""


def look(options: DetectOptions) -> Seen:
    """Read the hosts that the options name."""
    if options.nodes and options.recordings:
        raise SpecError("--nodes and --from name other hosts: give one of them")
    if options.record is not None and (options.nodes or options.recordings):
        raise SpecError("--record writes what is read of this host: leave out --nodes and --from")
    date, name = None, None if options.save is None else _place(options.save).stem
    recordings: list[Recording] = []
    if options.nodes:
        survey = survey_of_allocation()
    else:
        recordings = reading.recorded_hosts(options.recordings) or [reading.this_host()]
        survey = reading.survey_of_recordings(recordings)
        date = min((each.date for each in recordings if each.date), default=None)
    try:
        profile, problem = reading.found_node(survey, name=name, date=date), None
    except FsdpPlanError as error:
        profile, problem = None, error
    return Seen(
        survey=survey,
        hidden=_hidden(survey, recordings),
        recording=None if options.nodes or options.recordings else recordings[0],
        profile=profile,
        problem=problem,
    )


def _hidden(survey: Survey, recordings: Sequence[Recording]) -> tuple[str, ...]:
    return tuple(
        f"{reading.VISIBLE} hides {hidden} of the {hidden + len(machine.gpus)} GPUs of "
        f"{machine.host.name} from programs, and so from here."
        for machine, recording in zip(survey.machines, recordings, strict=False)
        if (hidden := reading.hidden_gpus(recording))
    )


def keep(seen: Seen, options: DetectOptions) -> list[str]:
    """Write what was asked for, as far as it is there; sentences on it."""
    said = []
    if options.record is not None and seen.recording is not None:
        write_text_atomically(options.record, recording_json(seen.recording))
        said.append(
            f"recorded in {path_text(options.record)}; it names this host, its adapters and its "
            "networks"
        )
    if options.save is not None and seen.profile is not None:
        place = _place(options.save)
        write_text_atomically(place, node_text(seen.profile), advice="give another --save")
        said.append(_saved(place, seen))
    return said


def _saved(place: Path, seen: Seen) -> str:
    """Where the profile is, who is not in it, and what to type next."""
    left_out = ""
    if seen.survey.left_out:
        names = ",".join(seen.survey.left_out)
        left_out = f", without {names}, whose GPUs are others (emit-launch --exclude {names})"
    nodes = len(seen.survey.taking_part)
    gpus = len(seen.survey.machines[seen.survey.typical].gpus)
    count = "" if nodes == 1 else f" --gpus {nodes * gpus}"
    return (
        f"saved as {place}{left_out}; next: fsdpplan recommend --hardware "
        f"{shlex.quote(str(place))} --params 8e9{count}"
    )


def _place(save: str) -> Path:
    """`NAME.toml` here, or the path that was given; always one that --hardware takes for a path."""
    place = Path(save)
    if not place.name or place.name == "..":
        raise SpecError(f"--save: {save!r} is no name of a file; type one such as mynode")
    if place.suffix != ".toml":
        place = place.with_name(f"{place.name}.toml")
    return place


class HostJson(TypedDict):
    """One host: what was read, and what follows."""

    machine: Annotated[dict[str, Any], Machine]
    topology: Annotated[dict[str, Any], Topology]


class FollowsFromJson(TypedDict):
    """What `detect --json` prints beside the fields of a node's profile."""

    profile_problem: str | None
    """Why there is no profile: its fields are null, or empty."""
    typical_host: str
    """The host that the profile is of."""
    left_out: list[str]
    """Hosts whose GPUs are others."""
    hosts: list[HostJson]
    findings: list[Annotated[dict[str, Any], Finding]]


def detect_json(seen: Seen) -> str:
    """What `detect --json` prints: the node profile, and beside it what it follows from."""
    survey = seen.survey
    document: FollowsFromJson = {
        "profile_problem": None if seen.problem is None else str(seen.problem),
        "typical_host": survey.machines[survey.typical].host.name,
        "left_out": list(survey.left_out),
        "hosts": [
            {"machine": asdict(machine), "topology": asdict(topology)}
            for machine, topology in zip(survey.machines, survey.topologies, strict=True)
        ],
        "findings": [asdict(finding) for finding in survey.findings],
    }
    return json.dumps({**_profile(seen.profile), **document}, indent=2, allow_nan=False)


def _profile(profile: NodeProfile | None) -> Mapping[str, Any]:
    """The profile as `profiles NAME --json` has it; without one the same names, of nothing."""
    if profile is not None:
        return profile_document(profile)
    nothing = {field.name: None for field in fields(NodeProfile)}
    return {"kind": "node", **nothing, "levels": [], "weak": [], "sources": {}}


def detect_screen(seen: Seen, *, width: int) -> str:
    """What `detect` prints."""
    return blocks(
        *hosts_blocks(seen.survey, width=width),
        findings_block(seen.survey, width=width),
        *(wrapped(sentence, width=width) for sentence in seen.hidden),
        "" if seen.problem is None else wrapped(f"No profile: {seen.problem}.", width=width),
    )
