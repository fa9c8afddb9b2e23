"""Attention: fused by tiles, or over the whole square."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.block.work import BlockWork, block_work
from fsdpplan.cost.kernels.attention import (
    attention_backward_seconds,
    attention_forward_seconds,
    far_log_error,
    masked_tiles,
    mean_tiles,
    scores,
    sequence_tiles,
)
from fsdpplan.cost.model.attention_kernel import attention_kernel
from fsdpplan.cost.model.params import attention_forward_flops_per_token
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Dropout, Training
from tests.cost.works import A100, H100, work, works


def rate(block: BlockWork) -> float:
    """Useful FLOPs a second of forward."""
    flops = block.tokens * attention_forward_flops_per_token(
        model=block.model, seq_len=block.seq_len
    )
    return flops / attention_forward_seconds(block, H100)


@given(works())
def test_attention_is_never_faster_than_the_peak(block: BlockWork) -> None:
    flops = block.tokens * attention_forward_flops_per_token(
        model=block.model, seq_len=block.seq_len
    )
    least = flops / block.tp / H100.peak_bf16_flops_per_second
    assert attention_forward_seconds(block, H100) >= least
    assert attention_backward_seconds(block, H100) >= 2 * least


@given(st.integers(1, 2**17), st.integers(1, 2**17))
def test_tiles_are_whole_and_a_window_never_adds_any(seq_len: int, window: int) -> None:
    full, windowed = mean_tiles(seq_len=seq_len), mean_tiles(seq_len=seq_len, window=window)
    assert 1 <= windowed <= full
    assert 128 * full >= seq_len / 2


def test_tiles_by_hand() -> None:
    assert mean_tiles(seq_len=128) == 1
    assert mean_tiles(seq_len=1024) == 4.5  # 1 to 8 tiles
    assert mean_tiles(seq_len=1024, window=128) == pytest.approx(15 / 8)  # 1, then 2 each


def cut_lengths(*, seq_len: int, mean: int, sequences: int) -> list[list[int]]:
    """Documents of exponential lengths one after the other, cut into sequences."""
    dice = Random(0)
    found = []
    for _ in range(sequences):
        left, lengths = seq_len, []
        while left > 0:
            length = min(left, math.ceil(dice.expovariate(1 / mean)))
            lengths.append(length)
            left -= length
        found.append(lengths)
    return found


@pytest.mark.parametrize(
    ("seq_len", "mean"), [(8192, 64), (8192, 700), (4096, 5000), (32768, 2000)]
)
@pytest.mark.parametrize("window", [0, 512])
def test_tiles_of_documents_are_those_of_drawn_ones(seq_len: int, mean: int, window: int) -> None:
    drawn = cut_lengths(seq_len=seq_len, mean=mean, sequences=400)
    most = -(-window // 128) + 1 if window else seq_len
    rows = [[-(-length // 128) for length in lengths] for lengths in drawn]
    met = [sum(min(k, most) for n in each for k in range(1, n + 1)) for each in rows]
    found = sequence_tiles(seq_len=seq_len, window=window, document_tokens=mean)
    assert found.rows == pytest.approx(fmean(map(sum, rows)), rel=0.03)
    assert found.all == pytest.approx(fmean(met), rel=0.05)
    longest = fmean(min(max(each), most) for each in rows)
    assert found.longest == pytest.approx(longest, rel=0.35)


@pytest.mark.parametrize("window", [0, 512])
def test_one_document_as_long_as_a_sequence_is_the_sequence(window: int) -> None:
    whole = sequence_tiles(seq_len=8192, window=window)
    long = sequence_tiles(seq_len=8192, window=window, document_tokens=1e9)
    assert long.all == pytest.approx(whole.all, rel=1e-4)
    assert long.rows == pytest.approx(whole.rows, rel=1e-4)


def test_shorter_documents_take_less_time_down_to_a_tile_each() -> None:
    seconds = [
        attention_forward_seconds(work(tokens=32768, seq_len=32768, document_tokens=mean), H100)
        for mean in (math.inf, 1e9, 16384, 4096, 1024, 512)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 10


def test_long_sequences_reach_the_fitted_share_and_short_ones_less() -> None:
    share = H100.fit.attention_forward_fraction * H100.fit.sustained("pytorch")
    fitted = share * H100.peak_bf16_flops_per_second
    rates = [rate(work(tokens=65536, seq_len=2**n)) for n in range(9, 17)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(fitted, rel=0.02)
    assert 0.45 < rates[0] / fitted < 0.65


def test_narrow_heads_spend_more_of_their_time_on_softmax() -> None:
    wide = work("llama-3.1-8b", tokens=65536, seq_len=16384)
    model = replace(wide.model, heads=64, kv_heads=16, head_dim=64)
    narrow = replace(wide, model=model)
    assert 0.8 < rate(narrow) / rate(wide) < 0.95


def test_one_head_of_one_sequence_waits_for_its_longest_row() -> None:
    eight = work(tp=8, tokens=4096)
    alone = replace(eight, tp=32)
    assert attention_forward_seconds(alone, H100) > attention_forward_seconds(eight, H100) / 4


def test_context_parallelism_splits_attention_but_fills_rows_anew() -> None:
    whole = work(tokens=65536, seq_len=65536)
    split = work(tokens=8192, seq_len=65536, cp=8)
    ratio = attention_forward_seconds(split, H100) * 8 / attention_forward_seconds(whole, H100)
    assert 1 < ratio < 1.05


def test_traded_heads_leave_rows_whole() -> None:
    whole = work(tokens=65536, seq_len=65536)
    split = replace(whole, tokens=8192, cp=8, trades_heads=True)
    ratio = attention_forward_seconds(split, H100) * 8 / attention_forward_seconds(whole, H100)
    assert ratio == pytest.approx(1)


def test_windows_save_attention_in_their_blocks_only() -> None:
    model = load_model("gemma-2-9b")
    windowed = work(model, tokens=32768, seq_len=32768)
    full = work(replace(model, sliding_window=0), tokens=32768, seq_len=32768)
    ratio = attention_forward_seconds(windowed, H100) / attention_forward_seconds(full, H100)
    assert 0.5 < ratio < 0.7


def test_latent_attention_computes_with_wide_keys_and_narrow_values() -> None:
    model = load_model("deepseek-v2-lite")
    block = work(model, tokens=16384, seq_len=16384)
    plain = replace(block, model=replace(model, latent=None, head_dim=128))
    ratio = attention_forward_seconds(block, H100) / attention_forward_seconds(plain, H100)
    assert ratio == pytest.approx((192 + 128 + 32) / (128 + 128 + 32), rel=0.01)


def test_kernels_of_the_devices_own_instructions_are_faster_where_it_has_them() -> None:
    old, new = work(tokens=32768), work(tokens=32768, attention_kernel="cudnn")
    assert attention_forward_seconds(new, H100) < attention_forward_seconds(old, H100) / 1.5


MEASURED = {
    ("forward", 16, 2048, 1): 56.5e-6,
    ("forward", 32, 2048, 4): 264e-6,
    ("forward", 32, 4096, 2): 474e-6,
    ("forward", 32, 8192, 1): 892e-6,
    ("backward", 32, 2048, 4): 939e-6,
    ("backward", 32, 4096, 2): 1518e-6,
    ("backward", 32, 8192, 1): 2755e-6,
}
"""(direction, heads of 128, tokens, sequences) on one H100 under torch 2.11: `fsdpplan calibrate`
of 2026-11-27."""

IN_STEPS = {
    ("forward", 20, 64, 1024, 8): 70.0e-6,
    ("backward", 20, 64, 1024, 8): 252e-6,
    ("forward", 32, 64, 4096, 2): 338e-6,
    ("backward", 32, 64, 4096, 2): 1012e-6,
    ("forward", 32, 128, 4096, 2): 461e-6,
    ("backward", 32, 128, 4096, 2): 1530e-6,
}
"""(direction, heads, width, tokens, sequences) inside profiled steps there: GPT-2 Large, Llama 3.2
1B and blocks of Llama 3.1 8B; backward with the kernels before and behind it."""


def measured_work(*, heads: int, width: int, seq_len: int, sequences: int) -> BlockWork:
    model = replace(
        load_model("llama-3.1-8b"), heads=heads, kv_heads=heads, head_dim=width, sliding_window=0
    )
    return work(
        model, tokens=sequences * seq_len, seq_len=seq_len, attention_kernel="cudnn", family="own"
    )


@pytest.mark.parametrize("key", [*((k[0], k[1], 128, *k[2:]) for k in MEASURED), *IN_STEPS])
def test_cudnns_kernel_takes_what_was_measured(key: tuple[str, int, int, int, int]) -> None:
    direction, heads, width, seq_len, sequences = key
    alone = (direction, heads, seq_len, sequences)
    measured = IN_STEPS[key] if key in IN_STEPS else MEASURED[alone]
    block = measured_work(heads=heads, width=width, seq_len=seq_len, sequences=sequences)
    fresh = replace(H100, fit=replace(H100.fit, sustained_fraction=1.0))
    forward, backward = attention_forward_seconds, attention_backward_seconds
    seconds = (forward if direction == "forward" else backward)(block, fresh)
    assert seconds == pytest.approx(measured, rel=0.1)


def test_torch_takes_the_first_kernel_that_knows_the_call() -> None:
    model = load_model("llama-3.1-8b")
    hopper, ampere = H100, A100

    def kernel(device: Device = hopper, runtime: str = "fsdp2", **changes: Any) -> str:
        training = replace(PLAIN, runtime=runtime, **changes)  # type: ignore[arg-type]
        return attention_kernel(model=model, training=training, device=device)

    assert kernel() == "cudnn"
    assert kernel(torch="2.11") == "cudnn"
    assert kernel(torch="2.9") == "flash"
    assert kernel(ampere) == "flash"
    assert kernel(precision="fp32") == "efficient"
    assert kernel(load_device("v100-sxm2-16g").device, precision="fp16") == "efficient"
    assert kernel(runtime="fsdp2_2024") == "flash"  # before torch 2.9
    assert kernel(runtime="megatron") == "cudnn"
    assert kernel(ampere, runtime="megatron") == "flash"
    assert kernel(runtime="megatron_2020") == "scores"


def test_a_length_far_outside_of_the_measured_ones_is_less_known() -> None:
    lengths = [2**n for n in range(15, 21)]
    errors = [far_log_error("cudnn", seq_len=n) for n in lengths]
    assert errors[0] == 0
    assert errors == sorted(errors)
    assert errors[-1] > 0.3


def test_fp8_leaves_attention_as_it_is() -> None:
    half, quarter = work(), work(precision="fp8")
    assert attention_forward_seconds(half, H100) == attention_forward_seconds(quarter, H100)


@given(works())
def test_scores_in_memory_cost_at_least_their_traffic(block: BlockWork) -> None:
    assume(block.model.mixer == "A")
    unfused = replace(block, attention_kernel="scores")
    moved = 2 * scores(unfused) * 2 / H100.memory_bandwidth_bytes_per_second
    assert attention_forward_seconds(unfused, H100) > moved


def test_without_fusion_the_mask_saves_nothing_and_dropout_costs() -> None:
    fused = work(tokens=8192, seq_len=2048, compiled=False, fused_kernels=True)
    unfused = replace(fused, attention_kernel="scores")
    dropping = replace(unfused, dropout=True)
    eager = replace(unfused, fused_kernels=False)
    forward = [attention_forward_seconds(w, A100) for w in (fused, unfused, dropping)]
    assert forward == sorted(forward)
    assert forward[1] > 2 * forward[0]
    assert attention_forward_seconds(eager, A100) > forward[1]


WINDOW = 1024
"""Of a sequence of 16 times as many tokens."""
PLAIN = Training(seq_len=16 * WINDOW, global_batch=8)
WITHOUT_A_KERNEL = {
    "sinks": {"attention_sinks": True},
    "fp32": {"precision": "fp32"},
    "dropout": {"dropout": Dropout(attention=0.1)},
    "torch 2.9": {"torch": "2.9"},
    "before Ampere": {"profile": "dgx-2", "precision": "fp16"},
    "AMD": {"profile": "azure-nd-mi300x-v5"},
    "CPU": {"profile": "cpu"},
}


def windowed_block(
    window: int = WINDOW, profile: str = "dgx-h100", attention_sinks: bool = False, **changes: Any
) -> tuple[BlockWork, Device]:
    """A block of a model of which all look back as far."""
    model = replace(
        load_model("llama-3.1-8b"),
        sliding_window=window,
        full_attention_every=10**6,
        attention_sinks=attention_sinks,
    )
    cluster = load_cluster(profile, gpus=1 if profile == "cpu" else 8).cluster
    layout = Layout(dp_shard=cluster.gpus)
    training = replace(PLAIN, **changes)
    case = Case(model=model, cluster=cluster, training=training, layout=layout)
    return block_work(case), cluster.device


def both_seconds(block: tuple[BlockWork, Device]) -> float:
    """Forward and backward."""
    return attention_forward_seconds(*block) + attention_backward_seconds(*block)


@pytest.mark.parametrize("why", WITHOUT_A_KERNEL)
def test_under_a_mask_the_whole_square_is_priced(why: str) -> None:
    """More than the half that is computed without a window, whatever the window."""
    given: dict[str, Any] = WITHOUT_A_KERNEL[why]
    masked = both_seconds(windowed_block(**given))
    causal = both_seconds(windowed_block(window=0, **given))
    assert masked > 1.5 * causal
    assert masked == pytest.approx(both_seconds(windowed_block(window=WINDOW // 8, **given)))


def test_a_kernel_of_windows_computes_their_tiles_alone() -> None:
    windowed, causal = both_seconds(windowed_block()), both_seconds(windowed_block(window=0))
    assert windowed < causal / 3  # which is cuDNN's kernel
    assert both_seconds(windowed_block(window=WINDOW // 2)) < windowed
    assert both_seconds(windowed_block(torch="2.12")) == windowed


def test_other_software_has_its_own_kernels() -> None:
    megatron = windowed_block(runtime="megatron", attention_sinks=True)
    assert not megatron[0].masks_windows
    assert not megatron[0].added_width


def test_documents_one_by_one_meet_two_windows_of_keys() -> None:
    """4 tiles a window: 1, 2, 3, 4 of the first piece, then 8 for each row of a piece."""
    of = {"seq_len": 16 * 128, "window": 4 * 128, "one_by_one": True}
    assert masked_tiles(**of).all == pytest.approx(1 + 2 + 3 + 4 + 12 * 8)
    assert masked_tiles(**of | {"one_by_one": False}).all == 16 * 16
    short = masked_tiles(**of, document_tokens=128.0)
    assert short.all < masked_tiles(**of).all / 2
    whole = windowed_block(precision="fp32")
    packed = replace(whole[0], one_by_one=True, document_tokens=4096.0), whole[1]
    assert both_seconds(packed) < both_seconds(whole) / 2
