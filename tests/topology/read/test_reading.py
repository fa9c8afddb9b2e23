"""Reading: a text says a number, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.read.reading import (
    first_line,
    is_name,
    labelled,
    numbers_in_list,
    whole_number,
)


@pytest.mark.parametrize("text", [None, "", "-1", "1.5", "0x10", "12 kB", "²", "٣", "9" * 19])
def test_what_is_no_plain_number_is_none(text: str | None) -> None:
    assert whole_number(text) is None


@given(st.integers(0, 10**18 - 1))
def test_a_number_is_read_back(number: int) -> None:
    assert whole_number(f" {number}\n") == number


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("0", {0}),
        ("", None),
        ("3-1", None),
        ("0-", None),
        ("a", None),
        ("0-99999", None),
        (",".join(["0-65535"] * 10**4), None),
    ],
)
def test_a_kernel_list_is_its_numbers(text: str, numbers: set[int] | None) -> None:
    assert numbers_in_list(text) == numbers


@pytest.mark.parametrize(
    ("text", "line"), [("a b\nc\n", "a b"), ("\n", None), (None, None), ("\x1b[31m", None)]
)
def test_the_first_line_is_printable_or_none(text: str | None, line: str | None) -> None:
    assert first_line(text) == line


@pytest.mark.parametrize(
    ("text", "named"),
    [("mlx5_0", True), ("eth0.100", True), ("a b", False), ("a/b", False), ("\x1b[31m", False)],
)
def test_a_name_is_one_printable_word(text: str, named: bool) -> None:
    assert is_name(text) is named


def test_a_label_is_the_whole_word_before_the_colon() -> None:
    text = "On-line CPU(s) list: 0-3\nCPU(s):  4\nEmpty:\n"
    assert labelled(text, "CPU(s)") == "4"
    assert labelled(text, "Empty") is None
    assert labelled(text, "list") is None
