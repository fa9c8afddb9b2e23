"""Times of matmuls: laws of the roofline, and published tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.kernels.rates import (
    busy_waves,
    matmul_bytes,
    matmul_flops,
    matmul_seconds,
    untiled,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.spec.cluster import Device

H100 = load_device("h100-sxm-80g").device
DEVICES = st.sampled_from(
    [
        load_device(name).device
        for name in ("a100-sxm-80g", "h100-sxm-80g", "b200-sxm-180g", "cpu-process")
    ]
)
SIZES = st.integers(1, 70_000)


@given(SIZES, SIZES, SIZES, DEVICES)
def test_no_matmul_beats_the_datasheet(m: int, n: int, k: int, device: Any) -> None:
    seconds = matmul_seconds(m=m, n=n, k=k, dtype="bf16", device=device)
    peak = device.peak_flops_per_second("bf16")
    assert seconds >= matmul_flops(m=m, n=n, k=k) / peak
    traffic = matmul_bytes(m=m, n=n, k=k, dtype="bf16")
    assert seconds >= traffic / device.memory_bandwidth_bytes_per_second


@given(SIZES, SIZES, SIZES, DEVICES, st.integers(0, 2), st.integers(1, 4096))
def test_a_larger_matmul_is_never_faster(
    m: int, n: int, k: int, device: Any, grown: int, by: int
) -> None:
    sizes = [m, n, k]
    small = matmul_seconds(m=m, n=n, k=k, dtype="bf16", device=device)
    sizes[grown] += by
    large = matmul_seconds(m=sizes[0], n=sizes[1], k=sizes[2], dtype="bf16", device=device)
    assert large >= small * (1 - 1e-12)


@given(SIZES, SIZES)
def test_tiles_cover_the_result(m: int, n: int) -> None:
    waves = busy_waves(m=m, n=n, multiprocessors=132, wave_fraction=0.25)
    assert waves * 132 >= m * n


def test_a_wave_that_is_just_too_small_costs_another() -> None:
    # 132 tiles of 256 x 128: one more row of tiles starts a second wave
    full = busy_waves(m=256 * 12, n=128 * 11, multiprocessors=132, wave_fraction=1.0)
    assert full == 256 * 128
    over = busy_waves(m=256 * 12, n=128 * 12, multiprocessors=132, wave_fraction=1.0)
    assert over > 1.4 * full


def test_a_thin_matmul_is_bound_by_memory() -> None:
    seconds = matmul_seconds(m=1, n=8192, k=8192, dtype="bf16", device=H100)
    traffic = matmul_bytes(m=1, n=8192, k=8192, dtype="bf16")
    memory = H100.memory_bandwidth_bytes_per_second * H100.fit.memory_fraction
    assert seconds == pytest.approx(traffic / memory + H100.fit.matmul_start_seconds)


def test_a_short_inner_dimension_fills_the_pipeline_badly() -> None:
    rates = [
        matmul_flops(m=8192, n=8192, k=k)
        / matmul_seconds(m=8192, n=8192, k=k, dtype="bf16", device=H100)
        for k in (512, 1024, 8192)
    ]
    assert rates == sorted(rates)


def test_a_cpu_has_no_tiles() -> None:
    assert busy_waves(m=3, n=5, multiprocessors=1, wave_fraction=1.0) == 15


@given(SIZES, SIZES, SIZES, st.integers(1, 8), DEVICES)
def test_without_tiles_a_row_costs_no_more_among_more_of_them(
    m: int, n: int, k: int, times: int, device: Device
) -> None:
    given = {"n": n, "k": k, "dtype": "bf16"}
    few = matmul_seconds(m=m, device=untiled(device), **given)  # type: ignore[arg-type]
    many = matmul_seconds(m=m + times, device=untiled(device), **given)  # type: ignore[arg-type]
    assert few <= matmul_seconds(m=m, device=device, **given) * (1 + 1e-9)  # type: ignore[arg-type]
    assert many / (m + times) <= few / m * (1 + 1e-9)


def test_fp8_where_there_is_none_is_refused() -> None:
    device = load_device("a100-sxm-80g").device
    with pytest.raises(SpecError, match="no fp8"):
        matmul_seconds(m=8, n=8, k=8, dtype="fp8", device=device)


@given(SIZES, SIZES, SIZES, st.sampled_from(["h100-sxm-80g", "b200-sxm-180g"]))
def test_fp8_stays_under_its_own_roofline(m: int, n: int, k: int, name: str) -> None:
    device = load_device(name).device
    seconds = matmul_seconds(m=m, n=n, k=k, dtype="fp8", device=device)
    assert seconds >= matmul_flops(m=m, n=n, k=k) / device.peak_flops_per_second("fp8")
    traffic = matmul_bytes(m=m, n=n, k=k, dtype="fp8")
    assert seconds >= traffic / device.memory_bandwidth_bytes_per_second
