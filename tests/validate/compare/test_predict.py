"""What the cost model says of a row: as for the layout itself, gaps filled by what fits."""

from __future__ import annotations

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.plan import Case
from fsdpplan.validate.compare.predict import Fits, Prediction, predict, predict_row, with_fit
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.skipped import Skipped
from tests.validate.tables import GPT_PIPELINE, LLAMA_8B, run


def predicted(base: dict[str, str] = LLAMA_8B, **changes: str) -> Prediction:
    row = express(run(base, **changes))
    assert isinstance(row, Expressed), row
    result = predict(row)
    assert isinstance(result, Prediction), result
    return result


def test_a_full_row_is_priced_as_its_layout() -> None:
    row = express(run(inter_net_note="8x400 Gb/s"))
    assert isinstance(row, Expressed)
    case = Case(
        model=row.model,
        cluster=load_cluster("dgx-h100", gpus=64).cluster,
        training=row.training,
        layout=row.layouts[0],
    )
    price = estimate(case)
    result = predict(row)
    assert isinstance(result, Prediction)
    assert result.step_seconds == price.step_seconds
    assert result.memory == price.memory


def test_a_slower_network_is_not_faster() -> None:
    slow = predicted(inter_net_note="1x100 Gb per node").step_seconds.expected
    assert slow > 1.5 * predicted(inter_net_note="400 Gb/s per GPU").step_seconds.expected


def test_a_pipeline_without_sequence_parallelism_is_priced() -> None:
    result = predicted(GPT_PIPELINE)
    assert result.step_seconds.lower < result.step_seconds.expected < result.step_seconds.upper
    assert result.fits


def test_each_kind_of_memory_counts_more_than_the_one_before() -> None:
    result = predicted()
    kinds = [result.peak_memory_bytes(kind) for kind in ("alloc", "reserved", "nvidia-smi")]
    assert kinds == sorted(kinds, key=lambda peak: peak or 0)
    assert len(set(kinds)) == 3
    assert result.peak_memory_bytes("unknown") is None
    assert result.peak_memory_bytes(None) is None


def test_zero_1_holds_less_than_zero_0() -> None:
    whole = predicted(GPT_PIPELINE, zero_stage="0")
    sharded = predicted(GPT_PIPELINE, zero_stage="1", dp_replicate="1", dp_shard="4")
    assert sharded.memory.optimizer_bytes < whole.memory.optimizer_bytes / 3


def test_a_share_of_recomputed_blocks_lies_between_none_and_all() -> None:
    none, some, full = (
        predicted(act_ckpt=mode).step_seconds.expected for mode in ("none", "selective", "full")
    )
    assert none < some < full
    assert some == pytest.approx((none + full) / 2)
    memory = [predicted(act_ckpt=mode).memory for mode in ("none", "selective", "full")]
    peaks = [one.peak_allocated_bytes for one in memory]
    assert peaks == sorted(peaks, reverse=True)


def test_other_fits_take_the_place_of_the_profiles() -> None:
    row = express(run())
    assert isinstance(row, Expressed)
    plain = predict(row)
    slow = predict(row, Fits(devices={"h100-sxm-80g": {"matmul_fraction": 0.4}}))
    elsewhere = predict(row, Fits(devices={"a100-sxm-80g": {"matmul_fraction": 0.4}}))
    assert isinstance(plain, Prediction)
    assert isinstance(slow, Prediction)
    assert slow.step_seconds.expected > 1.3 * plain.step_seconds.expected
    assert elsewhere == plain
    cluster = load_cluster("dgx-h100", gpus=64).cluster
    assert with_fit(cluster, None) == cluster == with_fit(cluster, Fits())
    narrow = with_fit(cluster, Fits(levels={"nvlink": {"bandwidth_fraction": 0.5}}))
    assert narrow.levels[0].bandwidth_fraction == 0.5
    assert narrow.levels[1] == cluster.levels[1]


def test_a_devices_own_fit_goes_before_physics() -> None:
    cluster = load_cluster("dgx-h100", gpus=64).cluster
    fits = Fits(
        physics={"overlap_slowdown_fraction": 0.1},
        devices={"h100-sxm-80g": {"overlap_slowdown_fraction": 0.2}},
    )
    assert with_fit(cluster, fits).device.fit.overlap_slowdown_fraction == 0.2


def test_a_row_is_predicted_or_skipped() -> None:
    rows = [run(), run(moe="many"), run(GPT_PIPELINE)]
    assert [isinstance(predict_row(one), Skipped) for one in rows] == [False, True, False]


def test_the_fastest_micro_batch_that_fits_is_taken() -> None:
    result = predicted(micro_batch="", global_batch="4096")
    assert result.fits
    for size in (1, 2, 4, 8):
        other = predicted(micro_batch=str(size), global_batch="4096")
        assert not other.fits or other.step_seconds.expected >= result.step_seconds.expected
    assert any("fastest that fits" in sentence for sentence in result.assumptions)
    assert result.unknown_log_error > 0


@pytest.mark.parametrize(("batch", "mode"), [("64", "none"), ("512", "full")])
def test_checkpointing_is_none_where_that_fits(batch: str, mode: str) -> None:
    per_rank = str(int(batch) // 64)
    result = predicted(act_ckpt="", global_batch=batch, micro_batch=per_rank, seq_len="4096")
    assert result.layout.activation_checkpointing == mode


def test_where_nothing_fits_the_least_is_taken_and_said_not_to_fit() -> None:
    # 405B over 128 GPUs of 80 GB with a sequence of 8192: out of memory
    big = {
        "model_name": "Llama3.1-405B",
        "params_b": "405.8",
        "layers": "126",
        "hidden": "16384",
        "ffn_hidden": "53248",
        "heads": "128",
        "gpus": "128",
        "dp_shard": "128",
        "micro_batch": "",
        "global_batch": "",
        "act_ckpt": "",
        "step_time_s": "",
        "oom": "y",
    }
    result = predicted(**big)
    assert (result.layout.micro_batch, result.layout.activation_checkpointing) == (1, "full")
    assert result.fits is False


def test_what_the_cost_model_refuses_is_a_skip() -> None:
    changes = {"vpp": "4", "global_batch": "56", "micro_batch": "2"}  # 7 micro-batches, pp 2
    row = express(run(GPT_PIPELINE, **changes))
    assert isinstance(row, Expressed)
    result = predict(row)
    assert isinstance(result, Skipped)
    assert "micro-batches" in result.sentence


def test_a_cluster_that_no_profile_makes_is_a_skip() -> None:
    row = express(run(gpus="12", dp_shard="12", global_batch="12"))
    assert isinstance(row, Expressed)
    result = predict(row)
    assert isinstance(result, Skipped)
    assert "12 GPUs" in result.sentence
