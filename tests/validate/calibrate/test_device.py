"""Devices: measuring an artificial one gives its numbers back; another one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.topology.measure.compute import UNALIGNED
from fsdpplan.validate.calibrate.device import calibrate_device
from fsdpplan.validate.compare.measured_kernels import is_long, predicted_seconds, usable
from tests.cost.clusters import cluster
from tests.validate.artificial import Clock, Faults, device_rows, machine_of
from tests.validate.links import clocks


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """An H100 that is better or worse than its profile."""
    device = cluster(gpus=8).device
    fit = replace(
        device.fit,
        matmul_fraction=draw(st.floats(0.4, 0.95)),
        fp8_fraction=draw(st.floats(0.5, 1.0)),
        memory_fraction=draw(st.floats(0.4, 0.95)),
        attention_forward_fraction=draw(st.floats(0.1, 0.5)),
        native_backward_ratio=draw(st.floats(0.4, 1.0)),
        kernel_launch_seconds=draw(st.floats(2e-6, 2e-5)),
        host_link_fraction=draw(st.floats(0.1, 0.95)),
    )
    return replace(device, fit=fit)


def on(device: Device, *, profile: str = "dgx-h100", gpus: int = 8) -> Cluster:
    return replace(cluster(profile, gpus=gpus), device=device)


@settings(max_examples=25, deadline=None)
@given(devices(), clocks())
def test_all_numbers_of_a_device_come_back(true: Device, clock: Clock) -> None:
    found = calibrate_device(list(device_rows(on(true), clock=clock)), cluster(gpus=8).device)
    for name, number in found.numbers.items():
        here = true.fit if hasattr(true.fit, name) else true
        assert number.value == pytest.approx(getattr(here, name), rel=0.05), name
        assert number.residual_fraction < 0.02
        assert number.spread_fraction < 0.05
    assert set(found.numbers) == {
        "memory_fraction",
        "matmul_fraction",
        "fp8_fraction",
        "attention_forward_fraction",
        "native_backward_ratio",
        "kernel_launch_seconds",
        "host_link_fraction",
    }


def test_what_was_not_timed_stays() -> None:
    device = cluster(gpus=8).device
    rows = [row for row in device_rows(on(device)) if isinstance(row, MeasuredMatmul)]
    found = calibrate_device(rows, device)
    assert set(found.numbers) == {"matmul_fraction", "fp8_fraction"}
    assert found.device.fit.memory_fraction == device.fit.memory_fraction
    assert calibrate_device([], device).device == device


@given(share=st.floats(0.15, 0.95))
@settings(max_examples=10, deadline=None)
def test_products_with_unaligned_rows_tell_their_own_share(share: float) -> None:
    device = cluster(gpus=8).device
    rows = [row for row in device_rows(on(device)) if isinstance(row, MeasuredMatmul)]
    without = calibrate_device(rows, device)
    fresh = replace(device, fit=replace(device.fit, unaligned_fraction=1.0))
    for m, n, k in UNALIGNED:
        odd = MeasuredMatmul(rank=0, m=m, n=n, k=k, dtype="bf16", seconds=())
        rows.append(replace(odd, seconds=(predicted_seconds(odd, fresh) / share,) * 5))
    found = calibrate_device(rows, device)
    assert found.device.fit.unaligned_fraction == pytest.approx(share, rel=0.1)
    assert found.numbers["matmul_fraction"] == without.numbers["matmul_fraction"]


def test_a_slow_rank_shows_as_spread_and_does_not_bend_the_number() -> None:
    device = cluster(gpus=8).device
    rows = list(device_rows(on(device), faults=Faults(ranks={5: 1.5})))
    number = calibrate_device(rows, device).numbers["matmul_fraction"]
    assert number.value == pytest.approx(device.fit.matmul_fraction, rel=0.02)
    assert number.spread_fraction == pytest.approx(0.5, rel=0.05)


def test_torch_says_how_much_memory_there_is() -> None:
    true = on(replace(cluster(gpus=8).device, memory_bytes=150 * 10**9, multiprocessors=132))
    found = calibrate_device([machine_of(true)], cluster(gpus=8).device)
    assert found.device.memory_bytes == 150 * 10**9


@pytest.mark.parametrize("part", [MeasuredMatmul, MeasuredMemory])
def test_a_device_that_is_faster_than_its_peak_is_another_one(part: type) -> None:
    rows = [row for row in device_rows(on(cluster("dgx-b200", gpus=8).device))]
    with pytest.raises(SpecError, match="another device; name its profile with --hardware"):
        calibrate_device([row for row in rows if isinstance(row, part)], cluster(gpus=8).device)


def test_a_cpu_process_gets_the_best_that_was_measured_as_its_peak() -> None:
    start = cluster("cpu", gpus=2)
    faster = replace(
        start.device,
        peak_bf16_flops_per_second=200e9,
        peak_fp32_flops_per_second=100e9,
        memory_bandwidth_bytes_per_second=30e9,
    )
    found = calibrate_device(list(device_rows(replace(start, device=faster))), start.device).device
    for dtype, rate in (("bf16", 140e9), ("fp32", 70e9)):
        assert found.peak_flops_per_second(dtype) == pytest.approx(rate, rel=0.05)
        reached = found.peak_flops_per_second(dtype) * found.fit.matmul_fraction
        assert reached == pytest.approx(rate, rel=0.05)
    assert found.memory_bandwidth_bytes_per_second == pytest.approx(21e9, rel=0.05)
    assert found.fit.memory_fraction > 0.95
    assert found.peak_fp16_flops_per_second == start.device.peak_fp16_flops_per_second


def test_a_gpu_that_slows_down_in_the_long_run_sustains_less() -> None:
    device = cluster(gpus=8).device
    short = next(row for row in device_rows(on(device)) if isinstance(row, MeasuredMatmul))
    once = short.seconds[0]

    def lasting(share: float) -> MeasuredMatmul:
        return replace(short, seconds=(once,) * 300 + (once / share,) * 9000)

    assert is_long(lasting(0.5).seconds)
    for rows in ([lasting(0.5)], [short, lasting(0.5)]):
        found = calibrate_device(rows, device).numbers
        assert found["sustained_fraction"].value == pytest.approx(0.75, rel=0.05)
        assert found["matmul_fraction"].value == pytest.approx(device.fit.matmul_fraction, rel=0.1)
    # what is measured replaces what was taken over, also where that was less
    found = calibrate_device([short, lasting(1.0)], device).numbers
    assert found["sustained_fraction"].value == pytest.approx(1, abs=0.01)
    assert "sustained_fraction" not in calibrate_device([short], device).numbers


def test_copies_from_ordinary_memory_and_small_ones_say_nothing_of_the_link() -> None:
    def copy(copied_bytes: int, rate: float, *, pinned: bool, up: bool) -> MeasuredCopy:
        return MeasuredCopy(
            rank=0,
            direction="host_to_device" if up else "device_to_host",
            pinned=pinned,
            copied_bytes=copied_bytes,
            seconds=(copied_bytes / rate,) * 3,
        )

    rows = [
        copy(2**28, 55e9, pinned=True, up=True),
        copy(2**28, 50e9, pinned=True, up=False),
        copy(2**28, 4e9, pinned=False, up=True),
        copy(2**20, 8e9, pinned=True, up=False),
    ]
    found = calibrate_device(rows, cluster(gpus=8).device).device
    rate = found.fit.host_link_fraction * found.host_link_bytes_per_second
    assert rate == pytest.approx(50e9, rel=1e-3)


def test_the_most_kernels_in_a_row_say_what_one_costs() -> None:
    rows = [
        MeasuredLaunch(rank=0, kernels=kernels, seconds=(100e-6 + kernels * 4e-6,))
        for kernels in (10, 100, 10_000)
    ]
    found = calibrate_device(rows, cluster(gpus=8).device).device
    assert found.fit.kernel_launch_seconds == pytest.approx(4e-6, rel=0.01)


@pytest.mark.parametrize("kv_heads", [4, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_any_shape_can_be_fitted(kv_heads: int, head_dim: int) -> None:
    row = MeasuredAttention(
        rank=0,
        batch=2,
        heads=32,
        kv_heads=kv_heads,
        seq_len=4096,
        head_dim=head_dim,
        dtype="bf16",
        direction="forward",
        seconds=(3e-3,),
    )
    numbers = calibrate_device([row], cluster(gpus=8).device).numbers
    assert numbers["attention_forward_fraction"].residual_fraction < 0.01


def test_repeats_that_took_no_time_are_left_out() -> None:
    memory = MeasuredMemory(rank=0, traffic_bytes=2**20, seconds=(0.0, 1e-6, 0.0))
    launch = MeasuredLaunch(rank=0, kernels=10, seconds=(0.0,))
    rows: list[Measurement] = [memory, launch]
    assert usable(rows) == [replace(memory, seconds=(1e-6,))]
