"""Real gloo on 4 processes: every layout loses as one process does, by the right collectives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from tests.trainer import jobs, losses, plans

FP32_LOSS_TOLERANCE = 5e-6
"""Sums in another order: 1e-6 was the largest difference seen in losses near 4."""
FP32_NORM_TOLERANCE = 1e-4
"""Adam turns rounding into differences of about 1e-5 in the weights; norms are near 1."""

pytestmark = pytest.mark.gloo

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """All layouts, measured one after the other in one set of processes."""
    out = tmp_path_factory.mktemp("losses") / "results.json"
    return jobs.measured(
        4, "tests.trainer.losses:measure_all", out, asked={*asked("name"), "ddp_small_buckets"}
    )


def counts(results: Results, name: str) -> dict[str, int]:
    found: dict[str, int] = results[name]["collectives"]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", losses.FP32)
def test_a_layout_loses_as_one_process(results: Results, name: str) -> None:
    expected = results["reference"]
    assert results[name]["losses"] == pytest.approx(expected["losses"], abs=FP32_LOSS_TOLERANCE)
    assert results[name]["norms"] == pytest.approx(expected["norms"], abs=FP32_NORM_TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", losses.GPT2)
def test_tied_embeddings_and_biases_lose_as_one_process(results: Results, name: str) -> None:
    expected = results["gpt2_reference"]
    assert results[name]["losses"] == pytest.approx(expected["losses"], abs=FP32_LOSS_TOLERANCE)
    assert results[name]["norms"] == pytest.approx(expected["norms"], abs=FP32_NORM_TOLERANCE)


@pytest.mark.parametrize("name", losses.BF16)
def test_bf16_begins_as_fp32_does(results: Results, name: str) -> None:
    # bf16 has 8 bits: one part in 256 a matmul. Later steps are left out: Adam's first updates
    # are the gradients' signs, and small gradients change theirs.
    expected = results["reference"]
    assert results[name]["losses"][0] == pytest.approx(expected["losses"][0], abs=0.01)
    assert results[name]["norms"][0] == pytest.approx(expected["norms"][0], rel=0.03)
    assert results[name]["losses"][-1] < results[name]["losses"][0]


def test_the_gradients_are_clipped_in_these_tests(results: Results) -> None:
    assert max(results["reference"]["norms"]) > losses.RECIPE.clip_norm


def test_replicas_of_a_users_model_begin_equal(results: Results) -> None:
    sums = results["user_model"]["parameter_sums"]
    assert len(sums) == 4
    assert all(other == sums[0] for other in sums)


BLOCKS = plans.MODEL["layers"]
UNITS = BLOCKS + 2  # and the embedding; and norm and head


COLLECTIVES = [
    ("fsdp_always", UNITS + BLOCKS, UNITS, 0),
    ("fsdp_never", UNITS, UNITS, 0),
    ("fsdp_int2", UNITS + BLOCKS, UNITS, 0),
    ("fsdp_wrap_2", 4 + 2, 4, 0),
    ("fsdp_wrap_3_checkpoint_full", 4 + 2, 4, 0),
    ("hsdp", UNITS + BLOCKS, UNITS, UNITS),
    ("hsdp_1_shard", 0, 0, UNITS),
    ("fsdp_accumulate_every", 2 * (UNITS + BLOCKS), 2 * UNITS, 0),
    ("fsdp_accumulate_last", 2 * (UNITS + BLOCKS), UNITS, 0),
    # `never` resharded after each backward, with and without reduction
    ("fsdp_never_accumulate_every", 2 * UNITS, 2 * UNITS, 0),
    ("fsdp_never_accumulate_last", 2 * UNITS, UNITS, 0),
    ("hsdp_accumulate_every", 2 * (UNITS + BLOCKS), 2 * UNITS, 2 * UNITS),
    ("hsdp_accumulate_reduce_scatter_only", 2 * (UNITS + BLOCKS), 2 * UNITS, UNITS),
    ("hsdp_accumulate_last", 2 * (UNITS + BLOCKS), UNITS, UNITS),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "all_gathers", "reduce_scatters", "all_reduces"),
    [pytest.param(*case, id=case[0]) for case in COLLECTIVES],
)
def test_fsdp_communicates_as_its_policies_say(
    results: Results, name: str, all_gathers: int, reduce_scatters: int, all_reduces: int
) -> None:
    found = counts(results, name)
    assert found.get("_allgather_base_", 0) == all_gathers
    assert found.get("_reduce_scatter_base_", 0) == reduce_scatters
    assert found.get("allreduce_", 0) == all_reduces


def bucket_count(document: dict[str, Any], bucket_bytes: int) -> int:
    """Buckets of DDP after its first step: parameters in backward's order, the last ones first."""
    plan = parse_plan(json.dumps(document))
    with torch.device("meta"):
        parameters = list(Decoder(plan.model).parameters())
    # torch's own assignment; there is no public name for it.
    buckets, _ = dist._compute_bucket_assignment_by_size(
        parameters[::-1], [bucket_bytes], [False] * len(parameters)
    )
    return len(buckets)


@pytest.mark.parametrize(
    ("name", "all_reduces"),
    [("ddp", 1), ("ddp_accumulate_every", 2), ("ddp_accumulate_last", 1)],
)
def test_ddp_all_reduces_each_bucket_when_it_synchronises(
    results: Results, name: str, all_reduces: int
) -> None:
    assert counts(results, name) == {"allreduce_": all_reduces}


def test_ddp_makes_the_buckets_of_torchs_assignment(results: Results) -> None:
    layout = losses.FP32["ddp_small_buckets"]
    expected = bucket_count(plans.plan_document(), layout["ddp_bucket_bytes"])
    assert 5 < expected < 20
    assert counts(results, "ddp_small_buckets") == {"allreduce_": expected}


def test_gpt2_large_makes_109_all_reduces() -> None:
    # 36 blocks of width 1280: 774,030,080 parameters in fp32, buckets of 25 MiB.
    shape = {
        **plans.GPT2_STYLE,
        "layers": 36,
        "hidden": 1280,
        "ffn_hidden": 5120,
        "heads": 20,
        "kv_heads": 20,
        "head_dim": 64,
        "vocab": 50257,
        "max_positions": 1024,
    }
    assert bucket_count(plans.plan_document(model=shape), 25 * 2**20) == 109
