"""Variables of the network that a job would get, so that measuring meets what it will meet."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpplan.cost.estimate import estimate
from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.environment import environment
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Plan
from fsdpplan.spec.training import Training

_KINDS = ("sockets", "fabric")
_MODEL = "gpt2"
"""Any model: variables of the network follow from the cluster alone."""


def network_variables(cluster: Cluster, *, exported: Mapping[str, str]) -> dict[str, str]:
    """Those of the network that the launch script of a job on `cluster` sets to a fixed value.

    What is `exported` stays as it is. What a node would find for itself (a cloud's own script) is
    not among them.
    """
    chosen = environment(plan=_any_plan(cluster), job=Job())
    return {
        variable.name: variable.value
        for variable in chosen
        if variable.kind in _KINDS
        and not (variable.expands or variable.on_node)
        and variable.name not in exported
    }


def _any_plan(cluster: Cluster) -> Plan:
    """DDP of a small model over all GPUs."""
    model = load_model(_MODEL)
    training = Training(seq_len=model.max_positions or 1024, global_batch=cluster.gpus)
    layout = Layout(dp_replicate=cluster.gpus, sharding="ddp", gradient_sync="last")
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    return Plan(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        estimate=estimate(case),
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )
