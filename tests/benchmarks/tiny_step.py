"""CPU seconds of one rank's numerical preflight, in worlds of any size.

    python tests/benchmarks/tiny_step.py

The other ranks are not there (torch's fake process group), so what is computed is wrong and is not
judged: it is the time that counts. It must hardly grow with the world. A second run in the same
process shows what of it is torch's own warming up, which training is spared. A benchmark, not a
test: nothing here asserts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.numbers.evidence import Evidence
from fsdpplan.trainer.numbers.judge import judge_numbers, wanted_evidence
from fsdpplan.trainer.numbers.look import Seen
from fsdpplan.trainer.numbers.plan import tiny_plan
from fsdpplan.trainer.numbers.reference import compute_reference
from fsdpplan.trainer.numbers.trial import nothing_left, step_exactly
from fsdpplan.trainer.parallel.mesh import build_meshes
from fsdpplan.trainer.private_torch import stated_pipeline_shapes
from fsdpplan.trainer.rehearse.fake_world import fake_world
from tests.trainer.plans import plan_text

CPU = torch.device("cpu")
MODEL = {"layers": 32, "hidden": 4096, "ffn_hidden": 14336, "heads": 64, "kv_heads": 8}
SPLIT = {"tp": 8, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "pp": 4,
    "schedule": "1f1b",
    "num_microbatches": 8,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
LAYOUTS = {
    "fsdp 8": {"dp_shard": 8},
    "fsdp 64": {"dp_shard": 64},
    "fsdp 1,024": {"dp_shard": 1024},
    "fsdp 8,192": {"dp_shard": 8192},
    "hsdp 128 x 8": {"dp_replicate": 128, "dp_shard": 8},
    "tp 8 x fsdp 8": {"dp_shard": 8, **SPLIT},
    "tp 8 x fsdp 128": {"dp_shard": 128, **SPLIT},
    "pp 4 x fsdp 256": {"dp_shard": 256, **PIPED},
    "pp 4 x tp 8 x fsdp 32": {"dp_shard": 32, **SPLIT, **PIPED},
}


def plan_of(**layout: object) -> PlanConfig:
    """A plan of 8B with a layout."""
    model = {**MODEL, "head_dim": 64, "vocab": 128256}
    return parse_plan(plan_text(model=model, training={"seq_len": 4096}, micro_batch=1, **layout))


def trial_seconds(plan: PlanConfig) -> tuple[float, float]:
    """CPU seconds of (one process's answer, this rank's step)."""
    tiny = tiny_plan(plan, in_own_formats=False)
    meshes = build_meshes(plan.layout, CPU.type)
    began = time.process_time()
    with nothing_left(CPU):
        reference = compute_reference(tiny, seed=0)
        computed = time.process_time()
        step_exactly(tiny, meshes, CPU, reference, seed=0, adamw="fused")
    return computed - began, time.process_time() - computed


def judging_seconds(plan: PlanConfig) -> float:
    """CPU seconds of rank 0 over what all ranks say, where all is right."""
    tiny, world = tiny_plan(plan, in_own_formats=False), plan.layout.world
    worst = dict.fromkeys(("outputs", "gradients", "losses", "norms", "updates"), 0.01)
    said = [json.dumps(Seen(rank=n, digest="x", worst=worst).document()) for n in range(world)]
    began = time.process_time()
    seen = [Seen(**json.loads(text)) for text in said]
    asked: list[Evidence] = []
    assert not wanted_evidence(seen, tiny)
    assert not judge_numbers(seen, asked, tiny, ["node"] * world).problem
    return time.process_time() - began


def main() -> None:
    """Each layout, in a world of its own."""
    torch.set_num_threads(1)
    print(f"{'layout':24} {'ranks':>6} {'one process':>12} {'step':>6} {'again':>6} {'judging':>8}")
    for name, layout in LAYOUTS.items():
        plan = plan_of(**layout)
        with fake_world(plan.layout.world), stated_pipeline_shapes():
            reference, step = trial_seconds(plan)
            _, again = trial_seconds(plan)
        judging = judging_seconds(plan)
        print(
            f"{name:24} {plan.layout.world:6,} {reference:12.2f} {step:6.2f} {again:6.2f} "
            f"{judging:8.2f}"
        )


if __name__ == "__main__":
    main()
