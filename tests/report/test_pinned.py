"""Reports and traces of drawn pinned layouts: each can be laid out, and sums up to its step."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.errors import SpecError
from fsdpplan.report.of_plan import plan_report
from fsdpplan.run.trace.chrome import trace_document
from fsdpplan.run.trace.overlay import axis_groups
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan
from tests.cost.problems import case
from tests.report.plans import plan_with

MODELS = ("gpt2", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b")
PROFILES = ("dgx-a100-80g-hdr1", "dgx-h100", "p4d-24xlarge", "gcp-g2-standard-96")
NUMBER = 200


def shown(plan: Plan) -> None:
    """Its report and its trace are made; each holds the timeline against the estimate."""
    assert plan_report(plan, about="a plan").sections
    timeline = step_timeline(plan.case)
    groups = axis_groups(plan.case, timeline.rank)
    assert trace_document(timeline, plan.layout, name="a plan", groups=groups)["traceEvents"]


def drawn(seed: int) -> tuple[str, str, Layout]:
    """A legal pinned layout, the same for the same seed: of every kind of FSDP and DDP."""
    chance = random.Random(seed)
    while True:
        sharding = chance.choice(("fsdp", "fsdp", "fsdp", "ddp"))
        tp, pp = chance.choice((1, 1, 2, 4)), chance.choice((1, 1, 1, 2))
        name, profile = chance.choice(MODELS), chance.choice(PROFILES)
        fields = dict(
            sharding=sharding,
            dp_replicate=chance.choice((1, 2, 4)) if sharding == "fsdp" else 8,
            dp_shard=chance.choice((2, 4, 8)) if sharding == "fsdp" else 1,
            tp=tp,
            pp=pp,
            ep=chance.choice((1, 1, 2, 4)),
            schedule="none" if pp == 1 else "1f1b",
            sequence_parallel=tp > 1,
            loss_parallel=tp > 1,
            reshard_after_forward=chance.choice(("always", "never")),
            gradient_sync=chance.choice(("every", "last", "reduce_scatter_only")),
            micro_batch=chance.choice((1, 2)),
            num_microbatches=chance.choice((1, 2, 4, 7)),
            activation_checkpointing=chance.choice(("none", "op", "full")),
            wrap_blocks=chance.choice((1, 1, 3)),
            offload=chance.choice(("none", "none", "none", "cpu")),
        )
        try:
            layout = Layout(**fields)  # type: ignore[arg-type]
            problem = case(name, profile=profile, seq_len=4096, **asdict(layout)).problem
        except SpecError:  # degrees that do not divide, machines that are not sold in that number
            continue
        if problem is None:
            return name, profile, layout


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_pinned_layout_has_a_report_and_a_trace(seed: int) -> None:
    name, profile, layout = drawn(seed)
    shown(plan_with(name, layout, hardware=profile))


def test_replicas_reduce_beside_the_passes_without_a_copy_to_the_host() -> None:
    """Two of 8 GPUs on a slow network, which reduce every micro-batch."""
    layout = Layout(
        dp_replicate=2, dp_shard=8, micro_batch=1, num_microbatches=2, gradient_sync="every"
    )
    shown(plan_with("gpt2", layout, hardware="dgx-a100-80g-hdr1"))
