"""The options of a job's pods, for the targets that run on Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.job import given
from fsdpplan.cli.options.parse import choice, line, whole

if TYPE_CHECKING:
    from fsdpplan.emit.pods import Pods


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
            help="Between the word to save and leave, and the end.",
        ),
    ] = None


def pods_of(options: PodOptions) -> Pods:
    """The pods that the options describe."""
    from fsdpplan.emit.pods import Pods

    return Pods(**given(options))
