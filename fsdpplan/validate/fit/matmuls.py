"""Fit matmuls: two numbers that all CUDA devices share, and five of each device with rows.

Each (device, format, size class) counts alike, so that the many products of middling size do not
outweigh the short ones, where starts show, and the long ones, which throttle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from fsdpplan.cost.kernels.matmul import matmul_flops
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.spec.cluster import Device
from fsdpplan.validate.compare.kernel_scores import size_class
from fsdpplan.validate.compare.kernels import MatmulRow, predicted_matmul_seconds, swept_devices
from fsdpplan.validate.fit.search_numbers import Fitted, Numbers, Range, capped, least

SHARED = {
    "fp8_fraction": Range(lowest=0.1, highest=1.0, starts=(0.95,)),
    "throttle_seconds": Range(lowest=1e-3, highest=5e-2, starts=(5e-3,)),
}
"""Of `physics`: what all CUDA devices share."""

OWN = {
    "matmul_fraction": Range(lowest=0.1, highest=0.99, starts=(0.82,)),
    "matmul_fill_depth": Range(lowest=1.0, highest=1024.0, starts=(128.0,)),
    "matmul_wave_fraction": Range(lowest=0.01, highest=1.0, starts=(0.3,)),
    "matmul_start_seconds": Range(lowest=1e-6, highest=1e-5, starts=(3e-6,)),
    "throttled_fraction": Range(lowest=0.5, highest=1.0, starts=(0.85,)),
}
"""Of each device: its ceiling, what a tile, a last wave and a kernel cost beside their work, and
the rate that its power limit leaves. Kernels before Hopper start a block of threads a tile, and
leave the last wave as it falls; later ones stay resident and share it out. No kernel starts in less
than 1 us."""

ROUNDS = 3
"""Devices one after the other with the shared numbers held, then those with the devices held."""


def fit_matmuls(rows: Sequence[MatmulRow]) -> dict[str, dict[str, float]]:
    """The shared numbers (`physics`) and each device's own for which the rows err least."""
    names = tuple(swept_devices().values())
    classes = _by_class(rows)
    shared = {name: one.starts[0] for name, one in SHARED.items()}
    own = {device: {name: one.starts[0] for name, one in OWN.items()} for device in names}
    for _ in range(ROUNDS):
        for device in names:
            mine = tuple(group for group in classes if group[0].device == device)

            def error(
                point: Numbers, device: str = device, mine: Sequence[list[MatmulRow]] = mine
            ) -> float:
                return _error(mine, {"physics": shared, device: point})  # noqa: B023

            own[device] = least(error, _from(OWN, own[device]))

        def shared_error(point: Numbers) -> float:
            return _error(classes, {"physics": point, **own})

        shared = least(shared_error, _from(SHARED, shared))
    return {"physics": shared, **own}


def _error(classes: Sequence[list[MatmulRow]], fitted: Fitted) -> float:
    devices = {name: _fitted_device(name, fitted) for name in fitted if name != "physics"}
    return fmean(capped(matmul_errors(group, devices)) for group in classes)


def _from(ranges: Mapping[str, Range], point: Numbers) -> dict[str, Range]:
    """`ranges`, searched from `point` on."""
    return {name: replace(one, starts=(point[name],)) for name, one in ranges.items()}


def _by_class(rows: Iterable[MatmulRow]) -> list[list[MatmulRow]]:
    classes: dict[tuple[str, str], list[MatmulRow]] = {}
    for row in rows:
        size = size_class(matmul_flops(m=row.m, n=row.n, k=row.k))
        classes.setdefault((row.sweep, size), []).append(row)
    return list(classes.values())


def fitted_devices(fitted: Fitted) -> dict[str, Device]:
    """Devices with rows, with the fitted numbers; {}: as their profiles have them."""
    return {name: _fitted_device(name, fitted) for name in swept_devices().values()}


def _fitted_device(name: str, fitted: Fitted) -> Device:
    device = load_device(name).device
    if name not in fitted:
        return device
    # few rows are bound by memory, and its share is fitted to training steps: left out here, so
    # that neither fit waits for the other
    changes = {**fitted["physics"], **fitted[name], "memory_fraction": 1.0}
    return replace(device, fit=replace(device.fit, **changes))  # type: ignore[arg-type]


def matmul_errors(rows: Iterable[MatmulRow], devices: Mapping[str, Device]) -> list[float]:
    """Predicted over measured, less 1, of each row."""
    return [
        predicted_matmul_seconds(row, device=devices[row.device]) / row.seconds - 1 for row in rows
    ]
