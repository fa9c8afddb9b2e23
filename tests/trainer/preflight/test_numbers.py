"""The tiny step before training: who is blamed, who is not, and that it leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.numbers.evidence import (
    Evidence,
    counts_in,
    explain_counts,
    gather_evidence,
)
from fsdpplan.trainer.numbers.judge import judge_numbers, wanted_evidence
from fsdpplan.trainer.numbers.look import Kept, Seen
from fsdpplan.trainer.numbers.plan import (
    MOST_KINDS,
    MOST_TOKENS,
    counted_kinds,
    kinds_of,
    sequences_of,
    tiny_plan,
)
from fsdpplan.trainer.numbers.reference import (
    compute_reference,
    kind_gradients,
    kind_weights,
)
from fsdpplan.trainer.numbers.trial import nothing_left
from fsdpplan.trainer.parallel.pipeline_stages import rank_shares
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer import expert_layouts, jobs, numbers_layouts, parallel_layouts, plans
from tests.trainer.numbers_faults import FAULTS

CPU = torch.device("cpu")


@pytest.mark.gloo
@pytest.mark.parametrize("world", numbers_layouts.SAMPLE)
def test_no_healthy_layout_is_blamed(world: int, tmp_path: Path) -> None:
    function = "tests.trainer.numbers_layouts:try_sample"
    found = jobs.measured(world, function, tmp_path / "found.json")
    assert found
    assert not {name: result["problem"] for name, result in found.items() if result["problem"]}
    # of what each quantity may be off, so that rounding elsewhere is not blamed either
    assert max(value for result in found.values() for value in result["worst"].values()) < 0.5


SET = 10
"""Faults that one set of processes tries, since each has a time limit."""


@pytest.fixture(scope="module")
def said_of_faults(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[str, str]:
    """What is said of each fault, on 4 ranks that run one after the other."""
    out = tmp_path_factory.mktemp("faults") / "said.json"
    function = "tests.trainer.numbers_faults:try_some"
    names, said = sorted(asked("name")), {}
    for first in range(0, len(names), SET):
        said |= jobs.measured(4, function, out, asked=names[first : first + SET])
    return said


@pytest.mark.gloo
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(said_of_faults: dict[str, str], name: str) -> None:
    for words in FAULTS[name].words:
        assert words in said_of_faults[name]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (
            "raises_on_a_rank",
            "rank 1 on node2 failed in stepping a tiny model: layers.0.ffn_norm.weight has no",
        ),
        ("waits_on_a_rank", "stepping a tiny model did not end within 4 s"),
        ("ends_a_program", "2 times too large: sums where they should be means, over dp_shard"),
    ],
)
def test_a_step_that_fails_ends_with_the_preflights_code(
    scene: str, words: str, tmp_path: Path
) -> None:
    process = jobs.start_function(2, f"tests.trainer.numbers_faults:{scene}", tmp_path)
    assert words in jobs.finish(process, exit_code=5)


def _plan(model: dict[str, Any], **arguments: Any) -> PlanConfig:
    return parse_plan(plans.plan_text(model=model, **arguments))


MODELS = [*parallel_layouts.MODELS.values(), *expert_layouts.MODELS.values()]
DEGREES = st.sampled_from([1, 2, 4, 8])


@st.composite
def runnable_plans(draw: st.DrawFn) -> PlanConfig | None:
    """Plans of up to thousands of ranks; None where the trainer would refuse what was drawn."""
    tp, cp, pp, ep = (draw(DEGREES) for _ in range(4))
    wide = {"heads": 64, "kv_heads": draw(st.sampled_from([8, 64])), "layers": 32, "hidden": 512}
    vocab = draw(st.sampled_from([4096, 4099]))
    model = {**draw(st.sampled_from(MODELS)), **wide, "vocab": vocab, "ffn_hidden": 2048}
    if "latent" in model:
        model["kv_heads"] = 64
    if "experts" in model:
        model["experts"] = {**model["experts"], "experts": 8, "hidden": 64, "shared_hidden": 64}
    split = {"tp": tp, "sequence_parallel": True, "loss_parallel": True} if tp > 1 else {}
    schedules = ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev", "looped_bfs"]
    schedule = draw(st.sampled_from(schedules))
    piped = {
        "pp": pp,
        "schedule": schedule,
        "virtual_stages": 1 if schedule in ("gpipe", "1f1b") else 2,
        "num_microbatches": draw(st.sampled_from([1, 2 * pp, 4 * pp])),
        "gradient_sync": "last",
        "reshard_after_forward": "never",
    }
    plan = parse_plan(
        plans.plan_text(
            model=model,
            training={
                "seq_len": 4096,
                "precision": draw(st.sampled_from(["fp32", "bf16"])),
                "optimizer": draw(st.sampled_from(["adamw", "muon"])),
            },
            dp_replicate=draw(DEGREES),
            dp_shard=draw(st.sampled_from([1, 2, 8, 64, 512])),
            cp=cp,
            ep=ep,
            micro_batch=draw(st.sampled_from([1, 4])),
            wrap_blocks=draw(st.sampled_from([1, 3])),
            loss_chunks=draw(st.sampled_from([1, 8])),
            **split,
            **(piped if pp > 1 else {"num_microbatches": draw(st.sampled_from([1, 8]))}),
        )
    )
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    device = replace(plan.cluster.device, kind=kind)
    plan = replace(plan, cluster=replace(plan.cluster, device=device))
    try:
        require_runnable(plan)
    except TrainerError:
        return None
    return plan


@given(runnable_plans(), st.booleans())
def test_the_tiny_plan_of_a_plan_that_runs_has_its_mesh_and_runs(
    plan: PlanConfig | None, in_own_formats: bool
) -> None:
    if plan is None:
        return
    tiny = tiny_plan(plan, in_own_formats=in_own_formats)
    require_runnable(tiny)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert getattr(tiny.layout, axis) == getattr(plan.layout, axis)
    assert tiny.layout.schedule == plan.layout.schedule
    assert (tiny.model.kv_heads < tiny.model.heads) == (plan.model.kv_heads < plan.model.heads)
    if plan.layout.pp > 1:
        for pp_rank in range(plan.layout.pp):
            parts = zip(
                rank_shares(plan, pp_rank=pp_rank), rank_shares(tiny, pp_rank=pp_rank), strict=True
            )
            assert all(bool(of.blocks) == bool(made.blocks) for of, made in parts)


@given(runnable_plans())
def test_what_one_process_computes_does_not_grow_with_the_world(plan: PlanConfig | None) -> None:
    if plan is None:
        return
    tiny = tiny_plan(plan, in_own_formats=False)
    assert kinds_of(tiny) <= MOST_KINDS
    tokens = kinds_of(tiny) * tiny.training.seq_len * tiny.model.layers
    assert kinds_of(tiny) <= 3 or tokens <= MOST_TOKENS
    counted = counted_kinds(tiny)
    assert counted.total() == sequences_of(tiny)
    assert max(counted.values()) - min(counted.values()) <= 1


@pytest.mark.parametrize("fields", MODELS[:3] + MODELS[-2:])
def test_a_steps_gradient_is_the_weighted_sum_of_its_kinds(fields: dict[str, Any]) -> None:
    plan = _plan(fields, dp_replicate=3, dp_shard=16, micro_batch=1)
    tiny = tiny_plan(plan, in_own_formats=False)
    assert kinds_of(tiny) < sequences_of(tiny)
    reference = compute_reference(tiny, seed=0)
    summed = {name: torch.zeros_like(each) for name, each in reference.gradients.items()}
    for weight, kind in zip(kind_weights(tiny), kind_gradients(tiny, seed=0), strict=True):
        for name, gradient in kind.items():
            summed[name] += weight * gradient
    for name, gradient in reference.gradients.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({77: 0}, "the part of one of ranks 15, 46, 77, 108, 139"),
        ({40: 2}, "the part of one of ranks 9, 40, 71"),
        (dict.fromkeys(range(512, 1024), 0), "each replica keeps its own"),
    ],
)
def test_among_a_thousand_ranks_it_is_known_whose_part_is_missing(
    parts: dict[int, int], words: str
) -> None:
    plan = _plan(MODELS[0], dp_replicate=2, dp_shard=512, micro_batch=1)
    tiny = tiny_plan(plan, in_own_formats=False)
    reference = compute_reference(tiny, seed=0)
    wrong = {name: each.clone() for name, each in reference.gradients.items()}
    kinds = list(kind_gradients(tiny, seed=0))
    for part, times in parts.items():
        for name, gradient in kinds[part % len(kinds)].items():
            wrong[name] += (times - 1) * gradient / sequences_of(tiny)
    seen = Seen(rank=0, gradients=list(wrong))
    kept = Kept(seen=seen, gradients=wrong, cuts={}, named=str, bits={})
    evidence = gather_evidence(tiny, reference, kept, seed=0, fits=True)
    counts = counts_in([Evidence(**json.loads(json.dumps(evidence.document())))], tiny)
    assert counts is not None
    assert words in explain_counts(counts, tiny, rank=0)


def test_generators_and_settings_are_as_they_were() -> None:
    tiny = tiny_plan(_plan({}, dp_shard=2), in_own_formats=False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with nothing_left(CPU):
        torch.rand(7)
        compute_reference(tiny, seed=0)
    assert torch.equal(torch.rand(3), expected)


THOUSAND = _plan(
    {"vocab": 4096, "heads": 8, "kv_heads": 8},
    dp_replicate=4,
    dp_shard=64,
    micro_batch=1,
    tp=4,
    sequence_parallel=True,
    loss_parallel=True,
)
HOSTS = [f"node{rank // 8}" for rank in range(1024)]


def _seen(**of_rank: Any) -> list[Seen]:
    return [Seen(rank=rank, digest="AVX2 0", squares=1 / 256) for rank in range(1024)]


def test_a_thousand_healthy_ranks_are_asked_nothing() -> None:
    tiny = tiny_plan(THOUSAND, in_own_formats=False)
    assert not wanted_evidence(_seen(), tiny)
    assert not judge_numbers(_seen(), (), tiny, HOSTS).problem


def test_a_node_is_blamed_for_what_it_alone_does() -> None:
    tiny = tiny_plan(THOUSAND, in_own_formats=False)
    seen = _seen()
    seen[77].updates = ["norm.weight"]
    found = judge_numbers(seen, (), tiny, HOSTS)
    assert "rank 77 on node9" in found.problem
    assert list(found.bad) == ["node9"]
    for each in seen:
        each.updates = ["norm.weight"]
    assert not judge_numbers(seen, (), tiny, HOSTS).bad


def test_one_replica_of_four_that_differs_is_the_bad_one() -> None:
    tiny = tiny_plan(THOUSAND, in_own_formats=False)
    seen = _seen()
    seen[300].digest = "AVX2 1"
    assert wanted_evidence(seen, tiny) == [44, 300, 556, 812]
    found = judge_numbers(seen, (), tiny, HOSTS)
    assert "rank 300 on node37 has other bits than the others" in found.problem
    assert list(found.bad) == ["node37"]


def test_cpus_that_round_otherwise_are_not_compared_by_their_bits() -> None:
    tiny = tiny_plan(THOUSAND, in_own_formats=False)
    seen = _seen()
    seen[300].digest = "AVX512 1"
    assert not wanted_evidence(seen, tiny)
    assert not judge_numbers(seen, (), tiny, HOSTS).problem


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (4.0, "over dp_replicate (4 ranks) or tp (4 ranks)"),
        (64.0, "64 times too large: sums where they should be means, over dp_shard (64 ranks)"),
        (256.0, "over dp_replicate x dp_shard (256 ranks)"),
        (1 / 64, "64 times too small: divided twice, over dp_shard (64 ranks)"),
        (2.0, "twice too large: something is added or scaled twice"),
        (3.7, "3.7 times too large"),
        (0.0, "are missing"),
    ],
)
def test_a_factor_is_told_by_the_axis_that_has_so_many_ranks(ratio: float, words: str) -> None:
    tiny = tiny_plan(THOUSAND, in_own_formats=False)
    seen = _seen()
    for each in seen:
        each.gradients, each.compared, each.ratio = ["norm.weight"], 1, ratio
    assert words in judge_numbers(seen, (), tiny, HOSTS).problem


def test_what_is_seen_travels_as_json() -> None:
    seen = Seen(rank=3, gradients=["norm.weight"], ratio=2.0, worst={"gradients": float("inf")})
    assert Seen(**json.loads(json.dumps(seen.document()))) == seen
