"""The options of a job: what is asked of the scheduler, what every rank runs and in what, how the
job outlives faults, and how its pods look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, line, nodes, variable, whole, words


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the scheduler and the shell are asked for."""

    HEADING: ClassVar[str] = "Job"

    job_name: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="What the queue shows.")
    ] = None
    time: Annotated[
        str | None,
        Flag(metavar="LIMIT", parse=line, help="Time limit as sbatch reads it, such as 08:00:00."),
    ] = None
    partition: Annotated[str | None, Flag(metavar="NAME", parse=line, help="Slurm partition.")] = (
        None
    )
    account: Annotated[str | None, Flag(metavar="NAME", parse=line, help="Slurm account.")] = None
    qos: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Slurm quality of service.")
    ] = None
    reservation: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Slurm reservation.")
    ] = None
    constraint: Annotated[
        str | None,
        Flag(metavar="FEATURES", parse=line, help="Features of Slurm that the nodes must have."),
    ] = None
    output: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="Log of the job; %j is its number.")
    ] = None
    cpus_per_task: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=64), help="CPU cores a node.")
    ] = None
    signal_seconds: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=120),
            help="Seconds before the limit at which the program is told to save. Default: as steps "
            "and saves of the plan take.",
        ),
    ] = None
    exclude: Annotated[
        tuple[str, ...],
        Flag(
            metavar="NODES",
            parse=nodes,
            many=True,
            help="Nodes that the job must not get, such as n03,n[17-19]; may be repeated.",
        ),
    ] = ()
    segment: Annotated[
        bool | None,
        Flag(
            name="--segment/--no-segment",
            help="Ask for nodes that NVLink joins (NVL72) together: by --segment of sbatch, or by "
            "the pods' places. Default: where the plan counts on it.",
        ),
    ] = None
    sbatch: Annotated[
        tuple[str, ...],
        Flag(
            metavar="--NAME=VALUE",
            parse=line,
            many=True,
            help="One more option for sbatch; may be repeated.",
        ),
    ] = ()
    env_setup: Annotated[
        tuple[str, ...],
        Flag(
            metavar="LINE",
            parse=line,
            many=True,
            help="A shell line to run first, such as 'module load cuda'; may be repeated.",
        ),
    ] = ()
    env: Annotated[
        tuple[tuple[str, str], ...],
        Flag(
            metavar="NAME=VALUE",
            parse=variable,
            many=True,
            help="A variable to export; may be repeated.",
        ),
    ] = ()
    python: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="The Python that has torch.")
    ] = None
    port: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=29500), help="Port of the rendezvous."),
    ] = None
    nccl_debug: Annotated[
        str | None,
        Flag(
            metavar="VERSION|WARN|INFO",
            parse=choice(Literal["VERSION", "WARN", "INFO"]),
            help="NCCL's own log.",
        ),
    ] = None
    metrics: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="File for one JSON line a step.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """A program of the user's own in place of the reference trainer."""

    HEADING: ClassVar[str] = "Your own program instead"

    script: Annotated[
        str | None, Flag(metavar="PATH", parse=line, help="Python file that every rank runs.")
    ] = None
    args: Annotated[
        tuple[str, ...] | None,
        Flag(metavar="'WORDS'", parse=words, help="Its arguments, quoted as for a shell."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalOptions:
    """What the job does about nodes and ranks that fail."""

    HEADING: ClassVar[str] = "When something fails"

    preflight: Annotated[
        bool | None,
        Flag(
            name="--preflight/--no-preflight",
            help="Try nodes, ranks and links before training. Default: on several nodes.",
        ),
    ] = None
    retries: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=3, least=0),
            help="Starts after the first one, at most: for a bad node, or after a new checkpoint. "
            "Default: 3 with checkpoints, spares or a program of your own, else 0.",
        ),
    ] = None
    spares: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=1, least=0),
            help="Nodes more than the plan has, to take the place of bad ones.",
        ),
    ] = None
    requeue: Annotated[
        bool | None,
        Flag(
            name="--requeue/--no-requeue",
            help="Whether the job may go back into the queue. Default: with checkpoints, or a "
            "program of your own.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """What the ranks run in."""

    HEADING: ClassVar[str] = "Container"

    container: Annotated[
        str | None,
        Flag(
            metavar="IMAGE",
            parse=line,
            help="Image that the ranks run in, as the runtime names it.",
        ),
    ] = None
    container_mount: Annotated[
        tuple[str, ...],
        Flag(
            metavar="SOURCE:TARGET",
            parse=line,
            many=True,
            help="What of the host is seen inside, beside the working folder; may be repeated.",
        ),
    ] = ()
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"] | None,
        Flag(
            metavar="pyxis|apptainer",
            parse=choice(Literal["pyxis", "apptainer"]),
            help="What starts the container. Default: pyxis, which is Slurm's.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """How the pods of a job look."""

    HEADING: ClassVar[str] = "Pods (targets on Kubernetes)"

    image: Annotated[
        str | None,
        Flag(metavar="NAME", parse=line, help="Container image with torch and fsdpplan."),
    ] = None
    namespace: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Default: that of your kubectl.")
    ] = None
    queue: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Queue of Kueue's, or of Volcano's.")
    ] = None
    volumes: Annotated[
        tuple[str, ...],
        Flag(
            metavar="CLAIM:PATH",
            parse=line,
            many=True,
            help="A persistent volume claim, or a folder of the node, and where it is mounted, "
            "perhaps with :ro; may be repeated.",
        ),
    ] = ()
    rdma: Annotated[
        tuple[str, ...],
        Flag(
            metavar="RESOURCE=N",
            parse=line,
            many=True,
            help="RDMA adapters a pod, such as rdma/ib=8; may be repeated.",
        ),
    ] = ()
    topology: Annotated[
        str | None,
        Flag(
            metavar="LEVEL",
            parse=line,
            help="Keep all pods within one rack or block: the node label of Kueue's topology, or "
            "Volcano's tier.",
        ),
    ] = None
    nvlink_label: Annotated[
        str | None,
        Flag(
            metavar="KEY",
            parse=line,
            help="Label of nodes that names their NVLink domain. Default nvidia.com/gpu.clique.",
        ),
    ] = None
    topology_mode: Annotated[
        str | None,
        Flag(
            metavar="required|preferred",
            parse=choice(Literal["required", "preferred"]),
            help="Whether the job waits for such a place.",
        ),
    ] = None
    secret_env: Annotated[
        tuple[str, ...],
        Flag(
            metavar="NAME=SECRET:KEY",
            parse=line,
            many=True,
            help="A variable whose value a Secret of the cluster holds; may be repeated.",
        ),
    ] = ()
    memory: Annotated[str | None, Flag(metavar="512Gi", parse=line, help="Host memory a pod.")] = (
        None
    )
    shm_size: Annotated[
        str | None, Flag(metavar="64Gi", parse=line, help="Most that /dev/shm may take.")
    ] = None
    service_account: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Whose rights the pods have.")
    ] = None
    priority_class: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Which jobs may be pushed out for them.")
    ] = None
    pull_secret: Annotated[
        tuple[str, ...],
        Flag(
            metavar="NAME",
            parse=line,
            many=True,
            help="A Secret with which the image is pulled; may be repeated.",
        ),
    ] = ()
    node_selector: Annotated[
        tuple[str, ...],
        Flag(
            metavar="KEY=VALUE",
            parse=line,
            many=True,
            help="A label that nodes must have; may be repeated.",
        ),
    ] = ()
    toleration: Annotated[
        tuple[str, ...],
        Flag(
            metavar="KEY[=VALUE][:EFFECT]",
            parse=line,
            many=True,
            help="A taint that the pods bear, such as nvidia.com/gpu; may be repeated.",
        ),
    ] = ()
    annotation: Annotated[
        tuple[str, ...],
        Flag(
            metavar="KEY=VALUE",
            parse=line,
            many=True,
            help="An annotation of the pods, such as Multus' networks; may be repeated.",
        ),
    ] = ()
    host_network: Annotated[
        bool | None, Flag(name="--host-network", help="Pods use their node's network.")
    ] = None
    grace_seconds: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=120, least=10),
            help="Between the word to save and leave, and the end. Default: as steps and saves of "
            "the plan take, or 120.",
        ),
    ] = None
