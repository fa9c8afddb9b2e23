"""Segments: nodes whose GPUs NVLink joins (NVL72), which a scheduler has to give together.

A plan lays its ranks domain by domain. Where the nodes of a job lie otherwise, groups that were
priced on NVLink go over the network, at a tenth of its rate or less.

Source: Slurm's topology guide (topology/block, `--segment`: the nodes of a job are made of segments
of so many, each within a block; their number must be a multiple of it); kueue
apis/kueue/v1beta1/topology_types.go (`podset-slice-required-topology`, since 0.13);
GPU feature discovery of NVIDIA's GPU operator (the label `nvidia.com/gpu.clique`).
"""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.safe_text import paragraph
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

CLIQUE_LABEL = "nvidia.com/gpu.clique"
"""Of nodes whose GPUs one NVLink domain joins; its value names the domain."""


def segment_nodes(plan: Plan, job: Job) -> int | None:
    """Nodes that have to lie in one NVLink domain, or None where that is not asked for. Raises
    SpecError where it is asked for without meaning, or spare nodes break it."""
    nodes = plan.cluster.segment_nodes
    if nodes is None:
        if job.segment:
            raise SpecError(
                "--segment has no meaning here: the plan has no groups of nodes that NVLink joins "
                "evenly; leave it out"
            )
        return None
    if job.segment is False:
        return None
    spares = job.survival.spares
    if nodes == plan.cluster.nodes:
        return nodes + spares
    if spares % nodes:
        raise SpecError(
            f"--spares {spares}: Slurm gives nodes in segments of {nodes}, which NVLink joins: use "
            f"--spares {nodes}, or --no-segment"
        )
    return nodes


def segment_reason(plan: Plan) -> str:
    """Why nodes have to be given together, as a sentence without its end."""
    domain, nodes = plan.cluster.nvlink_domain, plan.cluster.segment_nodes
    assert domain is not None
    assert nodes is not None
    of = f"{domain.domain_gpus} of the {domain.whole_gpus}" if domain.whole_gpus else "all"
    which = "the nodes" if nodes == plan.cluster.nodes else f"each {nodes} nodes in order"
    return (
        f"The plan counts on NVLink between {which} ({of} GPUs of an NVLink domain): elsewhere "
        "groups of ranks go over the network, far slower"
    )


def unsaid_lines(plan: Plan, what: str) -> list[str]:
    """Comment lines of a launcher that cannot ask for it: `what` is to be done in its place."""
    if plan.cluster.segment_nodes is None:
        return []
    return paragraph(f"{segment_reason(plan)}. {what}")


def by_hand_lines(plan: Plan) -> list[str]:
    """The same, where a person says which node is which."""
    nodes = plan.cluster.segment_nodes
    if nodes == plan.cluster.nodes:
        return unsaid_lines(plan, "So start it on nodes of one domain.")
    return unsaid_lines(
        plan,
        f"So name the nodes domain by domain: the first {nodes} of one, the next {nodes} of one.",
    )
