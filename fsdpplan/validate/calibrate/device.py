"""Calibrate a device: its fitted numbers from kernels that were timed on every rank.

One number after the other, each through the formula that uses it: the share of the memory
bandwidth, of the peak in matmuls, in attention forward and then backward; launches and copies. What
a device shares with all others (tiles, waves, starts) stays as the profile has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from fsdpplan.cost.kernels.rates import ALIGNED_BYTES
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.spec.training import DTYPE_BYTES
from fsdpplan.validate.calibrate.peaks import (
    DeviceNumber,
    Row,
    best_rates,
    by_rank,
    refuse_other_devices,
    reported,
    rounded,
)
from fsdpplan.validate.compare.kernels import SMALLEST
from fsdpplan.validate.compare.measured_kernels import (
    burst_seconds,
    is_long,
    predicted_seconds,
    sustained_fraction,
    telling,
    timed_kernel,
)
from fsdpplan.validate.fit.robust import Numbers, Sought, robust_fit

SPREAD = 1.0
"""Log spread of a share around what the profile has."""
TRAINED_DTYPES = ("bf16",)
"""Of a GPU: number formats to which `matmul_fraction` is fitted; it is one number for all."""
FINEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCalibration:
    """A device after its rows."""

    device: Device
    """With what was found; its errors and its evidence are as they were."""
    numbers: Mapping[str, DeviceNumber]
    """By field of `Device` or `DeviceFit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    matmuls: Sequence[MeasuredMatmul]
    unaligned: Sequence[MeasuredMatmul]
    """Products with rows that begin at no multiple of 16 bytes."""
    memory: Sequence[MeasuredMemory]
    attention: Sequence[MeasuredAttention]
    launches: Sequence[MeasuredLaunch]
    copies: Sequence[MeasuredCopy]


def calibrate_device(measurements: Sequence[Measurement], device: Device) -> DeviceCalibration:
    """The numbers of one device that the rows of all ranks tell; they are taken as equal, and each
    number is that of the rank in the middle."""
    kernels = telling(measurements)
    has_fp8 = device.peak_fp8_flops_per_second is not None
    every = [row for row in kernels if isinstance(row, MeasuredMatmul)]
    matmuls = [row for row in every if _is_aligned(row)]
    rows = _Rows(
        unaligned=[row for row in every if not _is_aligned(row)],
        matmuls=[row for row in matmuls if row.dtype != "fp8" or has_fp8],
        memory=[row for row in kernels if isinstance(row, MeasuredMemory)],
        attention=[row for row in kernels if isinstance(row, MeasuredAttention)],
        launches=[row for row in kernels if isinstance(row, MeasuredLaunch)],
        copies=_slower_way([row for row in kernels if isinstance(row, MeasuredCopy)]),
    )
    numbers: dict[str, DeviceNumber] = {}
    for machine in measurements:
        if isinstance(machine, MeasuredMachine):
            numbers |= reported(machine)
    if device.kind == "cpu":
        numbers |= best_rates(rows.matmuls, rows.memory)
    else:
        refuse_other_devices(rows.matmuls, rows.memory, device)
    device = _with_numbers(device, numbers)
    for steps in (
        _memory,
        _matmuls,
        _unaligned,
        _fp8,
        _forward,
        _backward,
        _launches,
        _copies,
        _sustained,
    ):
        found = steps(rows, device)
        numbers |= found
        device = _with_numbers(device, found)
    return DeviceCalibration(device=device, numbers=numbers)


def _slower_way(copies: Sequence[MeasuredCopy]) -> list[MeasuredCopy]:
    """Those of the slower direction."""
    directions = {row.direction for row in copies}
    ways = [[row for row in copies if row.direction == way] for way in sorted(directions)]
    return min(ways, key=lambda way: median(map(_copy_rate, way)), default=[])


def _copy_rate(row: MeasuredCopy) -> float:
    return row.copied_bytes / median(row.seconds)


def _memory(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    return _fitted("memory_fraction", rows.memory, device)


def _matmuls(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    if device.kind == "cpu":
        return _fitted("matmul_fraction", rows.matmuls, device)
    trained = [row for row in rows.matmuls if row.dtype in TRAINED_DTYPES]
    large = [row for row in trained if min(row.m, row.n, row.k) >= SMALLEST]
    return _fitted("matmul_fraction", _fresh(large) or large or trained, device)


FRESH_SECONDS = 1e-3
"""Products no longer than this are repeated before the power limit has lowered the clock; longer
ones show what is left of it (`_sustained`)."""


LARGE = 2048
"""Products with no smaller dimension show a rate; smaller ones their start as well, which is taken
over."""

LONG_TOKENS = 1024
"""Sequences of so many tokens likewise."""


def _fresh(rows: Sequence[MeasuredMatmul]) -> list[MeasuredMatmul]:
    """Those of short products that are not small, if there are any."""
    fresh = [row for row in rows if burst_seconds(row.seconds) <= FRESH_SECONDS]
    return [row for row in fresh if min(row.m, row.n, row.k) >= LARGE] or fresh


def _directed(rows: _Rows, direction: str) -> list[MeasuredAttention]:
    mine = [row for row in rows.attention if row.direction == direction]
    return [row for row in mine if row.seq_len >= LONG_TOKENS] or mine


def _is_aligned(row: MeasuredMatmul) -> bool:
    """Whether rows of both operands and of the result begin at multiples of 16 bytes."""
    step = ALIGNED_BYTES // DTYPE_BYTES[row.dtype]
    return row.k % step == 0 and row.n % step == 0


def _unaligned(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    """What such products reach of the rate of aligned ones."""
    aligned = replace(device, fit=replace(device.fit, unaligned_fraction=1.0))
    shares = [predicted_seconds(row, aligned) / median(row.seconds) for row in rows.unaligned]
    if not shares or device.kind == "cpu":
        return {}
    middle = median(shares)
    away = [abs(log(share / middle)) for share in shares]
    number = DeviceNumber(
        value=min(1.0, rounded(middle)),
        error_fraction=median(away),
        spread_fraction=max(away),
        residual_fraction=median(away),
        rows=len(shares),
    )
    return {"unaligned_fraction": number}


def _fp8(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    mine = [row for row in rows.matmuls if row.dtype == "fp8"]
    large = [row for row in mine if min(row.m, row.n, row.k) >= SMALLEST]
    return _fitted("fp8_fraction", _fresh(large) or large or mine, device)


def _forward(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    mine = _directed(rows, "forward")
    return _fitted("attention_forward_fraction", mine, device)


def _backward(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    mine = _directed(rows, "backward")
    is_cudnn = timed_kernel(device) == "cudnn"
    ratio = "native_backward_ratio" if is_cudnn else "attention_backward_ratio"
    return _fitted(ratio, mine, device)


def _launches(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    return _fitted("kernel_launch_seconds", rows.launches, device)


def _copies(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    return _fitted("host_link_fraction", rows.copies, device)


def _sustained(rows: _Rows, device: Device) -> dict[str, DeviceNumber]:
    """From rows that kept a GPU busy for seconds, if there are any, against short ones of the same
    product where there are such.

    A step is held to the power limit for a part of its time: between its products others run that
    take less. The middle of a short product's rate and of a lasting one's is taken; products inside
    steps of an H100 reached from all of the first to no more than the second.
    """
    long = [row for row in rows.matmuls if device.kind == "cuda" and is_long(row.seconds)]
    if not long:
        return {}
    short = {
        replace(row, seconds=()): median(row.seconds)
        for row in rows.matmuls
        if not is_long(row.seconds)
    }
    shares = [sustained_fraction(row.seconds, short.get(replace(row, seconds=()))) for row in long]
    middle = median(shares)
    away = [abs(log(share / middle)) for share in shares]
    number = DeviceNumber(
        value=rounded((1 + middle) / 2),
        error_fraction=median(away),
        spread_fraction=max(away),
        residual_fraction=median(away),
        rows=len(long),
    )
    return {"sustained_fraction": number}


def _fitted(field: str, rows: Sequence[Row], device: Device) -> dict[str, DeviceNumber]:
    """One number, by the rows whose predictions depend on it; of ranks' times the median counts."""
    if not rows:
        return {}
    expected = _number(device, field)
    is_share = field.endswith(("_fraction", "_ratio"))
    kernels = _by_kernel(rows)

    def predicted(numbers: Numbers) -> list[float]:
        tried = _with_values(device, numbers)
        return [predicted_seconds(kernel, tried) for kernel in kernels]

    found = robust_fit(
        predicted,
        [median(seconds) for seconds in kernels.values()],
        {
            field: Sought(
                expected=expected,
                spread=SPREAD,
                lowest=FINEST if is_share else expected * FINEST,
                highest=1.0 if is_share else expected / FINEST,
            )
        },
    )
    value = rounded(found.numbers[field].value)
    number = DeviceNumber(
        value=value,
        error_fraction=found.numbers[field].error_fraction,
        spread_fraction=_spread(rows, _with_values(device, {field: value})),
        residual_fraction=found.residual_fraction,
        rows=len(rows),
    )
    return {field: number}


def _by_kernel(rows: Sequence[Row]) -> dict[Row, list[float]]:
    """Times of each kernel on all ranks."""
    kernels: dict[Row, list[float]] = {}
    for row in rows:
        kernel = replace(row, rank=0, seconds=())
        kernels.setdefault(kernel, []).append(burst_seconds(row.seconds))
    return kernels


def _spread(rows: Sequence[Row], device: Device) -> float:
    away = [
        median(log(burst_seconds(row.seconds) / predicted_seconds(row, device)) for row in mine)
        for mine in by_rank(rows).values()
    ]
    middle = median(away)
    return exp(max(abs(one - middle) for one in away)) - 1


def _number(device: Device, field: str) -> float:
    return float(getattr(device.fit if hasattr(device.fit, field) else device, field))


def _with_numbers(device: Device, numbers: Mapping[str, DeviceNumber]) -> Device:
    return _with_values(device, {field: number.value for field, number in numbers.items()})


def _with_values(device: Device, values: Mapping[str, float]) -> Device:
    fit = {field: value for field, value in values.items() if hasattr(device.fit, field)}
    own = {field: value for field, value in values.items() if field not in fit}
    return replace(device, fit=replace(device.fit, **fit), **own)  # type: ignore[arg-type]
