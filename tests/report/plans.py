"""Plans of several sizes to report on; no search."""

from __future__ import annotations

from functools import cache

from fsdpplan.cost.estimate import estimate
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.values import Report
from fsdpplan.run.plans import new_plan
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import BrokenRule, Case, Plan, RankedLayout
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.training import Training

LAYOUTS = {
    8: ("llama-3.1-8b", Layout(dp_shard=8, micro_batch=2, num_microbatches=4)),
    512: (
        "llama-3.1-70b",
        Layout(
            dp_replicate=2,
            dp_shard=16,
            tp=4,
            pp=4,
            schedule="1f1b",
            micro_batch=1,
            num_microbatches=16,
            sequence_parallel=True,
            loss_parallel=True,
            gradient_sync="last",
        ),
    ),
    16384: (
        "llama-3.1-405b",
        Layout(
            dp_replicate=4,
            dp_shard=16,
            cp=2,
            tp=8,
            pp=16,
            schedule="interleaved_1f1b",
            virtual_stages=4,
            micro_batch=1,
            num_microbatches=16,
            sequence_parallel=True,
            loss_parallel=True,
            reshard_after_forward="never",
            gradient_sync="last",
        ),
    ),
}
SIZES = tuple(LAYOUTS)


@cache
def plan_of(gpus: int) -> Plan:
    """A plan for so many GPUs."""
    name, layout = LAYOUTS[gpus]
    return plan_with(name, layout)


@cache
def report_of(gpus: int) -> Report:
    """The report of it, made once."""
    return plan_report(plan_of(gpus), about="fsdpplan.json")


def plan_with(
    name: str,
    layout: Layout,
    *,
    hardware: str = "dgx-h100",
    rules: tuple[BrokenRule, ...] | None = None,
    runtime: RuntimeName = "fsdp2",
) -> Plan:
    """A plan of `layout` for a model of the catalogue; rules of the field are looked at unless they
    are given."""
    case = Case(
        model=load_model(name),
        cluster=load_cluster(hardware, gpus=layout.world).cluster,
        training=Training(seq_len=4096, global_batch=layout.global_batch, runtime=runtime),
        layout=layout,
    )
    found = estimate(case)
    chosen = RankedLayout(rank=1, layout=layout, estimate=found, reason="the only one")
    return new_plan(
        model=case.model,
        cluster=case.cluster,
        training=case.training,
        chosen=chosen,
        ranked=(chosen,),
        sources=(("cluster", f"profile {hardware}"),),
        assumptions=("sequences of 4,096 tokens (--seq-len)",),
        rules=rules,
    )
