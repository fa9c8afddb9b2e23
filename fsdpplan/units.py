"""Units: the one place where text becomes a number with a unit, and back.

Parsing is strict. Bits and bytes, GB (1e9) and GiB (2**30) are never confused: text that could
mean either is refused with both readings. Numbers stay exact (`Decimal`) until the unit is applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from fsdpplan.errors import SpecError

KIB, MIB, GIB = 2**10, 2**20, 2**30
MILLION, BILLION = 10**6, 10**9

_QUANTITY = re.compile(r"(?P<number>[^A-Za-z/ ]*(?:[eE][+-]?[0-9]+)?) ?(?P<unit>[A-Za-z/]*)")
_NUMBER = re.compile(r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?|\.[0-9]+")
_COUNT_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_TIME_UNITS = {
    "ms": Decimal("0.001"),
    **dict.fromkeys(("s", "sec", "second", "seconds"), Decimal(1)),
    **dict.fromkeys(("min", "minute", "minutes"), Decimal(60)),
    **dict.fromkeys(("h", "hour", "hours"), Decimal(3600)),
    **dict.fromkeys(("d", "day", "days"), Decimal(86400)),
    **dict.fromkeys(("w", "week", "weeks"), Decimal(7 * 86400)),
    **dict.fromkeys(("y", "year", "years"), Decimal(365 * 86400)),
}
"""Not m: a minute, a month and a million are written so."""
_MAX_COUNT = 10**18
_MAX_SECONDS = 10**12
_MAX_BYTES = 2**60
_MAX_BYTES_PER_SECOND = 10**16


def parse_count(text: str, *, name: str = "value") -> int:
    """A whole number: `70e9`, `70B`, `1.5T`, `350M`, `70_000_000_000`. Case does not matter."""
    number, unit = _split(text, name=name, example="70e9 or 70B")
    scale = _COUNT_SCALES.get(unit.lower())
    if scale is None:
        raise SpecError(
            f"{name}: {text!r} has an unknown suffix {unit!r}; use K, M, B (1e9) or T (1e12), "
            "such as 70B, or a plain number such as 70e9"
        )
    value = number * scale
    _require_range(value, text, name=name, highest=_MAX_COUNT)
    if value != value.to_integral_value():
        raise SpecError(f"{name}: {text!r} is not a whole number; type one such as 70e9")
    return int(value)


def parse_bytes(text: str, *, name: str = "value") -> int:
    """Bytes: `80GB` (80e9), `80GiB` (80 * 2**30), `512MiB`."""
    number, unit = _split(text, name=name, example="80GiB or 80GB")
    scale = _BYTE_UNITS.get(unit)
    if scale is None:
        raise SpecError(f"{name}: {_byte_advice(text, number, unit)}")
    value = number * scale
    _require_range(value, text, name=name, highest=_MAX_BYTES)
    return int(value)


def parse_bandwidth_bytes_per_second(text: str, *, name: str = "value") -> float:
    """Bandwidth in bytes per second: `450GB/s`, `400Gb/s` (50e9), `400Gbps`, `25GiB/s`."""
    number, unit = _split(text, name=name, example="450GB/s or 400Gb/s")
    scale = _bandwidth_units().get(unit)
    if scale is None:
        raise SpecError(f"{name}: {_bandwidth_advice(text, number, unit)}")
    value = number * scale
    _require_range(value, text, name=name, highest=_MAX_BYTES_PER_SECOND)
    return float(value)


def parse_seconds(text: str, *, name: str = "value") -> float:
    """A duration in seconds: `90s`, `11min`, `79000h`, `14d`, `2w`, `9y` (of 365 days)."""
    number, unit = _split(text, name=name, example="14d, 36h or 11min")
    scale = _TIME_UNITS.get(unit.lower())
    if scale is None:
        what = "has no unit" if not unit else f"has an unknown unit {unit[:20]!r}"
        such = f"{number.normalize():f}h"
        raise SpecError(
            f"{name}: {_short(text)} {what}; use ms, s, min, h, d, w or y, such as {such}"
        )
    value = number * scale
    _require_range(value, text, name=name, highest=_MAX_SECONDS)
    return float(value)


def _split(text: str, *, name: str, example: str) -> tuple[Decimal, str]:
    """The number and the unit in `text`; one space may stand between them."""
    stripped = text.strip()
    match = _QUANTITY.fullmatch(stripped)
    shown = _short(text)
    if match is None or not match["number"]:
        raise SpecError(f"{name}: {shown} is not a number with a unit; type one such as {example}")
    if match["number"].startswith("-"):
        raise SpecError(f"{name}: {shown} is negative; type one above 0, such as {example}")
    if not _NUMBER.fullmatch(match["number"]) or len(match["number"]) > 40:
        raise SpecError(
            f"{name}: {shown} is not a plain decimal number (no commas, signs, fractions); "
            f"type one such as {example}"
        )
    return Decimal(match["number"]), match["unit"]


def _short(text: str) -> str:
    """`text` quoted, cut where it would fill the screen."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _require_range(value: Decimal, text: str, *, name: str, highest: int) -> None:
    if value <= 0:
        raise SpecError(f"{name}: {_short(text)} must be above 0; type more")
    if value > highest:
        raise SpecError(f"{name}: {_short(text)} is more than {highest:.0e}; check the unit")


def _bandwidth_units() -> Mapping[str, Decimal]:
    """Bytes per second of each unit that has one reading only."""
    units: dict[str, Decimal] = {}
    for unit, scale in _BYTE_UNITS.items():
        units[f"{unit}/s"] = Decimal(scale)
    for prefix, power in (("k", 3), ("M", 6), ("G", 9), ("T", 12)):
        bits_per_second = Decimal(10**power) / 8
        for spelling in ("b/s", "bps", "bit/s"):
            units[prefix + spelling] = bits_per_second
        units[f"{prefix}Bps"] = Decimal(10**power)
    return units


def _prefix(unit: str) -> str:
    """The decimal prefix that `unit` starts with, or G."""
    first = unit[:1].upper()
    return {"K": "k", "M": "M", "T": "T"}.get(first, "G")


def _byte_advice(text: str, number: Decimal, unit: str) -> str:
    prefix, shown = _prefix(unit), _short(text)
    typed = text.strip().removesuffix(unit).rstrip()
    binary = f"{typed}{prefix.upper()}iB"
    decimal = f"{typed}{prefix}B"
    if unit == "":
        return f"{shown} has no unit; type {typed}B, {decimal} or {binary}"
    if unit in _bandwidth_units():
        return f"{shown} is a rate, not an amount; type {decimal} or {binary}"
    if re.fullmatch(r"[kMGT]b(it)?", unit):
        eighth = f"{(number / 8).normalize():f}{prefix}B"
        return f"{shown} counts bits ({eighth}); type {decimal} or {eighth}"
    if re.fullmatch(r"[kmgt]", unit.lower()):
        return f"{shown} could mean {decimal} or {binary}; type the one that you mean"
    if unit.lower() in ("kb", "mb", "gb", "tb"):
        return (
            f"{shown} could mean bytes ({decimal}) or bits ({typed}{prefix}b); "
            f"type {decimal} or {binary}"
        )
    if re.fullmatch(r"[kmgt]ib", unit.lower()):
        return f"{shown} is not spelled as a unit; type {binary}"
    return f"{shown} has an unknown unit {unit[:20]!r}; type {decimal} or {binary}"


def _bandwidth_advice(text: str, number: Decimal, unit: str) -> str:
    prefix, shown = _prefix(unit), _short(text)
    typed = text.strip().removesuffix(unit).rstrip()
    bits, in_bytes = f"{typed}{prefix}b/s", f"{typed}{prefix}B/s"
    eighth = f"{(number / 8).normalize():f}{prefix}B/s"
    readings = f"{bits} ({eighth}) or {in_bytes}"
    if unit in _BYTE_UNITS or re.fullmatch(r"[kMGT]b(it)?", unit):
        rate = f"{typed}{unit.removesuffix('it')}/s"
        return f"{shown} is an amount, not a rate; type {rate}"
    if re.fullmatch(r"([kmgt]?b?(/s|ps)?|[kmgt]bits?/?p?s?)", unit.lower()):
        return f"{shown} could mean {readings}; type the one that you mean"
    return f"{shown} has an unknown unit {unit[:20]!r}; type {readings}"


def format_count(count: float) -> str:
    """A count in three significant digits: `70.6 B`, `124 M`, `512`."""
    for scale, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= scale * 0.9995:
            return _significant(count / scale) + suffix
    return _significant(count)


def format_gib(num_bytes: float) -> str:
    """A capacity in binary units: `79.2 GiB`; `474.7 MiB` below 1 GiB."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_gb(num_bytes: float) -> str:
    """A volume on the wire in decimal units: `28.0 GB`; `3.1 MB` below 1 GB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= scale:
            return f"{_significant(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def format_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in bytes: `450 GB/s`."""
    return f"{format_gb(bytes_per_second)}/s"


def format_bit_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in bits, as network ports are sold: `400 Gb/s`."""
    bits_per_second = bytes_per_second * 8
    for scale, unit in ((1e12, "Tb/s"), (1e9, "Gb/s"), (1e6, "Mb/s")):
        if bits_per_second >= scale:
            return f"{_significant(bits_per_second / scale)} {unit}"
    return f"{_significant(bits_per_second / 1e3)} kb/s"


def format_seconds(seconds: float, *, beside: float | None = None) -> str:
    """A duration in the unit that suits it: `163 ms`, `2.41 s`, `3.2 h`, `12.5 days`; in that of
    `beside` where it is read with that one."""
    if seconds < 0:
        return f"-{format_seconds(-seconds, beside=beside)}"
    unit_of = seconds if beside is None else beside
    for limit, scale, unit in (
        (1e-3, 1e-6, "us"),
        (1, 1e-3, "ms"),
        (120, 1, "s"),
        (7200, 60, "min"),
        (172800, 3600, "h"),
    ):
        if unit_of < limit * 0.9995:
            return f"{_significant(seconds / scale)} {unit}"
    return f"{_significant(seconds / 86400)} days"


def format_money(dollars: float, *, beside: float | None = None) -> str:
    """Dollars: `$412`, `$3.18 M`; in the unit of `beside` where it is read with that one."""
    unit_of = dollars if beside is None else beside
    for scale, unit in ((1e9, " B"), (1e6, " M")):
        if unit_of >= scale * 0.9995:
            return f"${_significant(dollars / scale)}{unit}"
    return f"${dollars:,.0f}" if unit_of >= 99.5 else f"${dollars:,.2f}"


def format_gpu_hours(hours: float, *, beside: float | None = None) -> str:
    """Whole ones; where that one, or the one that it is read with, is below ten, two digits."""
    return f"{hours:,.0f}" if (hours if beside is None else beside) >= 10 else f"{hours:.2g}"


def format_kwh(kwh: float, *, beside: float | None = None) -> str:
    """An energy: `412 kWh`, `1.27 GWh`; in the unit of `beside` where it is read with that one."""
    unit_of = kwh if beside is None else beside
    for scale, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if unit_of >= scale * 0.9995:
            return f"{_significant(kwh / scale)} {unit}"
    return f"{_significant(kwh)} kWh"


def format_percent(fraction: float) -> str:
    """A fraction as a percentage: `43.2 %`."""
    return f"{fraction * 100:.1f} %"


def _significant(value: float) -> str:
    """`value` in three significant digits, all digits of the whole part, no exponent."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    if magnitude == 0 or magnitude >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}"
