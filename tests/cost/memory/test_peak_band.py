"""Peak band: the chance to fit falls with the expected peak, and the device shrinks with it."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import (
    NORMAL_80,
    fits_fraction,
    most_bytes,
    peak_interval,
    peak_log_error,
    with_band,
)
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Device, LearnedPeaks
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

H100 = load_cluster("dgx-h100", gpus=8)
DEVICE: Device = H100.cluster.device


def test_a_peak_as_large_as_the_device_fits_every_second_time() -> None:
    assert fits_fraction(peak_bytes=DEVICE.memory_bytes, device=DEVICE) == pytest.approx(0.5)


def test_a_tenth_of_the_band_lies_above_it() -> None:
    band = peak_interval(peak_bytes=60 * 2**30, device=DEVICE)
    just = replace(DEVICE, memory_bytes=round(band.upper))
    assert fits_fraction(peak_bytes=60 * 2**30, device=just) == pytest.approx(0.9, abs=1e-4)


@given(st.floats(0.51, 0.9999))
def test_the_most_that_fits_has_the_chance_asked_for(asked: float) -> None:
    most = most_bytes(device=DEVICE, fits_fraction=asked)
    assert fits_fraction(peak_bytes=most, device=DEVICE) == pytest.approx(asked, abs=1e-6)


@given(st.floats(0.0, 0.999), st.floats(0.0, 0.999))
def test_a_larger_chance_leaves_no_more_room(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert most_bytes(device=DEVICE, fits_fraction=more) <= most_bytes(
        device=DEVICE, fits_fraction=less
    )


@pytest.mark.parametrize("asked", [0.0, 0.5])
def test_up_to_an_even_chance_the_expected_peak_decides(asked: float) -> None:
    assert most_bytes(device=DEVICE, fits_fraction=asked) == DEVICE.memory_bytes


def test_the_stricter_of_headroom_and_chance_decides() -> None:
    cluster = H100.cluster
    training = Training(seq_len=4096, global_batch=64)
    wide = replace(training, headroom_fraction=0.3)
    free = replace(training, headroom_fraction=0.0, fits_fraction=0.0)
    assert available_bytes(cluster=cluster, training=wide) == int(0.7 * DEVICE.memory_bytes)
    assert available_bytes(cluster=cluster, training=free) == DEVICE.memory_bytes
    assert available_bytes(cluster=cluster, training=training) == most_bytes(
        device=DEVICE, fits_fraction=0.95
    )


def test_of_processes_nothing_is_known() -> None:
    cpu = load_cluster("cpu", gpus=2).cluster
    training = Training(seq_len=128, global_batch=2, precision="fp32")
    layout = Layout(dp_shard=2, compile=False)
    model = load_model("gpt2-large")
    memory = rank_memory(Case(model=model, cluster=cpu, training=training, layout=layout))
    assert not peak_log_error(cpu.device)
    assert (memory.fits_fraction, memory.peak_device_band_bytes) == (None, None)
    assert with_band(memory, device=cpu.device) == memory
    assert most_bytes(device=cpu.device, fits_fraction=0.95) == cpu.device.memory_bytes


def test_the_fullest_rank_says_its_band() -> None:
    asked = Case(
        model=load_model("llama-3.1-8b"),
        cluster=H100.cluster,
        training=Training(seq_len=4096, global_batch=8),
        layout=Layout(dp_shard=8, activation_checkpointing="full", compile=True),
    )
    memory = rank_memory(asked)
    band = memory.peak_device_band_bytes
    assert band is not None
    assert memory.fits_fraction is not None
    assert band.lower < band.expected == memory.peak_device_bytes < band.upper
    assert 0.5 < memory.fits_fraction <= 1
    assert memory.peak_allocated_bytes + memory.context_bytes < memory.least_device_bytes
    assert memory.least_device_bytes < memory.peak_device_bytes


@given(st.floats(-0.3, 0.3), st.floats(0.0, 0.2), st.floats(0.51, 0.999))
def test_what_runs_say_moves_the_band_the_chance_and_the_room_alike(
    shift: float, left: float, asked: float
) -> None:
    peaks = LearnedPeaks(runs=3, shift_log=shift, stack_fraction=left)
    told = replace(DEVICE, learned_peaks=peaks)
    most = most_bytes(device=told, fits_fraction=asked)
    assert fits_fraction(peak_bytes=most, device=told) == pytest.approx(asked, abs=1e-6)
    band = peak_interval(peak_bytes=40 * 2**30, device=told)
    assert band.expected == pytest.approx(40 * 2**30 * exp(shift))
    assert (band.upper / band.expected < 1.11) == (peak_log_error(told) < log(1.11) / NORMAL_80)


def test_the_headroom_is_left_of_what_is_expected() -> None:
    peaks = LearnedPeaks(runs=3, shift_log=0.1, stack_fraction=0.0)
    told = replace(DEVICE, learned_peaks=peaks)
    training = Training(seq_len=4096, global_batch=64, headroom_fraction=0.3, fits_fraction=0.0)
    room = available_bytes(cluster=replace(H100.cluster, device=told), training=training)
    assert room == pytest.approx(0.7 * DEVICE.memory_bytes / exp(0.1), abs=1)
