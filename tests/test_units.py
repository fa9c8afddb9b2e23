"""Units: what is written is what is meant, or it is refused with both readings."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan import units
from fsdpplan.errors import SpecError
from fsdpplan.units import (
    format_bandwidth,
    format_bit_bandwidth,
    format_count,
    format_gb,
    format_gib,
    format_gpu_hours,
    format_kwh,
    format_money,
    format_percent,
    format_seconds,
    parse_bandwidth_bytes_per_second,
    parse_bytes,
    parse_count,
    parse_seconds,
)
from tests.refusals import check_one_line


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70e9", 70_000_000_000),
        ("70B", 70_000_000_000),
        ("70b", 70_000_000_000),
        ("70 B", 70_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("350M", 350_000_000),
        ("12K", 12_000),
        ("70_000_000_000", 70_000_000_000),
        ("0.5b", 500_000_000),
        ("2.5E9", 2_500_000_000),
        (" 7 ", 7),
    ],
)
def test_counts_are_exact(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5 TB", 1_500_000_000_000),
        ("64KiB", 65536),
        ("25kB", 25000),
        ("1e3B", 1000),
    ],
)
def test_bytes_are_exact(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("450GB/s", 450e9),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400 Gbit/s", 50e9),
        ("25GiB/s", 25 * 2**30),
        ("1.8TB/s", 1.8e12),
        ("50GBps", 50e9),
        ("100Mb/s", 12.5e6),
    ],
)
def test_bandwidths_are_exact(text: str, bytes_per_second: float) -> None:
    assert parse_bandwidth_bytes_per_second(text) == bytes_per_second


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("400G", ("400Gb/s", "50GB/s", "400GB/s")),
        ("400 g", ("400Gb/s", "400GB/s")),
        ("400", ("400Gb/s", "400GB/s")),
        ("450gb/s", ("450Gb/s", "450GB/s")),
        ("50gbps", ("50Gb/s", "6.25GB/s", "50GB/s")),
        ("50 GBPS", ("50Gb/s", "50GB/s")),
    ],
)
def test_an_ambiguous_bandwidth_is_refused_with_both_readings(
    text: str, readings: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_bandwidth_bytes_per_second(text, name="--inter-bw")
    assert str(refusal.value).startswith(f"--inter-bw: {text!r} could mean")
    assert all(reading in str(refusal.value) for reading in readings)


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("80G", ("80GB", "80GiB")),
        ("80 g", ("80GB", "80GiB")),
        ("80gb", ("80GB", "80Gb")),
        ("80", ("80GB", "80GiB")),
        ("80Gb", ("bits", "10GB")),
        ("80gib", ("80GiB",)),
        ("80GB/s", ("a rate", "80GB")),
    ],
)
def test_an_ambiguous_capacity_is_refused_with_its_readings(
    text: str, readings: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_bytes(text)
    assert all(reading in str(refusal.value) for reading in readings)


@pytest.mark.parametrize("unit", ["", "B", "GB", "Gb/s", "GB/s"])
@pytest.mark.parametrize(
    "number",
    ["", "nan", "inf", "-inf", "-1", "0", "0.0", "1,000", "1/2", "0x10", "1e999", "+5", "1__0",
     "٣", "1e-", "--1", "1" * 400],
)  # fmt: skip
def test_what_is_not_a_positive_number_is_refused(number: str, unit: str) -> None:
    for parse in (parse_count, parse_bytes, parse_bandwidth_bytes_per_second):
        with pytest.raises(SpecError) as refusal:
            parse(number + unit)
        assert "\n" not in str(refusal.value)


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_one_line_that_says_why_not(text: str) -> None:
    for parse in (parse_count, parse_bytes, parse_bandwidth_bytes_per_second):
        try:
            value = parse(text)
        except SpecError as refusal:
            check_one_line(refusal)
        else:
            assert 0 < value < math.inf


@given(st.integers(1, 10**18))
def test_a_count_reads_back_whole_and_as_printed(count: int) -> None:
    assert parse_count(str(count)) == count
    assert parse_count(f"{count:_}") == count
    if count >= 1000:
        assert parse_count(format_count(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(1, 2**59))
def test_bytes_read_back_as_printed(num_bytes: int) -> None:
    assert parse_bytes(f"{num_bytes}B") == num_bytes
    assert parse_bytes(format_gb(num_bytes)) == pytest.approx(num_bytes, rel=0.006)
    printed = format_gib(num_bytes).replace(",", "")
    if num_bytes < 2**50:
        assert parse_bytes(printed) == pytest.approx(num_bytes, rel=0.051)


@given(st.floats(1e3, 1e15))
def test_bandwidths_read_back_as_printed_in_bytes_and_in_bits(bytes_per_second: float) -> None:
    for text in (format_bandwidth(bytes_per_second), format_bit_bandwidth(bytes_per_second)):
        read = parse_bandwidth_bytes_per_second(text)
        assert read == pytest.approx(bytes_per_second, rel=0.006)


@given(st.integers(1, 10**4), st.sampled_from(["k", "M", "G", "T"]))
def test_a_byte_is_eight_bits(number: int, prefix: str) -> None:
    in_bytes = parse_bandwidth_bytes_per_second(f"{number}{prefix}B/s")
    in_bits = parse_bandwidth_bytes_per_second(f"{number}{prefix}b/s")
    assert in_bytes == 8 * in_bits


@given(st.floats(1e-9, 1e9))
def test_durations_keep_their_size_in_any_unit(seconds: float) -> None:
    scales = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}
    number, unit = format_seconds(seconds).split(" ")
    assert float(number) * scales[unit] == pytest.approx(seconds, rel=0.006)
    assert re.fullmatch(r"[0-9.]+(e-[0-9]+)?", number)


def test_examples_print_as_people_write_them() -> None:
    assert format_count(70_553_706_496) == "70.6 B"
    assert format_gib(79.15 * units.GIB) == "79.2 GiB"
    assert format_gib(474.7 * units.MIB) == "474.7 MiB"
    assert format_gb(28e9) == "28.0 GB"
    assert format_bandwidth(450e9) == "450 GB/s"
    assert format_bit_bandwidth(50e9) == "400 Gb/s"
    assert format_seconds(0.163) == "163 ms"
    assert format_seconds(0) == "0.00 us"
    assert format_seconds(117, beside=131) == "1.95 min"
    assert format_seconds(1.04, beside=0.95) == "1040 ms"
    assert format_percent(0.4321) == "43.2 %"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("14d", 1_209_600),
        ("36h", 129_600),
        ("1.5 days", 129_600),
        ("90min", 5400),
        ("2w", 1_209_600),
        ("90s", 90),
        ("100ms", 0.1),
        ("79000h", 79000 * 3600),
        ("9y", 9 * 365 * 86400),
    ],
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["14", "14 moons", "0s", "0d", "-3d", "-1h", "d", "h", "1e9 y", "1e99y", "3m", ""]
)
def test_a_duration_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_seconds(text, name="--deadline")
    check_one_line(refused.value)


def test_money_and_energy_print_in_one_unit_with_their_bands() -> None:
    assert format_money(2.1) == "$2.10"
    assert format_money(40_661.4) == "$40,661"
    assert format_money(1_270_000) == "$1.27 M"
    assert format_money(950_000, beside=1_270_000) == "$0.95 M"
    assert format_kwh(412) == "412 kWh"
    assert format_kwh(11_800) == "11.8 MWh"
    assert format_kwh(9_600, beside=1_180_000) == "0.0096 GWh"


def test_few_gpu_hours_are_not_none() -> None:
    assert [format_gpu_hours(hours) for hours in (12_345.6, 10, 9.87, 0.107)] == [
        "12,346",
        "10",
        "9.9",
        "0.11",
    ]
    assert format_gpu_hours(9.2, beside=11) == "9"
