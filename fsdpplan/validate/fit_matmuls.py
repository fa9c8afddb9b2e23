"""Fit matmuls: four numbers that all CUDA devices share, and each device's ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from fsdpplan.files.profiles import load_device
from fsdpplan.spec.cluster import Device
from fsdpplan.validate.kernels import DEVICES, MatmulRow, by_sweep, predicted_matmul_seconds
from fsdpplan.validate.search_numbers import Fitted, Numbers, Range, capped, least

SHARED = {
    "matmul_fill_depth": Range(lowest=1.0, highest=1024.0, starts=(128.0,)),
    "matmul_wave_fraction": Range(lowest=0.01, highest=1.0, starts=(0.25,)),
    "matmul_start_seconds": Range(lowest=1e-7, highest=1e-5, starts=(2e-6,)),
    "fp8_fraction": Range(lowest=0.1, highest=1.0, starts=(0.95,)),
}
"""Of `physics`: what all CUDA devices share."""

CEILING = Range(lowest=0.1, highest=0.99, starts=(0.8,))
"""`matmul_fraction` of a device."""


def fit_matmuls(rows: Sequence[MatmulRow]) -> dict[str, dict[str, float]]:
    """The shared numbers (`physics`) and each device's ceiling for which the rows err least."""
    sweeps = list(by_sweep(rows).values())
    names = tuple(DEVICES.values())

    def error(point: Numbers) -> float:
        shared = {field: point[field] for field in SHARED}
        ceilings = {name: {"matmul_fraction": point[name]} for name in names}
        devices = fitted_devices({"physics": shared, **ceilings})
        return fmean(capped(matmul_errors(sweep, devices)) for sweep in sweeps)

    found = least(error, {**SHARED, **dict.fromkeys(names, CEILING)})
    shared = {name: found[name] for name in SHARED}
    return {"physics": shared, **{name: {"matmul_fraction": found[name]} for name in names}}


def fitted_devices(fitted: Fitted) -> dict[str, Device]:
    """Devices with rows, with the fitted numbers; {}: as their profiles have them."""
    return {name: _fitted_device(name, fitted) for name in DEVICES.values()}


def _fitted_device(name: str, fitted: Fitted) -> Device:
    device = load_device(name).device
    if name not in fitted:
        return device
    shared = fitted["physics"]
    fit = replace(
        device.fit,
        matmul_fraction=fitted[name]["matmul_fraction"],
        matmul_fill_depth=shared["matmul_fill_depth"],
        matmul_wave_fraction=shared["matmul_wave_fraction"],
        matmul_start_seconds=shared["matmul_start_seconds"],
        fp8_fraction=shared["fp8_fraction"],
        # few rows are bound by memory, and its share is fitted to training steps: left out here, so
        # that neither fit waits for the other
        memory_fraction=1.0,
    )
    return replace(device, fit=fit)


def matmul_errors(rows: Iterable[MatmulRow], devices: Mapping[str, Device]) -> list[float]:
    """Predicted over measured, less 1, of each row."""
    return [
        predicted_matmul_seconds(row, device=devices[row.device]) / row.seconds - 1 for row in rows
    ]
